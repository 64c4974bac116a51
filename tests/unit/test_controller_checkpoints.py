"""Completeness and manifests of checkpoints, what readers get of them, and the checkpoint that an attempt starts from."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import frames
from raysgd.controller.checkpoints.coordinator import CheckpointCoordinator
from raysgd.controller.checkpoints.index import CheckpointIndex, CheckpointReads
from raysgd.controller.checkpoints.pending import PendingCheckpoints, Score
from raysgd.controller.commands import EmitFrame
from raysgd.controller.frames import Closing
from raysgd.controller.run_plan import RunPlan, Start
from raysgd.session.events import PartFailed, PartSafe
from support.simulation import part, saved, uri_of


def pending_checkpoints(
    world_size: int = 2, first_number: int = 1, iterations_before: int = 0, is_resumed: bool = False, **reduce: str
) -> PendingCheckpoints:
    return PendingCheckpoints(
        3,
        world_size,
        first_number,
        Start("/given" if is_resumed else None, iterations_before),
        reduce,
    )


def save(
    pending: PendingCheckpoints, call: int = 0, reports: int = 1, ranks: tuple[int, ...] = (0, 1), **flags: Any
) -> None:
    """Save on the given ranks, and make their parts durable."""
    for rank in ranks:
        assert pending.on_event(rank, saved(call, reports, **flags)) is None
        pending.on_event(rank, part(call))


def numbers(pending: PendingCheckpoints) -> list[int]:
    return [manifest.number for manifest in pending.pop_complete()]


@pytest.mark.parametrize(
    ("unsharded_digest", "is_reshardable"),
    [(("a", "a"), True), (("a", "b"), False), (("a", None), False), ((None, None), False)],
)
def test_parts_that_differ_only_in_array_shards_are_reshardable(
    unsharded_digest: tuple[str | None, str | None], is_reshardable: bool
) -> None:
    pending = pending_checkpoints()
    for rank in (0, 1):
        pending.on_event(rank, saved(all_ranks=True))
        pending.on_event(rank, replace(part(), unsharded_digest=unsharded_digest[rank]))
    (manifest,) = pending.pop_complete()
    assert manifest.is_reshardable is is_reshardable
    assert Manifest.from_json(manifest.to_json()) == manifest


# -- completeness ------------------------------------------------------------------------------------------------------


def test_checkpoint_is_complete_when_all_ranks_saved_and_all_parts_are_durable() -> None:
    steps = [
        lambda pending: pending.on_event(0, saved()),
        lambda pending: pending.on_event(0, part()),
        lambda pending: pending.on_event(1, saved()),
        lambda pending: pending.on_event(1, part()),
    ]
    for order in itertools.permutations(steps):
        pending = pending_checkpoints()
        for step in order[:-1]:
            step(pending)
            assert numbers(pending) == []
        order[-1](pending)
        assert numbers(pending) == [1]
        assert numbers(pending) == []  # each checkpoint is returned once


def test_save_calls_of_ranks_are_matched_by_number() -> None:
    pending = pending_checkpoints()
    save(pending, 0, ranks=(0,))
    save(pending, 1, reports=2, ranks=(0,))
    save(pending, 0, ranks=(1,))
    assert numbers(pending) == [1]
    save(pending, 1, reports=2, ranks=(1,))
    assert numbers(pending) == [2]


def test_checkpoints_completed_together_are_ordered_by_number() -> None:
    pending = pending_checkpoints()
    for call in range(3):
        save(pending, call, ranks=(1,))
    for call in (2, 0, 1):
        save(pending, call, ranks=(0,))
    assert numbers(pending) == [1, 2, 3]


def test_rank_that_has_returned_is_not_waited_for() -> None:
    pending = pending_checkpoints()
    save(pending)
    assert pending.on_returned(1) is None
    save(pending, 1, ranks=(0,))
    assert pending.on_returned(0) is None
    assert numbers(pending) == [1, 2]


def test_return_of_the_last_missing_rank_completes_a_checkpoint() -> None:
    pending = pending_checkpoints(3)
    save(pending, ranks=(0, 1, 2))
    save(pending, 1, ranks=(0, 1))
    assert numbers(pending) == [1]
    assert pending.on_returned(2) is None
    assert numbers(pending) == [2]


def test_rank_may_return_without_a_save_after_resume() -> None:
    pending = pending_checkpoints(is_resumed=True)
    assert pending.on_returned(1) is None
    save(pending, ranks=(0,))
    assert pending.on_returned(0) is None
    assert numbers(pending) == [1]


@pytest.mark.parametrize("is_first_to_leave", [False, True])
def test_rank_that_returns_without_a_save_is_an_error(is_first_to_leave: bool) -> None:
    pending = pending_checkpoints()
    if is_first_to_leave:
        assert pending.on_returned(1) is None
        error = pending.on_event(0, saved())
    else:
        assert pending.on_event(0, saved()) is None
        error = pending.on_returned(1)
    assert error is not None
    assert "rank 0: 1, rank 1: 0" in error and "rank 1 has returned without having called it" in error
    pending.on_event(0, part())
    pending.on_returned(0)
    assert numbers(pending) == []


@pytest.mark.parametrize("all_ranks", [False, True])
@pytest.mark.parametrize("is_first_to_leave", [False, True])
def test_save_call_without_state_of_a_returned_rank_is_an_error(is_first_to_leave: bool, all_ranks: bool) -> None:
    giver = 1 if all_ranks else 0
    pending = pending_checkpoints()
    save(pending, all_ranks=all_ranks)
    if is_first_to_leave:
        assert pending.on_returned(giver) is None
        error = pending.on_event(1 - giver, saved(1, all_ranks=all_ranks))
    else:
        assert pending.on_event(1 - giver, saved(1, all_ranks=all_ranks)) is None
        error = pending.on_returned(giver)
    assert error is not None
    assert f"rank {giver} has returned without giving a state to call 2" in error
    pending.on_event(1 - giver, part(1))
    assert numbers(pending) == [1]  # the first call is complete


def test_failed_write_is_not_a_mismatch_when_ranks_return() -> None:
    pending = pending_checkpoints()
    save(pending, 0)
    save(pending, 1, ranks=(0,))
    pending.drop(1)
    save(pending, 1, ranks=(1,))
    assert pending.on_returned(0) is None and pending.on_returned(1) is None
    assert numbers(pending) == [1]


def test_failed_part_makes_no_checkpoint() -> None:
    pending = pending_checkpoints()
    save(pending, ranks=(1,))
    assert pending.drop(0) == 1
    assert pending.on_event(0, saved()) is None  # the failed write arrives before the call
    save(pending, 1, reports=2)
    assert numbers(pending) == [2]


def test_failed_save_call_stays_failed_after_ranks_return() -> None:
    pending = pending_checkpoints(3)
    pending.on_event(1, saved())
    pending.drop(0)
    pending.on_returned(1)
    save(pending, ranks=(0, 2))
    assert numbers(pending) == []
    save(pending, call=1, ranks=(0, 2))
    assert numbers(pending) == [2]


@given(world_size=st.integers(1, 4), num_calls=st.integers(1, 4), data=st.data())
def test_any_interleaving_commits_every_checkpoint_once(world_size: int, num_calls: int, data: st.DataObject) -> None:
    pending = pending_checkpoints(world_size)
    left = {rank: [(call, kind) for call in range(num_calls) for kind in "sp"] for rank in range(world_size)}
    made: list[int] = []
    while left:
        rank = data.draw(st.sampled_from(sorted(left)))
        call, kind = left[rank].pop(0)
        error = pending.on_event(rank, saved(call)) if kind == "s" else pending.on_event(rank, part(call))
        assert error is None
        if not left[rank]:
            del left[rank]
            assert pending.on_returned(rank) is None
        made += numbers(pending)
    assert made == list(range(1, num_calls + 1))


# -- manifests ---------------------------------------------------------------------------------------------------------


def test_manifest_continues_numbers_and_iterations_of_the_run() -> None:
    pending = pending_checkpoints(first_number=5, iterations_before=40)
    save(pending, 0, reports=2)
    save(pending, 1, reports=3)
    first, second = pending.pop_complete()
    assert (first.number, first.iteration, first.attempt, first.world_size) == (5, 42, 3, 2)
    assert (second.number, second.iteration) == (6, 43)


def test_manifest_lists_files_and_states_of_ranks() -> None:
    pending = pending_checkpoints()
    pending.on_event(0, saved())
    pending.on_event(0, PartSafe(0, (FileEntry("a", 3, 7), FileEntry("b", 4, 8)), {"generators": {"python": 1}}))
    pending.on_event(1, saved())
    pending.on_event(1, PartSafe(0, (), {"generators": {"python": 2}}))
    (manifest,) = pending.pop_complete()
    assert manifest.parts == {0: [FileEntry("a", 3, 7), FileEntry("b", 4, 8)]}
    assert manifest.rank_states == {0: {"generators": {"python": 1}}, 1: {"generators": {"python": 2}}}
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_manifest_has_the_flags_of_the_save_calls() -> None:
    pending = pending_checkpoints()
    save(pending, all_ranks=True, is_files=True, allow_pickle=True)
    (manifest,) = pending.pop_complete()
    assert (manifest.all_ranks, manifest.is_files, manifest.allow_pickle) == (True, True, True)


def test_manifest_metrics_are_rank_0s_or_reduced() -> None:
    for reduce, expected in (({}, 1.0), ({"loss": "mean"}, 2.0)):
        pending = pending_checkpoints(**reduce)
        for rank, loss in ((1, 3.0), (0, 1.0)):
            pending.on_event(rank, saved(metrics={"loss": loss}))
            pending.on_event(rank, part())
        (manifest,) = pending.pop_complete()
        assert manifest.metrics == {"loss": expected}


def test_copy_of_the_model_counts_once_in_the_metrics_of_a_checkpoint() -> None:
    pending = PendingCheckpoints(3, 4, reduce={"loss": "mean", "rows": "sum"}, workers_per_replica=2)
    for rank, (loss, rows) in enumerate([(1.0, 8), (1.0, 8), (3.0, 4), (3.0, 4)]):
        pending.on_event(rank, saved(metrics={"loss": loss, "rows": rows}))
        pending.on_event(rank, part())
    (manifest,) = pending.pop_complete()
    assert manifest.metrics == {"loss": 2.0, "rows": 12}


# -- scores: the round after a save ------------------------------------------------------------------------------------


def score(pending: PendingCheckpoints, rank: int, loss: float) -> None:
    """Make a rank report the round that the first checkpoint belongs to."""
    pending.on_reports(rank, 1, [Closing(1, 0, 7.0, {"loss": loss})])


def saving(*made: int, **reduce: str) -> PendingCheckpoints:
    """Return the calls of ranks that made a checkpoint; `made` is the number of reports of each rank before it."""
    pending = pending_checkpoints(**reduce)
    for rank, count in enumerate(made or (0, 0)):
        pending.on_event(rank, saved(reports=count))
        pending.on_event(rank, part())
    assert numbers(pending) == [1]
    return pending


def has_round(pending: PendingCheckpoints) -> bool:
    """Return whether the first checkpoint, which is complete now, has its round, and no score follows it."""
    (complete,) = pending.pop_complete()
    return (complete.metrics, complete.time_total_s) == ({"loss": 1.0}, 7.0) and pending.pop_scores() == []


def test_score_is_complete_when_all_running_ranks_reported() -> None:
    pending = saving(loss="mean")
    score(pending, 1, 3.0)
    assert pending.pop_scores() == []
    score(pending, 0, 1.0)
    assert pending.pop_scores() == [(1, {"loss": 2.0}, 7.0)]
    assert pending.pop_scores() == []


def test_score_does_not_wait_for_returned_ranks() -> None:
    pending = saving()
    score(pending, 0, 1.0)
    pending.on_returned(1)
    assert pending.pop_scores() == [(1, {"loss": 1.0}, 7.0)]


def test_score_of_some_ranks_is_complete_when_the_attempt_ends() -> None:
    pending = saving(loss="mean")
    score(pending, 1, 3.0)
    assert pending.pop_scores() == []
    assert pending.pop_scores(is_over=True) == [(1, {"loss": 3.0}, 7.0)]


def test_score_after_the_end_of_the_attempt_does_not_give_a_second_round() -> None:
    pending = saving(loss="mean")
    score(pending, 1, 3.0)
    assert pending.pop_scores(is_over=True) == [(1, {"loss": 3.0}, 7.0)]
    score(pending, 0, 1.0)
    assert pending.pop_scores() == []


def test_score_before_its_checkpoint_is_part_of_it() -> None:
    pending = pending_checkpoints()
    for rank in range(2):
        score(pending, rank, 1.0)
    assert pending.pop_scores() == []
    for rank in range(2):
        pending.on_event(rank, saved(awaits_round=True))
        pending.on_event(rank, part())
    assert has_round(pending)


def test_score_before_its_checkpoint_is_kept_when_the_attempt_ends() -> None:
    pending = pending_checkpoints()
    score(pending, 0, 1.0)
    assert pending.pop_scores(is_over=True) == []
    for rank in range(2):
        pending.on_event(rank, saved(awaits_round=True))
        pending.on_event(rank, part())
    assert has_round(pending)


def test_score_excludes_rank_that_saved_after_its_report() -> None:
    pending = saving(1, 0)
    score(pending, 1, 3.0)
    assert pending.pop_scores() == []
    pending.on_returned(0)
    assert pending.pop_scores() == [], "its report belongs to the round that the checkpoint already counts"
    pending = saving(1, 0)
    score(pending, 0, 1.0)
    assert pending.pop_scores() == [(1, {"loss": 1.0}, 7.0)]


# -- save calls that do not match --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flag", "named"), [("all_ranks", "different all_ranks"), ("is_files", "different files")])
def test_save_calls_with_different_flags_are_an_error(flag: str, named: str) -> None:
    pending = pending_checkpoints()
    assert pending.on_event(0, saved(4, **{flag: True})) is None
    error = pending.on_event(1, saved(4, **{flag: False}))
    assert error is not None
    assert named in error and "call 5" in error and "{0: True, 1: False}" in error
    for rank in range(2):
        pending.on_event(rank, part(4))
    assert numbers(pending) == []


def test_rank_that_reports_past_the_first_save_without_saving_is_an_error() -> None:
    pending = pending_checkpoints()
    pending.on_reports(1, 2)
    assert pending.on_event(0, saved(0, reports=1)) is None
    pending.on_reports(1, 3)
    error = pending.on_event(0, saved(1, reports=2))
    assert error is not None
    assert "rank 0: 2, rank 1: 0" in error and "rank 1 continued without calling it" in error


def test_rank_with_fewer_saves_is_allowed_while_it_runs() -> None:
    pending = pending_checkpoints()
    for call in range(5):
        pending.on_reports(0, call + 1)
        assert pending.on_event(0, saved(call, reports=call + 1)) is None
    assert pending.on_event(1, saved(0, reports=1)) is None


def test_saves_at_different_data_positions_are_an_error() -> None:
    for first, second in itertools.permutations((part(consumed=20), part(consumed=30))):
        pending = pending_checkpoints()
        assert pending.on_event(0, first) is None  # a part may be durable before the call is known
        error = pending.on_event(1, second)
        assert error is not None and "different positions in dataset 'train'" in error
        assert "epoch 2, 20 rows consumed on rank" in error and "epoch 2, 30 rows consumed on rank" in error
        for rank in range(2):
            pending.on_event(rank, saved())
        assert numbers(pending) == []


def test_data_positions_are_compared_within_one_save_call() -> None:
    pending = pending_checkpoints()
    for call, rank in itertools.product(range(2), range(2)):
        assert pending.on_event(rank, saved(call)) is None
        assert pending.on_event(rank, part(call, consumed=20 * call)) is None
    assert numbers(pending) == [1, 2]


def test_ranks_may_return_without_any_save() -> None:
    pending = pending_checkpoints()
    assert pending.on_returned(0) is None
    assert pending.on_returned(1) is None


# -- the checkpoint index ----------------------------------------------------------------------------------------------

GIVEN = Start("/given", iteration=10, time_total_s=5.0)


def manifest(number: int, **metrics: float) -> Manifest:
    return Manifest(
        number=number,
        attempt=1,
        iteration=number,
        time_total_s=float(number),
        world_size=1,
        created_s=0.0,
        metrics=metrics,
        awaits_round=True,
    )


def test_empty_index_starts_from_the_given_checkpoint() -> None:
    assert CheckpointIndex(GIVEN, RetentionPolicy()).start(uri_of) == GIVEN


def test_next_attempt_starts_from_newest_checkpoint_not_the_best() -> None:
    checkpoint_index = CheckpointIndex(GIVEN, RetentionPolicy(1, "acc"))
    checkpoint_index.add(manifest(1, acc=0.9))
    assert checkpoint_index.add(manifest(2, acc=0.1)) == []
    assert checkpoint_index.start(uri_of) == Start(uri_of(2), 2, 2.0, 2)
    assert checkpoint_index.add(manifest(3, acc=0.2)) == [2]
    assert checkpoint_index.start(uri_of) == Start(uri_of(3), 3, 3.0, 3)


def test_retention_uses_scores_that_arrive_after_the_commit() -> None:
    checkpoint_index = CheckpointIndex(Start(), RetentionPolicy(1, "acc"))
    checkpoint_index.add(manifest(1))
    scored = checkpoint_index.score(Score(1, {"acc": 0.9}, 0.0))
    assert scored is not None
    assert (scored.metrics, scored.iteration) == ({"acc": 0.9}, 2)
    checkpoint_index.add(manifest(2))
    checkpoint_index.score(Score(2, {"acc": 0.1}, 0.0))
    assert checkpoint_index.add(manifest(3)) == [2]


def test_round_of_a_checkpoint_with_metrics_of_its_own_keeps_them() -> None:
    checkpoint_index = CheckpointIndex(Start(), RetentionPolicy())
    checkpoint_index.add(manifest(1, acc=0.5))
    scored = checkpoint_index.score(Score(1, {"acc": 0.9}, 0.0))
    assert scored is not None
    assert (scored.metrics, scored.iteration) == ({"acc": 0.5}, 2)


def test_score_of_a_deleted_checkpoint_is_ignored() -> None:
    checkpoint_index = CheckpointIndex(Start(), RetentionPolicy(1))
    checkpoint_index.add(manifest(1))
    checkpoint_index.add(manifest(2))
    assert checkpoint_index.score(Score(1, {"acc": 0.9}, 0.0)) is None


# -- announcements of saves that are not on storage yet ----------------------------------------------------------------


class Announcements:
    """A coordinator, and the frames that it sent to readers."""

    def __init__(self, start: Start | None = None, **settings: Any) -> None:
        plan = RunPlan(FailureConfig(), CheckpointConfig(**settings), start or Start())
        self._commands: list[Any] = []
        self.coordinator = CheckpointCoordinator(plan, uri_of=uri_of, emit=self._commands.append)

    def save(self, call: int, reports: int, rank: int = 0) -> None:
        self.coordinator.on_event(rank, saved(call, reports))

    def of_kind(self, kind: str) -> list[tuple[Any, ...]]:
        emitted = [command for command in self._commands if isinstance(command, EmitFrame) and command.kind == kind]
        return [tuple(frame.data.values()) for frame in emitted]


@pytest.mark.parametrize("reports", [(1, 2), (0, 1)], ids=["report before save", "save before report"])
def test_each_save_is_announced_once_with_its_iteration(reports: tuple[int, int]) -> None:
    run = Announcements(Start("from", 4, 1.0))
    run.coordinator.begin_attempt(1, 2)
    for call, num_reports in enumerate(reports):
        for rank in (0, 1):
            run.save(call, num_reports, rank)
    assert run.of_kind(frames.SAVING) == [(1, 5), (2, 6)]


def test_number_without_checkpoint_is_announced_again_by_next_attempt() -> None:
    run = Announcements()
    run.coordinator.begin_attempt(1, 1)
    run.save(0, 3)
    run.coordinator.end_attempt(0)
    run.coordinator.begin_attempt(2, 1)
    run.save(0, 1)
    assert run.of_kind(frames.SAVING) == [(1, 3), (1, 1)]


def test_failed_save_is_announced() -> None:
    run = Announcements()
    run.coordinator.begin_attempt(1, 1)
    run.save(0, 1)
    run.coordinator.on_part_failed(PartFailed(0, "the disk is full"))
    assert run.of_kind(frames.NOT_SAVED) == [(1,)]


def test_saves_to_memory_alone_are_not_announced() -> None:
    run = Announcements(storage_interval=2)
    run.coordinator.begin_attempt(1, 1)
    for call in range(4):
        run.save(call, call + 1)
    assert run.of_kind(frames.SAVING) == [(2, 2), (4, 4)]


# -- reads during an attempt --------------------------------------------------------------------------------------------


def test_all_ranks_get_the_newest_checkpoint_of_the_first_request() -> None:
    reads = CheckpointReads()
    assert reads.newest_for(0, 1, None) is None
    assert reads.newest_for(0, 1, 1) is None  # a checkpoint was committed between the requests of two ranks
    assert reads.newest_for(1, 1, 1) == 1
    assert reads.newest_for(1, 1, 2) == 1
    assert reads.newest_for(2, 2, 2) == 2


def test_checkpoint_that_no_rank_reads_can_be_deleted_immediately() -> None:
    reads = CheckpointReads()
    assert reads.can_delete(1)
    reads.newest_for(0, 1, 2)
    assert reads.can_delete(1)
    assert reads.on_committed(3) == [] == reads.end()


def test_checkpoint_that_ranks_read_stays_until_all_ranks_have_saved_again() -> None:
    reads = CheckpointReads(first_number=5)
    reads.on_committed(5)
    assert reads.newest_for(0, 2, 5) == 5  # rank 0 has saved 5 and 6; rank 1 has not requested it yet
    assert reads.on_committed(6) == []
    assert not reads.can_delete(5)
    assert reads.newest_for(0, 2, 6) == 5
    assert reads.on_committed(7) == [5]
    assert reads.on_committed(8) == []


def test_late_request_does_not_shorten_the_time_that_a_checkpoint_stays() -> None:
    reads = CheckpointReads()
    reads.newest_for(0, 1, 1)
    reads.newest_for(1, 2, 1)
    reads.newest_for(0, 1, 1)  # the first request of another rank
    reads.on_committed(2)
    assert not reads.can_delete(1)


def test_checkpoint_that_all_ranks_have_read_can_be_deleted() -> None:
    reads = CheckpointReads()
    reads.newest_for(0, 1, 1)
    assert reads.on_committed(2) == []
    assert reads.can_delete(1)


def test_delayed_deletions_are_due_at_the_end_of_the_attempt() -> None:
    reads = CheckpointReads()
    reads.newest_for(0, 3, 1)
    reads.newest_for(1, 3, 2)
    assert not reads.can_delete(2) and not reads.can_delete(1)
    assert reads.end() == [1, 2]
    assert reads.end() == []


def test_all_ranks_get_the_list_of_the_first_request_and_can_read_it() -> None:
    reads, committed = CheckpointReads(), [manifest(1), manifest(2)]
    assert reads.list_for(0, 2, committed) == committed
    assert reads.on_committed(2) == []
    assert not reads.can_delete(1)  # rank 1 may still ask for the list, and read what is on it
    assert reads.list_for(0, 2, [manifest(2), manifest(3)]) == committed
    assert reads.on_committed(3) == [1]
    assert reads.list_for(1, 3, [manifest(2), manifest(3)]) == [manifest(2), manifest(3)]
