"""The controller's process dies with all workers; another one goes on with the run from its journal and its checkpoints."""

from __future__ import annotations

import dataclasses

import pytest

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.states import Paused
from raysgd.session import events as e
from raysgd.testing.simulation import (
    SimulatedRun,
    failed,
    finish,
    kill,
    part,
    past_of_run,
    reports,
    running,
    saved,
    uri_of,
)


def restart(run: SimulatedRun, **settings: object) -> SimulatedRun:
    """The same run in another process."""
    return SimulatedRun(run.num_ranks, past=past_of_run(run), **settings)  # type: ignore[arg-type]


def test_it_goes_on_from_the_newest_checkpoint_as_the_next_attempt() -> None:
    run = running()
    run.save()
    run.commit()
    run.save(1, 2)
    run.commit()
    again = restart(run)
    again.advance(1)
    again.ready()
    (entered,) = again.entries
    assert (entered.attempt, entered.checkpoint, entered.iterations_before) == (2, uri_of(2), 2)
    assert entered.first_number == 3
    finish(again)
    assert again.outcome is not None and again.outcome.kind == "done"


def test_without_a_checkpoint_it_begins_where_it_began() -> None:
    again = restart(running())
    again.advance(1)
    again.ready()
    (entered,) = again.entries
    assert (entered.attempt, entered.checkpoint, entered.iterations_before) == (2, None, 0)


def test_before_the_first_attempt_it_begins() -> None:
    again = restart(SimulatedRun())
    again.advance(1)
    again.ready()
    assert again.entries[0].attempt == 1


def test_it_is_a_failure_like_any_other() -> None:
    run = running(failure=FailureConfig(max_failures=2))
    kill(run, 1)
    again = restart(run, failure=FailureConfig(max_failures=2))
    (failure,) = again.notes("failure")
    assert failure["action"] == "retry 2" and "the controller's process died" in failure["error"]
    assert again.machine.standing()["num_failures"] == 2


@pytest.mark.parametrize("max_failures", [0, 1])
def test_one_too_many_ends_the_run_with_an_error_that_counts_all_of_them(max_failures: int) -> None:
    run = running(failure=FailureConfig(max_failures=max_failures))
    run.save()
    run.commit()
    for _ in range(max_failures):
        kill(run)
        run.ready()
    again = restart(run, failure=FailureConfig(max_failures=max_failures))
    assert again.is_closed and again.outcome is not None
    assert again.outcome.error_type == "WorkerDiedError" and again.outcome.failures == max_failures + 1
    assert "the controller's process died" in again.outcome.message and uri_of(1) in again.outcome.message


def test_the_rounds_of_the_cut_off_attempt_stand_up_to_its_checkpoint() -> None:
    run = running()
    for rank in range(2):
        run.say(rank, reports(0, 3), saved(0, 3), part(), reports(3, 2))
    run.commit()
    again = restart(run)
    (end,) = again.said(frames.ATTEMPT_END)
    assert (end.attempt, end.data["keep_rounds"]) == (1, 3)


def test_a_checkpoint_that_was_committed_and_not_told_of_is_told_of() -> None:
    run = running()
    run.save()
    (commit,) = run.unanswered()
    past = past_of_run(run, [commit.manifest])
    again = SimulatedRun(run.num_ranks, past=past)
    (said,) = again.said(frames.CHECKPOINT)
    assert said.data["uri"] == uri_of(1)
    again.advance(1)
    again.ready()
    assert again.entries[0].checkpoint == uri_of(1)


def test_those_that_were_told_of_are_not_told_of_again() -> None:
    run = running()
    run.save()
    run.commit()
    assert not restart(run).said(frames.CHECKPOINT)


def test_what_is_to_be_kept_is_decided_anew_with_all_of_them() -> None:
    run = running()
    for call in range(4):
        run.save(call, call + 1)
        run.commit()
    again = restart(run, checkpoint=CheckpointConfig(num_to_keep=2))
    assert [command.number for command in again.all_of(c.DeleteCheckpoint)] == [1, 2]


def test_no_number_is_given_twice_though_its_checkpoint_never_came_to_be() -> None:
    run = running()
    past = dataclasses.replace(past_of_run(run), last_number=7)
    again = SimulatedRun(2, past=past)
    again.advance(1)
    again.ready()
    assert again.entries[0].first_number == 8


def test_a_run_that_rested_rests_on_and_has_not_failed() -> None:
    run = running()
    run.feed(c.PauseAsked())
    run.save()
    run.commit()
    for rank in range(2):
        run.say(rank, e.AtSavePoint(0))
    for rank in range(2):
        run.leave(rank, e.Ended())
    again = restart(run)
    assert isinstance(again.machine.state, Paused) and not again.notes("failure")
    again.feed(c.ResumeAsked())
    again.ready()
    assert (again.entries[0].attempt, again.entries[0].checkpoint) == (2, uri_of(1))


def test_one_that_had_been_woken_up_does_not() -> None:
    run = SimulatedRun()
    run.feed(c.PauseAsked())
    run.feed(c.ResumeAsked())
    assert not isinstance(restart(run).machine.state, Paused)


def test_a_run_that_was_to_stop_stops() -> None:
    run = running()
    run.stop()
    again = restart(run)
    assert again.is_closed and again.outcome is not None
    assert (again.outcome.kind, again.outcome.message) == ("stopped", "enough")


def test_a_run_whose_end_was_told_is_only_closed() -> None:
    run = running()
    run.say(0, failed())
    run.gone(0)
    run.advance(0.1)
    assert run.outcome is not None and not run.is_closed
    again = restart(run)
    assert again.is_closed and again.outcome is None and not again.notes("failure")


def test_what_the_old_workers_still_say_is_refused() -> None:
    run = running()
    again = restart(run)
    assert again.say(0, saved(), part(), attempt=1) == []
    assert again.gone(1, "killed", attempt=1) == []


def test_it_may_happen_again_and_again() -> None:
    run = running(failure=FailureConfig(max_failures=-1))
    for attempt in range(2, 6):
        run.save(0, 1)
        run.commit()
        again = restart(run, failure=FailureConfig(max_failures=-1))
        again.told[:0] = run.told  # one journal
        again.advance(10)
        again.ready()
        assert (again.entries[-1].attempt, again.entries[-1].checkpoint) == (attempt, uri_of(attempt - 1))
        run = again


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_run_that_was_cancelled_is_not_gone_on_with(is_ending: bool) -> None:
    run = running()
    if is_ending:
        run.gone(0, "killed")
    run.stop(cancel=True)
    again = restart(run)
    assert again.is_closed and again.outcome is not None
    assert (again.outcome.kind, again.outcome.message) == ("cancelled", "enough")
