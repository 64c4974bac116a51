"""A run whose workers get SIGTERM, or whose nodes are draining."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.session import events as e
from support.simulation import SimulatedRun, broken, failed, finish, running, saved, uri_of

#: Promised numbers, written out.
GATHER_S = 0.05
AGAIN_S = 1.0
LEAVE_S = 5.0
SETTLE_S = 1.0

GRACE_S = FailureConfig().preemption_grace_s
SAW_STOP = e.Returned(b"value", 5, saw_stop=True)
WHY = "rank 1 is preempted: SIGTERM"


def preempted(num_ranks: int = 2, **settings: Any) -> SimulatedRun:
    """Return a run that allows no failure and whose rank 1 is preempted."""
    run = running(num_ranks, failure_config=FailureConfig(max_failures=0), **settings)
    run.deliver(1, e.Preempted("SIGTERM"))
    return run


def has_regrouped(run: SimulatedRun, checkpoint: str | None) -> bool:
    """Whether the preempted worker was killed and the next attempt starts from `checkpoint`, without a failure."""
    assert run.killed_ranks == [1] and run.events("failure") == []
    assert run.prepared_attempts[1:] == [2] and not run.keeps_size
    run.ready()
    (regroup,) = run.events("regroup")
    return run.entries[-1].start.uri == checkpoint and regroup["attempt"] == 1


def test_preemption_requests_stop_and_save_point_on_all_ranks() -> None:
    run = preempted()
    assert run.is_asked_to_stop and run.has_save_point
    assert not run.all_of(c.RequestStop)[-1].ends_reports, "a rank that only reports trains until the save point"
    assert run.events("preemption") == [{"attempt": 1, "rank": 1, "node": "node1", "why": "SIGTERM"}]


def test_train_func_is_called_again_after_ranks_returned_because_of_preemption() -> None:
    run = preempted()
    run.save()
    run.leave(0, SAW_STOP)
    run.leave(1, SAW_STOP)
    assert run.killed_ranks == []  # the checkpoint is still being written
    run.commit()
    assert len(run.all_of(c.LeaveGroup)) == 1
    assert has_regrouped(run, uri_of(1))
    assert run.events("regroup")[0]["why"] == WHY
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done" and run.killed_ranks == [1]


def test_one_rank_that_saw_the_stop_is_enough_for_next_attempt() -> None:
    """Rank 0 may check should_stop and broadcast the answer to the others."""
    run = preempted()
    run.leave(0, SAW_STOP)
    run.leave(1)
    assert has_regrouped(run, None)


def test_ranks_that_do_not_check_should_stop_leave_after_a_save() -> None:
    run = preempted()
    run.save()
    run.commit()
    for rank in (0, 1):
        run.deliver(rank, e.AtSavePoint(0, 1))
    assert [command.why for command in run.all_of(c.EndAttempt)] == [WHY]
    for rank in (0, 1):
        run.leave(rank, e.Ended())
    assert has_regrouped(run, uri_of(1))


def test_preemption_leaves_attempt_though_checkpoint_is_bound_to_size() -> None:
    run = preempted()
    run.save(all_ranks=True)
    run.commit()
    for rank in (0, 1):
        run.deliver(rank, e.AtSavePoint(0, 1))
        run.leave(rank, e.Ended())
    assert run.keeps_size
    assert run.events("warning") == []


def test_ranks_agree_on_another_save_point_after_failed_write() -> None:
    run = preempted(checkpoint_config=CheckpointConfig(on_write_error="warn"))
    run.deliver(0, saved(), e.PartFailed(0, "disk full"))
    run.deliver(0, e.AtSavePoint(0, 1))
    run.advance(AGAIN_S)
    assert run.num_save_points == 2 and len(run.all_of(c.RequestStop)) == 1


def test_growing_group_uses_the_same_save_point_for_preemption() -> None:
    run = running()
    run.feed(c.JoiningWorkerReady())
    run.advance(SETTLE_S)
    run.deliver(1, e.Preempted("SIGTERM"))
    assert run.num_save_points == 1


def test_run_is_done_when_ranks_returned_without_seeing_the_stop() -> None:
    run = preempted()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"
    assert run.killed_ranks == [1] and run.is_closed
    assert run.events("regroup") == []


def test_preemption_after_a_rank_returned_starts_no_regroup() -> None:
    run = running()
    run.leave(0)
    run.deliver(1, e.Preempted("SIGTERM"))
    assert run.all_of(c.RequestStop) == [] and run.num_save_points == 0
    run.leave(1)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_second_preemption_joins_the_first() -> None:
    run = preempted(3)
    run.deliver(2, e.Preempted("SIGTERM"))
    run.deliver(1, e.Preempted("SIGTERM"))
    assert len(run.all_of(c.RequestStop)) == run.num_save_points == 1
    assert [note["rank"] for note in run.events("preemption")] == [1, 2]
    for rank in range(3):
        run.leave(rank, SAW_STOP)
    assert run.killed_ranks == [1, 2]


# -- workers that do not leave in time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [e.Ended(), broken()], ids=["left", "in a collective"])
def test_announced_death_is_not_a_failure(other: e.WorkerEvent) -> None:
    run = preempted()
    run.end_stream(1, "killed")
    run.leave(0, other)
    run.advance(GATHER_S)
    assert has_regrouped(run, None)
    assert run.events("regroup")[0]["why"] == "the worker process of rank 1 on node1 died: killed"


def test_death_of_another_rank_during_preemption_is_a_failure() -> None:
    run = preempted()
    run.end_stream(0, "killed")
    run.leave(1, e.Ended())
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.error_type == "WorkerDiedError"
    assert run.killed_ranks == [1]


def test_preempted_workers_are_killed_after_a_counted_failure() -> None:
    run = running()
    run.deliver(1, e.Preempted("SIGTERM"))
    run.end_stream(0, "killed")
    run.leave(1, e.Ended())
    run.advance(GATHER_S)
    assert [note["action"] for note in run.events("failure")] == ["retry 1"]
    assert run.killed_ranks == [1] and len(run.prepared_attempts) == 2


def test_exception_of_user_is_raised_during_preemption() -> None:
    run = preempted()
    run.leave(0, failed())
    run.leave(1, e.Ended())
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.failed == failed()


def test_attempt_is_ended_when_ranks_do_not_leave_in_time() -> None:
    run = preempted()
    run.advance(GRACE_S - 0.1)
    assert run.all_of(c.EndAttempt) == []
    run.advance(0.1)
    assert [command.ranks for command in run.all_of(c.EndAttempt)] == [(0, 1)]
    for rank in (0, 1):
        run.leave(rank, e.Ended())
    assert has_regrouped(run, None)


def test_timer_of_an_older_group_is_ignored() -> None:
    run = preempted()
    run.end_stream(1, "killed")
    run.leave(0, e.Ended())
    run.advance(GATHER_S)
    run.ready()
    run.advance(GRACE_S)
    assert len(run.all_of(c.EndAttempt)) == 1


@pytest.mark.parametrize(("within_s", "after"), [(None, GRACE_S), (60.0, 60.0 - LEAVE_S), (2.0, 0.0)])
def test_draining_node_sets_the_time_to_leave(within_s: float | None, after: float) -> None:
    run = running(3)
    run.feed(c.NodeDraining(1, (1, 2), within_s))
    assert [note["rank"] for note in run.events("preemption")] == [1, 2]
    assert len(run.all_of(c.RequestStop)) == 1
    run.advance(after)
    assert [command.ranks for command in run.all_of(c.EndAttempt)] == [(0, 1, 2)]
    for rank in range(3):
        run.leave(rank, e.Ended())
    assert run.killed_ranks == [1, 2]


def test_group_is_prepared_again_when_workers_were_preempted_before_it_formed() -> None:
    run = SimulatedRun(2, failure_config=FailureConfig(max_failures=0))
    for _ in range(3):
        run.feed(c.GroupFailed("WorkerDiedError", "SIGTERM", True, (1,), is_announced=True))
        run.advance(5)
    assert len(run.prepared_attempts) == 4
    run.ready()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"


# -- preemption and stop -----------------------------------------------------------------------------------------------


def test_stop_has_priority_over_preemption() -> None:
    run = preempted()
    run.stop()
    assert run.num_save_points == 1 and not run.has_save_point
    assert run.all_of(c.RequestStop)[-1].ends_reports, "ranks that do not check should_stop leave, too"
    for rank in (0, 1):
        run.leave(rank, SAW_STOP)
    assert run.outcome is not None and run.outcome.kind == "stopped"
    assert run.killed_ranks == [1] and len(run.entries) == 1


def test_preemption_during_stop_has_no_effect() -> None:
    run = running(failure_config=FailureConfig(max_failures=0))
    run.stop()
    run.deliver(1, e.Preempted("SIGTERM"))
    assert run.num_save_points == 0 and run.all_of(c.EndAttempt) == [] and run.killed_ranks == []
    run.end_stream(1, "killed")
    run.leave(0, e.Ended())
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.kind == "stopped"


def test_stop_while_group_leaves_ends_the_run() -> None:
    run = preempted()
    run.save()
    run.commit()
    for rank in (0, 1):
        run.deliver(rank, e.AtSavePoint(0, 1))
    run.stop()
    for rank in (0, 1):
        run.leave(rank, e.Ended())
    assert run.outcome is not None and run.outcome.kind == "stopped" and run.killed_ranks == [1]


def test_ranks_with_a_live_state_leave_a_second_after_a_notice() -> None:
    run = running(2, failure_config=FailureConfig(max_failures=0))
    for rank in range(2):
        run.deliver(rank, e.HoldsState())
    run.deliver(1, e.Preempted("SIGTERM"))
    assert not run.is_asked_to_stop and not run.has_save_point
    run.advance(SETTLE_S - 0.1)
    assert not run.all_of(c.EndAttempt)
    run.advance(0.1)
    assert len(run.all_of(c.EndAttempt)) == 1
    for rank in range(2):
        run.leave(rank, e.Ended())
    assert has_regrouped(run, None)


def test_state_is_saved_if_all_ranks_are_preempted() -> None:
    run = running(2, failure_config=FailureConfig(max_failures=0))
    for rank in range(2):
        run.deliver(rank, e.HoldsState())
    run.deliver(1, e.Preempted("SIGTERM"))
    run.deliver(0, e.Preempted("SIGTERM"))
    assert run.is_asked_to_stop and run.has_save_point
    run.advance(GRACE_S - 1)
    assert not run.all_of(c.EndAttempt), "the ranks have time to save"
    run.advance(1)
    assert len(run.all_of(c.EndAttempt)) == 1
