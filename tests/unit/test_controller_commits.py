"""Which saves make a checkpoint, what its manifest says, and where the shelf goes on from."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.checkpoint.manifest import FileEntry, Manifest
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.controller.commits import CheckpointCollector
from raysgd.controller.shelf import Shelf, Start
from raysgd.session.events import PartSafe, Scored
from raysgd.testing.simulation import part, saved, uri_of


def collector(
    world_size: int = 2, first_number: int = 1, iterations_before: int = 0, is_resumed: bool = False, **reduce: str
) -> CheckpointCollector:
    return CheckpointCollector(
        3,
        world_size,
        first_number=first_number,
        iterations_before=iterations_before,
        reduce=reduce,
        is_resumed=is_resumed,
    )


def save(
    desk: CheckpointCollector, call: int = 0, reports: int = 1, ranks: tuple[int, ...] = (0, 1), **flags: Any
) -> None:
    """These ranks save, and their bytes are safe."""
    for rank in ranks:
        assert desk.saved(rank, saved(call, reports, **flags)) is None
        desk.part_safe(rank, part(call))


def numbers(desk: CheckpointCollector) -> list[int]:
    return [manifest.number for manifest in desk.complete()]


@pytest.mark.parametrize(
    ("beside", "is_reshardable"),
    [(("a", "a"), True), (("a", "b"), False), (("a", None), False), ((None, None), False)],
)
def test_parts_that_differ_only_in_their_pieces_can_be_resharded(
    beside: tuple[str | None, str | None], is_reshardable: bool
) -> None:
    desk = collector()
    for rank in (0, 1):
        desk.saved(rank, saved(all_ranks=True))
        desk.part_safe(rank, replace(part(), beside=beside[rank]))
    (manifest,) = desk.complete()
    assert manifest.is_reshardable is is_reshardable
    assert Manifest.from_json(manifest.to_json()) == manifest


# -- when it is complete -----------------------------------------------------------------------------------------------


def test_a_checkpoint_is_complete_when_all_ranks_called_and_all_bytes_are_safe() -> None:
    steps = [
        lambda desk: desk.saved(0, saved()),
        lambda desk: desk.part_safe(0, part()),
        lambda desk: desk.saved(1, saved()),
        lambda desk: desk.part_safe(1, part()),
    ]
    for order in itertools.permutations(steps):
        desk = collector()
        for step in order[:-1]:
            step(desk)
            assert numbers(desk) == []
        order[-1](desk)
        assert numbers(desk) == [1]
        assert numbers(desk) == []  # each is given once


def test_calls_are_matched_by_their_number_not_by_when_they_arrive() -> None:
    desk = collector()
    save(desk, 0, ranks=(0,))
    save(desk, 1, reports=2, ranks=(0,))
    save(desk, 0, ranks=(1,))
    assert numbers(desk) == [1]
    save(desk, 1, reports=2, ranks=(1,))
    assert numbers(desk) == [2]


def test_several_that_become_complete_at_once_come_oldest_first() -> None:
    desk = collector()
    for call in range(3):
        save(desk, call, ranks=(1,))
    for call in (2, 0, 1):
        save(desk, call, ranks=(0,))
    assert numbers(desk) == [1, 2, 3]


def test_a_rank_that_has_returned_is_not_waited_for() -> None:
    desk = collector()
    save(desk)
    assert desk.left(1) is None
    save(desk, 1, ranks=(0,))
    assert desk.left(0) is None
    assert numbers(desk) == [1, 2]


def test_a_rank_that_returns_completes_what_only_it_was_missing_from() -> None:
    desk = collector(3)
    save(desk, ranks=(0, 1, 2))
    save(desk, 1, ranks=(0, 1))
    assert numbers(desk) == [1]
    assert desk.left(2) is None
    assert numbers(desk) == [2]


def test_a_rank_that_made_all_its_saves_before_the_attempt_may_make_none_in_it() -> None:
    desk = collector(is_resumed=True)
    assert desk.left(1) is None
    save(desk, ranks=(0,))
    assert desk.left(0) is None
    assert numbers(desk) == [1]


@pytest.mark.parametrize("is_first_to_leave", [False, True])
def test_a_rank_that_returns_without_a_save_breaks_the_rule_and_nothing_is_committed(is_first_to_leave: bool) -> None:
    desk = collector()
    if is_first_to_leave:
        assert desk.left(1) is None
        rule = desk.saved(0, saved())
    else:
        assert desk.saved(0, saved()) is None
        rule = desk.left(1)
    assert rule is not None
    assert "rank 0: 1, rank 1: 0" in rule and "rank 1 has returned without having called it" in rule
    desk.part_safe(0, part())
    desk.left(0)
    assert numbers(desk) == []


@pytest.mark.parametrize("all_ranks", [False, True])
@pytest.mark.parametrize("is_first_to_leave", [False, True])
def test_a_call_whose_state_can_no_longer_come_breaks_the_rule(is_first_to_leave: bool, all_ranks: bool) -> None:
    giver = 1 if all_ranks else 0
    desk = collector()
    save(desk, all_ranks=all_ranks)
    if is_first_to_leave:
        assert desk.left(giver) is None
        rule = desk.saved(1 - giver, saved(1, all_ranks=all_ranks))
    else:
        assert desk.saved(1 - giver, saved(1, all_ranks=all_ranks)) is None
        rule = desk.left(giver)
    assert rule is not None
    assert f"rank {giver} has returned without giving a state to call 2" in rule
    desk.part_safe(1 - giver, part(1))
    assert numbers(desk) == [1]  # it is whole


def test_a_call_that_could_not_be_written_breaks_no_rule_when_its_ranks_return() -> None:
    desk = collector()
    save(desk, 0)
    save(desk, 1, ranks=(0,))
    desk.part_failed(1)
    save(desk, 1, ranks=(1,))
    assert desk.left(0) is None and desk.left(1) is None
    assert numbers(desk) == [1]


def test_a_part_that_failed_makes_no_checkpoint_whatever_else_arrives() -> None:
    desk = collector()
    save(desk, ranks=(1,))
    assert desk.part_failed(0) == 1
    assert desk.saved(0, saved()) is None  # the writer was quicker than the call
    save(desk, 1, reports=2)
    assert numbers(desk) == [2]


def test_a_call_that_was_given_up_stays_so_when_the_rank_that_failed_has_returned() -> None:
    desk = collector(3)
    desk.saved(1, saved())
    desk.part_failed(0)
    desk.left(1)
    save(desk, ranks=(0, 2))
    assert numbers(desk) == []
    save(desk, call=1, ranks=(0, 2))
    assert numbers(desk) == [2]


@given(world_size=st.integers(1, 4), num_calls=st.integers(1, 4), data=st.data())
def test_any_interleaving_commits_every_checkpoint_once(world_size: int, num_calls: int, data: st.DataObject) -> None:
    desk = collector(world_size)
    left = {rank: [(call, kind) for call in range(num_calls) for kind in "sp"] for rank in range(world_size)}
    made: list[int] = []
    while left:
        rank = data.draw(st.sampled_from(sorted(left)))
        call, kind = left[rank].pop(0)
        rule = desk.saved(rank, saved(call)) if kind == "s" else desk.part_safe(rank, part(call))
        assert rule is None
        if not left[rank]:
            del left[rank]
            assert desk.left(rank) is None
        made += numbers(desk)
    assert made == list(range(1, num_calls + 1))


# -- what it says ------------------------------------------------------------------------------------------------------


def test_a_manifest_counts_on_from_where_the_attempt_began() -> None:
    desk = collector(first_number=5, iterations_before=40)
    save(desk, 0, reports=2)
    save(desk, 1, reports=3)
    first, second = desk.complete()
    assert (first.number, first.iteration, first.attempt, first.world_size) == (5, 42, 3, 2)
    assert (second.number, second.iteration) == (6, 43)


def test_a_manifest_lists_the_files_of_each_rank_that_has_some_and_the_states_of_all() -> None:
    desk = collector()
    desk.saved(0, saved())
    desk.part_safe(0, PartSafe(0, (("a", 3, 7), ("b", 4, 8)), {"generators": {"python": 1}}))
    desk.saved(1, saved())
    desk.part_safe(1, PartSafe(0, (), {"generators": {"python": 2}}))
    (manifest,) = desk.complete()
    assert manifest.parts == {0: [FileEntry("a", 3, 7), FileEntry("b", 4, 8)]}
    assert manifest.rank_states == {0: {"generators": {"python": 1}}, 1: {"generators": {"python": 2}}}
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_manifest_has_the_flags_of_the_calls() -> None:
    desk = collector()
    save(desk, all_ranks=True, is_files=True, trusted=True)
    (manifest,) = desk.complete()
    assert (manifest.all_ranks, manifest.is_files, manifest.trusted) == (True, True, True)


def test_the_metrics_are_rank_0s_or_reduced_as_results_are() -> None:
    for reduce, expected in (({}, 1.0), ({"loss": "mean"}, 2.0)):
        desk = collector(**reduce)
        for rank, loss in ((1, 3.0), (0, 1.0)):
            desk.saved(rank, saved(metrics={"loss": loss}))
            desk.part_safe(rank, part())
        (manifest,) = desk.complete()
        assert manifest.metrics == {"loss": expected}


# -- the round after a save --------------------------------------------------------------------------------------------


def score(loss: float, call: int = 0) -> Scored:
    return Scored(call, json.dumps({"loss": loss}).encode(), time_total_s=7.0)


def saving(*made: int, **reduce: str) -> CheckpointCollector:
    """Ranks that have made a checkpoint, after so many reports each."""
    desk = collector(**reduce)
    for rank, count in enumerate(made or (0, 0)):
        desk.saved(rank, saved(reports=count))
        desk.part_safe(rank, part())
    assert numbers(desk) == [1]
    return desk


def test_a_score_is_complete_when_all_running_ranks_made_the_report() -> None:
    desk = saving(loss="mean")
    desk.scored(1, score(3.0))
    assert desk.complete_scores() == []
    desk.scored(0, score(1.0))
    assert desk.complete_scores() == [(1, {"loss": 2.0}, 7.0)]
    assert desk.complete_scores() == []


def test_a_rank_that_returns_without_that_report_is_not_waited_for() -> None:
    desk = saving()
    desk.scored(0, score(1.0))
    desk.left(1)
    assert desk.complete_scores() == [(1, {"loss": 1.0}, 7.0)]


def test_when_the_attempt_is_over_what_some_ranks_reported_is_the_round() -> None:
    desk = saving(loss="mean")
    desk.scored(1, score(3.0))
    assert desk.complete_scores() == []
    assert desk.complete_scores(is_over=True) == [(1, {"loss": 3.0}, 7.0)]


def test_a_round_that_is_no_score_is_counted_all_the_same() -> None:
    desk = saving()
    desk.scored(0, Scored(0, None))
    desk.scored(1, Scored(0, None))
    assert desk.complete_scores() == [(1, None, 0.0)]


def test_a_score_that_comes_first_waits_for_its_checkpoint() -> None:
    desk = collector()
    for rank in range(2):
        desk.scored(rank, score(1.0))
    assert desk.complete_scores() == []
    for rank in range(2):
        desk.saved(rank, saved())
        desk.part_safe(rank, part())
    assert numbers(desk) == [1]
    assert desk.complete_scores() == [(1, {"loss": 1.0}, 7.0)]


def test_it_also_does_when_the_attempt_is_over_in_between() -> None:
    desk = collector()
    desk.scored(0, score(1.0))
    assert desk.complete_scores(is_over=True) == []
    for rank in range(2):
        desk.saved(rank, saved())
        desk.part_safe(rank, part())
    assert numbers(desk) == [1]
    assert desk.complete_scores() == [(1, {"loss": 1.0}, 7.0)]


def test_a_rank_that_saved_before_the_report_that_another_made_first_has_no_part_in_the_next_round() -> None:
    desk = saving(1, 0)
    desk.scored(1, score(3.0))
    assert desk.complete_scores() == []
    desk.left(0)
    assert desk.complete_scores() == [], "its report is of the round that the checkpoint counts already"
    desk = saving(1, 0)
    desk.scored(0, score(1.0))
    assert desk.complete_scores() == [(1, {"loss": 1.0}, 7.0)]


# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flag", "named"), [("all_ranks", "different all_ranks"), ("is_files", "different files")])
def test_calls_that_disagree_break_the_rule(flag: str, named: str) -> None:
    desk = collector()
    assert desk.saved(0, saved(4, **{flag: True})) is None
    rule = desk.saved(1, saved(4, **{flag: False}))
    assert rule is not None
    assert named in rule and "call 5" in rule and "{0: True, 1: False}" in rule
    for rank in range(2):
        desk.part_safe(rank, part(4))
    assert numbers(desk) == []


def test_a_rank_that_reported_past_the_first_save_without_saving_breaks_the_rule() -> None:
    desk = collector()
    desk.reported(1, 2)
    assert desk.saved(0, saved(0, reports=1)) is None
    desk.reported(1, 3)
    rule = desk.saved(0, saved(1, reports=2))
    assert rule is not None
    assert "rank 0: 2, rank 1: 0" in rule and "rank 1 went on without calling it" in rule


def test_a_rank_whose_calls_are_behind_breaks_no_rule_while_it_runs() -> None:
    desk = collector()
    for call in range(5):
        desk.reported(0, call + 1)
        assert desk.saved(0, saved(call, reports=call + 1)) is None
    assert desk.saved(1, saved(0, reports=1)) is None


def test_ranks_at_different_places_of_their_data_break_the_rule_and_make_no_checkpoint() -> None:
    for first, second in itertools.permutations((part(consumed=20), part(consumed=30))):
        desk = collector()
        assert desk.part_safe(0, first) is None  # a part may be safe before the call is known
        rule = desk.part_safe(1, second)
        assert rule is not None and "different places of dataset 'train'" in rule
        assert "epoch 2, 20 rows consumed on rank" in rule and "epoch 2, 30 rows consumed on rank" in rule
        for rank in range(2):
            desk.saved(rank, saved())
        assert numbers(desk) == []


def test_ranks_are_compared_within_one_call() -> None:
    desk = collector()
    for call, rank in itertools.product(range(2), range(2)):
        assert desk.saved(rank, saved(call)) is None
        assert desk.part_safe(rank, part(call, consumed=20 * call)) is None
    assert numbers(desk) == [1, 2]


def test_ranks_that_never_save_break_no_rule() -> None:
    desk = collector()
    assert desk.left(0) is None
    assert desk.left(1) is None


# -- the shelf ---------------------------------------------------------------------------------------------------------

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
    )


def test_an_empty_shelf_starts_where_the_run_began() -> None:
    assert Shelf(GIVEN, RetentionPolicy()).start(uri_of) == GIVEN


def test_the_next_start_is_the_newest_not_the_best() -> None:
    shelf = Shelf(GIVEN, RetentionPolicy(1, "acc"))
    shelf.add(manifest(1, acc=0.9))
    assert shelf.add(manifest(2, acc=0.1))[1] == []
    assert shelf.start(uri_of) == Start(uri_of(2), 2, 2.0, 2)
    assert shelf.add(manifest(3, acc=0.2))[1] == [2]
    assert shelf.start(uri_of) == Start(uri_of(3), 3, 3.0, 3)


def test_a_score_that_comes_late_is_what_a_checkpoint_is_kept_for() -> None:
    shelf = Shelf(Start(), RetentionPolicy(1, "acc"))
    shelf.add(manifest(1))
    amended = shelf.score(1, {"acc": 0.9})
    assert amended is not None
    assert (amended.metrics, amended.iteration) == ({"acc": 0.9}, 2)
    shelf.add(manifest(2))
    shelf.score(2, {"acc": 0.1})
    assert shelf.add(manifest(3))[1] == [2]


def test_a_score_that_comes_before_its_checkpoint_waits_for_it() -> None:
    shelf = Shelf(Start(), RetentionPolicy())
    assert shelf.score(1, {"acc": 0.9}, 5000.0) is None
    shown, _ = shelf.add(manifest(1))
    assert (shown.metrics, shown.iteration, shown.time_total_s) == ({"acc": 0.9}, 2, 5000.0)


def test_a_score_is_not_kept_for_the_number_that_a_later_attempt_gives_again() -> None:
    shelf = Shelf(Start(), RetentionPolicy())
    shelf.score(1, {"acc": 0.9})
    shelf.forget_scores()
    shown, _ = shelf.add(manifest(1))
    assert (shown.metrics, shown.iteration) == ({}, 1)


def test_a_round_that_is_no_score_leaves_a_checkpoint_its_own_metrics() -> None:
    shelf = Shelf(Start(), RetentionPolicy())
    shelf.add(manifest(1, acc=0.5))
    amended = shelf.score(1, None)
    assert amended is not None
    assert (amended.metrics, amended.iteration) == ({"acc": 0.5}, 2)


def test_a_score_of_a_checkpoint_that_is_gone_does_nothing() -> None:
    shelf = Shelf(Start(), RetentionPolicy(1))
    shelf.add(manifest(1))
    shelf.add(manifest(2))
    assert shelf.score(1, {"acc": 0.9}) is None
