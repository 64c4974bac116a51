"""Pausing a run: all ranks leave after the same save, the workers are released, and the run resumes from that save."""

from __future__ import annotations

import pytest

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller.states import Paused
from raysgd.session import events as e
from support.simulation import RETURNED, SimulatedRun, kill, part, reports, running, saved, uri_of

#: Promised numbers, written out.
GATHER_S = 0.05


def pause(run: SimulatedRun) -> None:
    run.feed(c.PauseRequested())


def leave_at_save_point(run: SimulatedRun, call: int = 0) -> None:
    """Save on all ranks, commit, and let all ranks leave at the save point."""
    run.save(call)
    run.commit()
    for rank in range(run.num_ranks):
        run.deliver(rank, e.AtSavePoint(call, run.num_save_points))
    for rank in range(run.num_ranks):
        run.leave(rank, e.Ended())


def is_paused(run: SimulatedRun) -> bool:
    return isinstance(run.machine.state, Paused)


def test_run_pauses_when_all_ranks_have_left_after_the_same_save() -> None:
    run = running()
    pause(run)
    assert run.num_save_points == 1 and not run.all_of(c.ReleaseWorkers)
    run.save()
    run.commit()
    run.deliver(0, e.AtSavePoint(0, 1))
    assert not run.all_of(c.EndAttempt), "rank 1 is not at the save point yet"
    run.deliver(1, e.AtSavePoint(0, 1))
    run.leave(0, e.Ended())
    assert not is_paused(run)
    run.leave(1, e.Ended())
    assert is_paused(run)
    assert len(run.all_of(c.ReleaseWorkers)) == len(run.events("paused")) == 1
    assert len(run.prepared_attempts) == 1


def test_paused_run_resumes_from_that_save_as_next_attempt_without_failure() -> None:
    run = running()
    pause(run)
    leave_at_save_point(run)
    run.feed(c.ResumeRequested())
    run.ready()
    assert (run.entries[-1].attempt, run.entries[-1].start.uri) == (2, uri_of(1))
    assert run.events("resumed") and not run.events("failure")
    run.leave(0)
    run.leave(1)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_run_can_pause_several_times() -> None:
    run = running()
    for number in range(1, 4):
        pause(run)
        leave_at_save_point(run)
        assert is_paused(run)
        run.feed(c.ResumeRequested())
        run.ready()
        assert run.entries[-1].start.uri == uri_of(number)


def test_run_pauses_immediately_before_workers_are_ready() -> None:
    run = SimulatedRun()
    pause(run)
    assert is_paused(run) and len(run.all_of(c.ReleaseWorkers)) == 1
    assert not run.ready(), "the run does not wait for these workers any more"
    run.feed(c.ResumeRequested())
    run.ready()
    assert run.entries[-1].attempt == 1


def test_run_pauses_instead_of_starting_next_attempt() -> None:
    run = running()
    run.save()
    run.commit()
    run.end_stream(0, "killed")
    run.advance(GATHER_S)
    pause(run)
    assert not is_paused(run), "rank 1 is still inside"
    run.leave(1, e.Ended())
    assert is_paused(run) and len(run.events("failure")) == 1


def test_death_before_pause_is_failure_and_run_still_pauses() -> None:
    run = running(failure_config=FailureConfig(max_failures=1))
    pause(run)
    kill(run)
    assert is_paused(run) and len(run.events("failure")) == 1


def test_failure_beyond_max_failures_ends_run_instead_of_pausing() -> None:
    run = running(failure_config=FailureConfig(max_failures=0))
    pause(run)
    kill(run)
    assert run.outcome is not None and run.outcome.error_type == "WorkerDiedError"


def test_rank_that_returns_first_cancels_save_point_and_run_ends_normally() -> None:
    run = running()
    pause(run)
    run.deliver(0, RETURNED)
    assert run.num_save_points == 1 and not run.has_save_point
    run.end_stream(0)
    run.leave(1)
    assert run.outcome is not None and run.outcome.kind == "done"
    assert not run.all_of(c.ReleaseWorkers)


def test_run_pauses_at_next_save_when_write_of_first_one_failed() -> None:
    run = running(checkpoint_config=CheckpointConfig(on_write_error="warn", keep_in_memory=False))
    pause(run)
    run.save()
    run.deliver(0, e.AtSavePoint(0, 1))
    run.fail_commit()
    assert run.num_save_points == 1 and not run.has_save_point
    run.advance(2)
    assert run.num_save_points == 2
    leave_at_save_point(run, 1)
    assert is_paused(run)


def test_withdrawn_pause_request_has_no_effect() -> None:
    run = running()
    pause(run)
    run.feed(c.ResumeRequested())
    assert run.num_save_points == 1 and not run.has_save_point
    run.save()
    run.commit()
    run.leave(0)
    run.leave(1)
    assert run.outcome is not None and run.outcome.kind == "done" and not run.events("paused")


def test_second_pause_request_has_no_effect() -> None:
    run = running()
    pause(run)
    pause(run)
    assert run.num_save_points == 1
    leave_at_save_point(run)
    pause(run)
    assert is_paused(run) and len(run.all_of(c.ReleaseWorkers)) == 1
    run.feed(c.ResumeRequested())
    run.feed(c.ResumeRequested())
    assert len(run.prepared_attempts) == 2


@pytest.mark.parametrize("cancel", [False, True])
def test_paused_run_can_be_stopped_and_cancelled(cancel: bool) -> None:
    run = running()
    pause(run)
    leave_at_save_point(run)
    run.stop(cancel=cancel)
    assert run.is_closed and run.outcome is not None
    assert run.outcome.kind == ("cancelled" if cancel else "stopped")


@pytest.mark.parametrize("cancel", [False, True])
def test_run_that_is_about_to_pause_can_be_stopped_and_cancelled(cancel: bool) -> None:
    run = running()
    pause(run)
    run.stop(cancel=cancel)
    for rank in range(2):
        run.leave(rank, e.Ended() if cancel else RETURNED)
    run.advance(GATHER_S)
    assert run.is_closed and not run.all_of(c.ReleaseWorkers)


def test_run_pauses_at_checkpoint_of_all_ranks_and_keeps_its_size() -> None:
    run = running()
    run.save(all_ranks=True)
    run.commit()
    pause(run)
    run.save(1, 2, all_ranks=True)
    run.commit()
    for rank in range(2):
        run.deliver(rank, e.AtSavePoint(1, 1))
    for rank in range(2):
        run.leave(rank, e.Ended())
    assert is_paused(run)
    run.feed(c.ResumeRequested())
    assert run.keeps_size


def test_checkpoint_in_memory_is_stored_before_workers_are_released() -> None:
    run = running(checkpoint_config=CheckpointConfig(storage_interval=10))
    pause(run)
    run.deliver(0, reports(0), saved(), e.PartHeld(0, 10))
    run.deliver(1, reports(0), saved(), part())
    for rank in range(2):
        run.deliver(rank, e.AtSavePoint(0, 1))
    for rank in range(2):
        run.leave(rank, e.Ended())
    (request,) = run.all_of(c.StoreFromMemory)
    assert not is_paused(run)
    run.feed(c.MemoryCopyStored(request.manifest))
    assert not is_paused(run)
    run.commit()
    assert is_paused(run)


def test_late_events_have_no_effect_on_paused_run() -> None:
    run = running()
    pause(run)
    leave_at_save_point(run)
    assert run.deliver(0, part(0), saved(1)) == []
    assert run.end_stream(0, "killed") == []
    run.advance(60)
    assert is_paused(run)


def test_run_with_unstored_checkpoint_does_not_pause_between_attempts() -> None:
    run = running(checkpoint_config=CheckpointConfig(storage_interval=10))
    run.deliver(0, reports(0), saved(), e.PartHeld(0, 10))
    run.deliver(1, reports(0), saved(), part())
    kill(run)
    pause(run)
    assert not is_paused(run), "no worker can write the checkpoint"
    run.ready()
    assert run.num_save_points == 1
