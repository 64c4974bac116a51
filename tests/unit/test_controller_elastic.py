"""After which save an elastic group grows, when it waits, and when it does not grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller.state_machine.regrouping import GROWS
from raysgd.session import events as e
from support.simulation import SimulatedRun, finish, kill, part, running, saved, uri_of

#: Promised numbers, written out.
SAVE_POINT_GRACE_S = 30.0
AGAIN_S = 1.0
REACH_S = 2.0
MIN_PAUSE_S = 10.0
SETTLE_S = 1.0


def run_before_save_point(num_ranks: int = 2, **settings: Any) -> SimulatedRun:
    """Return a run whose ranks agree on a save point because a joining worker is ready."""
    run = running(num_ranks, **settings)
    run.feed(c.JoiningWorkerReady())
    run.advance(SETTLE_S - 0.1)
    assert not run.has_save_point
    run.advance(0.1)
    assert run.has_save_point
    return run


def reach(run: SimulatedRun, call: int = 0, *ranks: int) -> None:
    for rank in ranks or range(run.num_ranks):
        run.deliver(rank, e.AtSavePoint(call, run.num_save_points))


def ended(run: SimulatedRun) -> list[str]:
    return [command.why for command in run.all_of(c.EndAttempt)]


def test_group_grows_after_a_committed_save() -> None:
    run = run_before_save_point()
    run.save()
    reach(run)
    assert not ended(run)
    run.commit()
    assert ended(run) == ["the group grows"]
    for rank in range(2):
        run.leave(rank, e.Ended())
    assert run.prepared_attempts[1:] == [2] and not run.keeps_size
    run.num_ranks = 3
    run.ready()
    assert (run.entries[-1].attempt, run.entries[-1].start.uri) == (2, uri_of(1))
    assert run.events("failure") == []
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_workers_that_join_together_cause_one_save_point() -> None:
    run = running()
    for _ in range(5):
        run.feed(c.JoiningWorkerReady())
        run.advance(SETTLE_S / 2)
    assert run.num_save_points == 0
    run.advance(SETTLE_S)
    assert run.num_save_points == 1


def test_worker_that_became_ready_while_group_formed_joins_later() -> None:
    run = SimulatedRun(2)
    run.feed(c.JoiningWorkerReady())
    run.feed(c.GroupReady(("a", "b"), num_joining=1))
    for rank in range(2):
        run.deliver(rank, e.Entered(run.now))
    run.advance(SETTLE_S)
    assert run.num_save_points == 1


def test_worker_that_joined_while_group_formed_causes_no_save_point() -> None:
    run = SimulatedRun(2)
    run.feed(c.JoiningWorkerReady())
    run.ready()
    run.advance(SETTLE_S)
    assert run.num_save_points == 0


def test_group_grows_when_commit_precedes_the_save_point() -> None:
    run = run_before_save_point()
    run.save()
    run.commit()
    assert not ended(run)
    reach(run)
    assert ended(run) == ["the group grows"]


def test_wait_for_ranks_at_the_save_point_is_limited() -> None:
    run = run_before_save_point()
    run.save()
    reach(run, 0, 0)
    run.commit()
    run.advance(REACH_S - 0.1)
    assert not ended(run)
    run.advance(0.1)
    assert ended(run) == ["the group grows"]


def test_ranks_leave_only_after_the_commit() -> None:
    run = run_before_save_point()
    run.save()
    reach(run)
    run.advance(10 * REACH_S)
    assert not ended(run)


def test_group_grows_after_next_save_when_commit_fails() -> None:
    run = run_before_save_point(checkpoint_config=CheckpointConfig(on_write_error="warn"))
    run.save()
    reach(run)
    run.fail_commit()
    run.advance(AGAIN_S - 0.1)
    assert not run.has_save_point
    run.advance(0.1)
    assert run.num_save_points == 2
    run.save(1, 2)
    reach(run, 1)
    run.commit()
    assert ended(run) == ["the group grows"]


def test_failed_part_cancels_the_save_point() -> None:
    run = run_before_save_point(checkpoint_config=CheckpointConfig(on_write_error="warn"))
    run.deliver(0, saved(), e.PartFailed(0, "disk full"))
    reach(run)
    assert not run.has_save_point


def test_stop_cancels_the_save_point() -> None:
    run = run_before_save_point()
    run.save()
    reach(run, 0, 0)
    run.stop()
    assert run.is_asked_to_stop and not run.has_save_point
    run.commit()
    reach(run, 0, 1)
    assert not ended(run)


def test_returned_rank_cancels_the_save_point() -> None:
    run = run_before_save_point()
    run.leave(1)
    assert not run.has_save_point
    run.feed(c.JoiningWorkerReady())
    run.advance(60)
    assert run.num_save_points == 1
    run.leave(0)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_checkpoint_of_all_ranks_prevents_growth() -> None:
    run = run_before_save_point()
    run.save(all_ranks=True)
    reach(run)
    run.commit()
    assert not ended(run) and not run.has_save_point
    (warning,) = run.events("warning")
    assert "all_ranks=True" in warning["message"]
    run.feed(c.JoiningWorkerReady())
    run.advance(60)
    assert run.num_save_points == 1
    assert run.events("warning") == [warning]
    kill(run)
    assert run.keeps_size


def test_reshardable_checkpoint_allows_growth() -> None:
    run = run_before_save_point()
    for rank in range(run.num_ranks):
        run.deliver(rank, saved(all_ranks=True), replace(part(), unsharded_digest="equal"))
    reach(run)
    run.commit()
    assert ended(run) and run.has_save_point and run.events("warning") == []


def test_death_while_leaving_for_growth_is_not_a_failure() -> None:
    run = run_before_save_point()
    run.save()
    reach(run)
    run.commit()
    run.end_stream(0, "killed")
    run.leave(1, e.Ended())
    assert run.events("failure") == []
    assert run.prepared_attempts[-1] == 2 and not run.keeps_size


def leaving(num_ranks: int = 2, **settings: Any) -> SimulatedRun:
    """Return a run whose ranks leave from a save point, so that the group can grow."""
    run = run_before_save_point(num_ranks, **settings)
    run.save()
    reach(run)
    run.commit()
    assert ended(run) == [GROWS]
    return run


@pytest.mark.parametrize(("abort_grace_s", "patience_s"), [(2, SAVE_POINT_GRACE_S), (60, 60)])
def test_rank_that_leaves_a_save_point_slowly_keeps_its_process(abort_grace_s: float, patience_s: float) -> None:
    run = leaving(failure_config=FailureConfig(abort_grace_s=abort_grace_s))
    run.leave(0, e.Ended())
    run.advance(patience_s - 0.1)
    assert run.killed_ranks == [] and run.prepared_attempts == [1]
    run.leave(1, e.Ended())
    assert run.prepared_attempts == [1, 2]
    run.advance(1)
    assert run.killed_ranks == []


def test_rank_that_does_not_leave_a_save_point_is_killed_and_replaced() -> None:
    run = leaving()
    run.leave(0, e.Ended())
    run.advance(SAVE_POINT_GRACE_S)
    assert run.killed_ranks == [1]
    run.end_stream(1, "killed")
    assert run.prepared_attempts == [1, 2] and run.events("failure") == []


def test_rank_that_hangs_at_a_save_point_is_killed_at_once() -> None:
    run = leaving()
    run.leave(0, e.Ended())
    run.feed(c.WorkerHung(1, 1, "silent", "no heartbeat"))
    assert run.killed_ranks == [1]
    run.end_stream(1, "killed")
    assert run.prepared_attempts == [1, 2] and run.events("failure") == []


@pytest.mark.parametrize("cancel", [False, True])
def test_end_of_a_run_does_not_wait_for_a_rank_that_leaves_a_save_point_slowly(cancel: bool) -> None:
    run = leaving(failure_config=FailureConfig(abort_grace_s=2))
    run.stop(cancel=cancel)
    run.advance(2)
    assert run.killed_ranks == [0, 1]


def test_death_cancels_the_save_point() -> None:
    run = run_before_save_point()
    run.deliver(0, saved(), part())
    kill(run)
    run.num_ranks = 1
    run.ready()
    run.save(0, 1)
    run.commit()
    assert "the group grows" not in ended(run)
    assert len(run.events("failure")) == 1


def test_group_without_checkpoints_grows_at_once_if_the_backend_says_so() -> None:
    run = running(grows_without_save=True)
    run.feed(c.JoiningWorkerReady())
    assert not ended(run)
    run.advance(SETTLE_S)
    assert ended(run) == [GROWS] and not run.num_save_points
    run.advance(FailureConfig().abort_grace_s - 0.1)
    assert run.killed_ranks == []
    for rank in range(2):
        run.leave(rank, e.Ended())
    assert run.prepared_attempts[1:] == [2] and not run.keeps_size
    assert run.events("failure") == []
    run.num_ranks = 3
    run.ready()
    run.feed(c.JoiningWorkerReady())
    run.advance(MIN_PAUSE_S - 1)
    assert ended(run) == [GROWS]
    run.advance(1)
    assert ended(run) == [GROWS] * 2


def test_group_with_a_checkpoint_grows_after_a_save_whatever_the_backend_says() -> None:
    run = running(grows_without_save=True)
    run.save()
    run.commit()
    run.feed(c.JoiningWorkerReady())
    run.advance(SETTLE_S)
    assert not ended(run) and run.has_save_point


@pytest.mark.parametrize("is_late", [False, True])
def test_group_with_a_live_state_grows_at_once(is_late: bool) -> None:
    """Also if the ranks were asked to leave after a save before they had a complete step."""
    run = running(2)
    if not is_late:
        run.deliver(0, e.HoldsState())
        run.deliver(1, e.HoldsState())
    run.feed(c.JoiningWorkerReady())
    run.advance(SETTLE_S)
    if is_late:
        assert run.has_save_point and not ended(run)
        run.deliver(0, e.HoldsState())
        assert not ended(run), "rank 1 has none yet"
        run.deliver(1, e.HoldsState())
    assert ended(run) == [GROWS]
    for rank in range(2):
        run.leave(rank, e.Ended())
    assert run.prepared_attempts[1:] == [2] and not run.keeps_size
    assert run.events("failure") == []
    run.num_ranks = 3
    run.ready()
    run.feed(c.JoiningWorkerReady())  # the next attempt has no complete step yet
    run.advance(MIN_PAUSE_S)
    assert ended(run) == [GROWS] and run.has_save_point
