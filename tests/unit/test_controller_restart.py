"""The controller dies with all workers; a new controller resumes the run from its journal and its checkpoints."""

from __future__ import annotations

import dataclasses

import pytest

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.states import Paused
from raysgd.session import events as e
from support.simulation import (
    SimulatedRun,
    failed,
    finish,
    kill,
    part,
    previous_state_of,
    reports,
    running,
    saved,
    uri_of,
)


def restart(run: SimulatedRun, **settings: object) -> SimulatedRun:
    """Return the same run in a new controller."""
    return SimulatedRun(run.num_ranks, past=previous_state_of(run), **settings)  # type: ignore[arg-type]


def test_run_resumes_from_newest_checkpoint_after_controller_restart() -> None:
    run = running()
    run.save()
    run.commit()
    run.save(1, 2)
    run.commit()
    restarted = restart(run)
    restarted.advance(1)
    restarted.ready()
    (entered,) = restarted.entries
    assert (entered.attempt, entered.start.uri, entered.start.iteration) == (2, uri_of(2), 2)
    assert entered.first_number == 3
    finish(restarted)
    assert restarted.outcome is not None and restarted.outcome.kind == "done"


def test_run_without_checkpoint_starts_again_after_controller_restart() -> None:
    restarted = restart(running())
    restarted.advance(1)
    restarted.ready()
    (entered,) = restarted.entries
    assert (entered.attempt, entered.start.uri, entered.start.iteration) == (2, None, 0)


def test_run_begins_when_controller_died_before_first_attempt() -> None:
    restarted = restart(SimulatedRun())
    restarted.advance(1)
    restarted.ready()
    assert restarted.entries[0].attempt == 1


def test_controller_restart_counts_as_failure() -> None:
    run = running(failure_config=FailureConfig(max_failures=2))
    kill(run, 1)
    restarted = restart(run, failure_config=FailureConfig(max_failures=2))
    (failure,) = restarted.events("failure")
    assert failure["action"] == "retry 2" and "the controller's process died" in failure["error"]
    assert restarted.machine.status()["num_failures"] == 2


@pytest.mark.parametrize("max_failures", [0, 1])
def test_error_after_controller_restart_counts_all_failures(max_failures: int) -> None:
    run = running(failure_config=FailureConfig(max_failures=max_failures))
    run.save()
    run.commit()
    for _ in range(max_failures):
        kill(run)
        run.ready()
    restarted = restart(run, failure_config=FailureConfig(max_failures=max_failures))
    assert restarted.is_closed and restarted.outcome is not None
    assert restarted.outcome.error_type == "WorkerDiedError" and restarted.outcome.failures == max_failures + 1
    assert "the controller's process died" in restarted.outcome.message and uri_of(1) in restarted.outcome.message


def test_rounds_of_interrupted_attempt_are_kept_up_to_its_checkpoint() -> None:
    run = running()
    for rank in range(2):
        run.deliver(rank, reports(0, 3), saved(0, 3), part(), reports(3, 2))
    run.commit()
    restarted = restart(run)
    (end,) = restarted.emitted(frames.ATTEMPT_END)
    assert (end.attempt, end.data["keep_rounds"]) == (1, 3)


def test_committed_checkpoint_unknown_to_readers_is_announced() -> None:
    run = running()
    run.save()
    (commit,) = run.unanswered()
    past = previous_state_of(run, [commit.manifest])
    restarted = SimulatedRun(run.num_ranks, past=past)
    (frame,) = restarted.emitted(frames.CHECKPOINT)
    assert frame.data["uri"] == uri_of(1)
    restarted.advance(1)
    restarted.ready()
    assert restarted.entries[0].start.uri == uri_of(1)


def test_checkpoints_known_to_readers_are_not_announced_again() -> None:
    run = running()
    run.save()
    run.commit()
    assert not restart(run).emitted(frames.CHECKPOINT)


def test_retention_applies_to_all_checkpoints_after_restart() -> None:
    run = running()
    for call in range(4):
        run.save(call, call + 1)
        run.commit()
    restarted = restart(run, checkpoint_config=CheckpointConfig(num_to_keep=2))
    assert [command.number for command in restarted.all_of(c.DeleteCheckpoint)] == [1, 2]


def test_number_of_incomplete_checkpoint_is_not_reused() -> None:
    run = running()
    past = dataclasses.replace(previous_state_of(run), last_number=7)
    restarted = SimulatedRun(2, past=past)
    restarted.advance(1)
    restarted.ready()
    assert restarted.entries[0].first_number == 8


def test_paused_run_stays_paused_after_restart_without_failure() -> None:
    run = running()
    run.feed(c.PauseRequested())
    run.save()
    run.commit()
    for rank in range(2):
        run.deliver(rank, e.AtSavePoint(0, 1))
    for rank in range(2):
        run.leave(rank, e.Ended())
    restarted = restart(run)
    assert isinstance(restarted.machine.state, Paused) and not restarted.events("failure")
    restarted.feed(c.ResumeRequested())
    restarted.ready()
    assert (restarted.entries[0].attempt, restarted.entries[0].start.uri) == (2, uri_of(1))


def test_resumed_run_is_not_paused_after_restart() -> None:
    run = SimulatedRun()
    run.feed(c.PauseRequested())
    run.feed(c.ResumeRequested())
    assert not isinstance(restart(run).machine.state, Paused)


def test_stopping_run_is_stopped_after_restart() -> None:
    run = running()
    run.stop()
    restarted = restart(run)
    assert restarted.is_closed and restarted.outcome is not None
    assert (restarted.outcome.kind, restarted.outcome.message) == ("stopped", "enough")


def test_run_with_published_outcome_is_only_closed_after_restart() -> None:
    run = running()
    run.deliver(0, failed())
    run.end_stream(0)
    run.advance(0.1)
    assert run.outcome is not None and not run.is_closed
    restarted = restart(run)
    assert restarted.is_closed and restarted.outcome is None and not restarted.events("failure")


def test_events_of_workers_before_restart_are_refused() -> None:
    run = running()
    restarted = restart(run)
    assert restarted.deliver(0, saved(), part(), attempt=1) == []
    assert restarted.end_stream(1, "killed", attempt=1) == []


def test_controller_can_restart_several_times() -> None:
    run = running(failure_config=FailureConfig(max_failures=-1))
    for attempt in range(2, 6):
        run.save(0, 1)
        run.commit()
        restarted = restart(run, failure_config=FailureConfig(max_failures=-1))
        restarted.commands[:0] = run.commands  # one journal
        restarted.advance(10)
        restarted.ready()
        assert (restarted.entries[-1].attempt, restarted.entries[-1].start.uri) == (attempt, uri_of(attempt - 1))
        run = restarted


@pytest.mark.parametrize("is_ending", [False, True])
def test_cancelled_run_is_not_resumed_after_restart(is_ending: bool) -> None:
    run = running()
    if is_ending:
        run.end_stream(0, "killed")
    run.stop(cancel=True)
    restarted = restart(run)
    assert restarted.is_closed and restarted.outcome is not None
    assert (restarted.outcome.kind, restarted.outcome.message) == ("cancelled", "enough")
