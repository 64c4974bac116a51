"""What becomes of a run whose workers are told to end, or whose nodes will be taken away."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller.moves import GATHER_S
from raysgd.controller.preemption import LEAVE_S
from raysgd.controller.savepoint import AGAIN_S
from raysgd.controller.scaling_policy import SETTLE_S
from raysgd.session import events as e
from raysgd.testing.simulation import SimulatedRun, broken, failed, finish, running, saved, uri_of

GRACE_S = FailureConfig().preemption_grace_s
SAW_STOP = e.Returned(b"value", 5, saw_stop=True)
WHY = "rank 1 is preempted: SIGTERM"


def preempted(num_ranks: int = 2, **settings: Any) -> SimulatedRun:
    """A run in which nothing may fail, and rank 1 is preempted."""
    run = running(num_ranks, failure=FailureConfig(max_failures=0), **settings)
    run.say(1, e.Preempted("SIGTERM"))
    return run


def killed(run: SimulatedRun) -> list[tuple[int, ...]]:
    return [command.ranks for command in run.all_of(c.KillRanks)]


def goes_on(run: SimulatedRun, checkpoint: str | None) -> bool:
    """Whether the preempted worker was ended and the next attempt begins there, without a failure."""
    assert killed(run) == [(1,)] and run.notes("failure") == []
    assert run.all_of(c.PrepareGroup)[1:] == [c.PrepareGroup(2)]
    run.ready()
    (regroup,) = run.notes("regroup")
    return run.entries[-1].checkpoint == checkpoint and regroup["attempt"] == 1


def test_all_ranks_are_asked_both_ways() -> None:
    run = preempted()
    assert run.all_of(c.AskToStop) == [c.AskToStop(1, ends_reports=False)]
    assert run.all_of(c.AgreeOnSave) == [c.AgreeOnSave(1)]
    assert run.notes("preemption") == [{"attempt": 1, "rank": 1, "node": "node1", "why": "SIGTERM"}]


def test_ranks_that_saw_the_stop_are_entered_again() -> None:
    run = preempted()
    run.save()
    run.leave(0, SAW_STOP)
    run.leave(1, SAW_STOP)
    assert killed(run) == []  # the checkpoint is still being written
    run.commit()
    assert run.all_of(c.LeaveGroup) == [c.LeaveGroup(1)]
    assert goes_on(run, uri_of(1))
    assert run.notes("regroup")[0]["why"] == WHY
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done" and killed(run) == [(1,)]


def test_one_rank_that_saw_it_is_enough() -> None:
    """Such as where rank 0 looks and tells the others."""
    run = preempted()
    run.leave(0, SAW_STOP)
    run.leave(1)
    assert goes_on(run, None)


def test_ranks_that_did_not_look_leave_out_of_a_save() -> None:
    run = preempted()
    run.save()
    run.commit()
    for rank in (0, 1):
        run.say(rank, e.AtSavePoint(0))
    assert [command.why for command in run.all_of(c.EndRanks)] == [WHY]
    for rank in (0, 1):
        run.leave(rank, e.Ended())
    assert goes_on(run, uri_of(1))


def test_checkpoints_that_bind_the_group_to_its_size_do_not_keep_it() -> None:
    run = preempted()
    run.save(all_ranks=True)
    run.commit()
    for rank in (0, 1):
        run.say(rank, e.AtSavePoint(0))
        run.leave(rank, e.Ended())
    assert run.all_of(c.PrepareGroup)[-1] == c.PrepareGroup(2, keep_size=True)
    assert run.notes("warning") == []


def test_a_save_that_fails_is_followed_by_the_next() -> None:
    run = preempted(checkpoint=CheckpointConfig(on_write_error="warn"))
    run.say(0, saved(), e.PartFailed(0, "disk full"))
    run.say(0, e.AtSavePoint(0))
    run.advance(AGAIN_S)
    assert len(run.all_of(c.AgreeOnSave)) == 2 and len(run.all_of(c.AskToStop)) == 1


def test_a_group_about_to_grow_leaves_out_of_the_same_save() -> None:
    run = running()
    run.feed(c.NewcomerUp())
    run.advance(SETTLE_S)
    run.say(1, e.Preempted("SIGTERM"))
    assert len(run.all_of(c.AgreeOnSave)) == 1


def test_a_run_that_did_not_see_the_stop_is_done() -> None:
    run = preempted()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"
    assert killed(run) == [(1,)] and run.is_closed
    assert run.notes("regroup") == []


def test_what_is_done_to_its_end_is_not_done_again() -> None:
    run = running()
    run.leave(0)
    run.say(1, e.Preempted("SIGTERM"))
    assert run.all_of(c.AskToStop) == [] and run.all_of(c.AgreeOnSave) == []
    run.leave(1)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_a_second_one_joins_the_first() -> None:
    run = preempted(3)
    run.say(2, e.Preempted("SIGTERM"))
    run.say(1, e.Preempted("SIGTERM"))
    assert len(run.all_of(c.AskToStop)) == len(run.all_of(c.AgreeOnSave)) == 1
    assert [note["rank"] for note in run.notes("preemption")] == [1, 2]
    for rank in range(3):
        run.leave(rank, SAW_STOP)
    assert killed(run) == [(1, 2)]


# -- when there is not enough time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [e.Ended(), broken()], ids=["left", "in a collective"])
def test_a_death_that_was_announced_is_no_failure(other: e.WorkerEvent) -> None:
    run = preempted()
    run.gone(1, "killed")
    run.leave(0, other)
    run.advance(GATHER_S)
    assert goes_on(run, None)
    assert run.notes("regroup")[0]["why"] == "the worker process of rank 1 on node1 died: killed"


def test_a_death_beside_it_is_one() -> None:
    run = preempted()
    run.gone(0, "killed")
    run.leave(1, e.Ended())
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.error_type == "WorkerDiedError"
    assert killed(run) == [(1,)]


def test_a_death_that_is_counted_ends_the_preempted_too() -> None:
    run = running()
    run.say(1, e.Preempted("SIGTERM"))
    run.gone(0, "killed")
    run.leave(1, e.Ended())
    run.advance(GATHER_S)
    assert [note["action"] for note in run.notes("failure")] == ["retry 1"]
    assert killed(run) == [(1,)] and len(run.all_of(c.PrepareGroup)) == 2


def test_an_exception_of_the_users_own_is_raised() -> None:
    run = preempted()
    run.leave(0, failed())
    run.leave(1, e.Ended())
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.failed == failed()


def test_who_does_not_leave_in_time_is_made_to() -> None:
    run = preempted()
    run.advance(GRACE_S - 0.1)
    assert run.all_of(c.EndRanks) == []
    run.advance(0.1)
    assert [command.ranks for command in run.all_of(c.EndRanks)] == [(0, 1)]
    for rank in (0, 1):
        run.leave(rank, e.Ended())
    assert goes_on(run, None)


def test_the_time_of_an_older_group_does_not_count() -> None:
    run = preempted()
    run.gone(1, "killed")
    run.leave(0, e.Ended())
    run.advance(GATHER_S)
    run.ready()
    run.advance(GRACE_S)
    assert len(run.all_of(c.EndRanks)) == 1


@pytest.mark.parametrize(("within_s", "after"), [(None, GRACE_S), (60.0, 60.0 - LEAVE_S), (2.0, 0.0)])
def test_a_node_that_drains_says_how_long_it_has(within_s: float | None, after: float) -> None:
    run = running(3)
    run.feed(c.NodeDrains(1, (1, 2), within_s))
    assert [note["rank"] for note in run.notes("preemption")] == [1, 2]
    assert len(run.all_of(c.AskToStop)) == 1
    run.advance(after)
    assert [command.ranks for command in run.all_of(c.EndRanks)] == [(0, 1, 2)]
    for rank in range(3):
        run.leave(rank, e.Ended())
    assert killed(run) == [(1, 2)]


def test_a_group_whose_workers_obeyed_before_it_formed_is_had_again() -> None:
    run = SimulatedRun(2, failure=FailureConfig(max_failures=0))
    for _ in range(3):
        run.feed(c.GroupFailed("WorkerDiedError", "SIGTERM", True, (1,), is_announced=True))
        run.advance(5)
    assert len(run.all_of(c.PrepareGroup)) == 4
    run.ready()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"


# -- and a stop --------------------------------------------------------------------------------------------------------


def test_a_stop_wins() -> None:
    run = preempted()
    told = run.stop()
    assert [command for command in told if not isinstance(command, c.Note)] == [c.CallOffSave(1), c.AskToStop(1)]
    for rank in (0, 1):
        run.leave(rank, SAW_STOP)
    assert run.outcome is not None and run.outcome.kind == "stopped"
    assert killed(run) == [(1,)] and len(run.entries) == 1


def test_a_preemption_during_a_stop_changes_nothing() -> None:
    run = running(failure=FailureConfig(max_failures=0))
    run.stop()
    told = run.say(1, e.Preempted("SIGTERM"))
    assert [type(command) for command in told] == [c.Note]
    run.gone(1, "killed")
    run.leave(0, e.Ended())
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.kind == "stopped"


def test_a_stop_while_the_group_leaves_ends_the_run() -> None:
    run = preempted()
    run.save()
    run.commit()
    for rank in (0, 1):
        run.say(rank, e.AtSavePoint(0))
    run.stop()
    for rank in (0, 1):
        run.leave(rank, e.Ended())
    assert run.outcome is not None and run.outcome.kind == "stopped" and killed(run) == [(1,)]
