"""A run that is to rest: it leaves out of a save that all ranks have made, gives its workers back, and goes on from there."""

from __future__ import annotations

import pytest

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller.moves import GATHER_S
from raysgd.controller.states import Paused
from raysgd.session import events as e
from raysgd.testing.simulation import RETURNED, SimulatedRun, kill, part, reports, running, saved, uri_of


def pause(run: SimulatedRun) -> None:
    run.feed(c.PauseAsked())


def reach(run: SimulatedRun, call: int = 0) -> None:
    """All ranks make a save, of which all leave, and leave."""
    run.save(call)
    run.commit()
    for rank in range(run.num_ranks):
        run.say(rank, e.AtSavePoint(call))
    for rank in range(run.num_ranks):
        run.leave(rank, e.Ended())


def is_resting(run: SimulatedRun) -> bool:
    return isinstance(run.machine.state, Paused)


def test_a_run_rests_when_all_ranks_have_left_out_of_the_same_save() -> None:
    run = running()
    pause(run)
    assert len(run.all_of(c.AgreeOnSave)) == 1 and not run.all_of(c.ReleaseWorkers)
    run.save()
    run.commit()
    run.say(0, e.AtSavePoint(0))
    assert not run.all_of(c.EndRanks), "rank 1 has not come there"
    run.say(1, e.AtSavePoint(0))
    run.leave(0, e.Ended())
    assert not is_resting(run)
    run.leave(1, e.Ended())
    assert is_resting(run)
    assert len(run.all_of(c.ReleaseWorkers)) == len(run.notes("paused")) == 1
    assert len(run.all_of(c.PrepareGroup)) == 1


def test_it_goes_on_from_that_save_as_the_next_attempt_without_a_failure() -> None:
    run = running()
    pause(run)
    reach(run)
    run.feed(c.ResumeAsked())
    run.ready()
    assert (run.entries[-1].attempt, run.entries[-1].checkpoint) == (2, uri_of(1))
    assert run.notes("resumed") and not run.notes("failure")
    run.leave(0)
    run.leave(1)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_it_may_rest_again_and_again() -> None:
    run = running()
    for number in range(1, 4):
        pause(run)
        reach(run)
        assert is_resting(run)
        run.feed(c.ResumeAsked())
        run.ready()
        assert run.entries[-1].checkpoint == uri_of(number)


def test_before_the_workers_are_up_it_rests_at_once() -> None:
    run = SimulatedRun()
    pause(run)
    assert is_resting(run) and len(run.all_of(c.ReleaseWorkers)) == 1
    assert not run.ready(), "workers that nobody waits for any more"
    run.feed(c.ResumeAsked())
    run.ready()
    assert run.entries[-1].attempt == 1


def test_between_two_attempts_it_rests_instead_of_the_next() -> None:
    run = running()
    run.save()
    run.commit()
    run.gone(0, "killed")
    run.advance(GATHER_S)
    pause(run)
    assert not is_resting(run), "rank 1 is still inside"
    run.leave(1, e.Ended())
    assert is_resting(run) and len(run.notes("failure")) == 1


def test_a_worker_that_dies_first_is_a_failure_and_the_run_rests_all_the_same() -> None:
    run = running(failure=FailureConfig(max_failures=1))
    pause(run)
    kill(run)
    assert is_resting(run) and len(run.notes("failure")) == 1


def test_one_failure_too_many_ends_it() -> None:
    run = running(failure=FailureConfig(max_failures=0))
    pause(run)
    kill(run)
    assert run.outcome is not None and run.outcome.error_type == "WorkerDiedError"


def test_a_rank_that_returns_first_ends_the_agreement_and_the_run_goes_to_its_end() -> None:
    run = running()
    pause(run)
    run.say(0, RETURNED)
    assert len(run.all_of(c.CallOffSave)) == 1
    run.gone(0)
    run.leave(1)
    assert run.outcome is not None and run.outcome.kind == "done"
    assert not run.all_of(c.ReleaseWorkers)


def test_a_save_that_could_not_be_written_is_not_left_from_but_the_next() -> None:
    run = running(checkpoint=CheckpointConfig(on_write_error="warn", keep_in_memory=False))
    pause(run)
    run.save()
    run.say(0, e.AtSavePoint(0))
    run.fail_commit()
    assert len(run.all_of(c.CallOffSave)) == 1
    run.advance(2)
    assert len(run.all_of(c.AgreeOnSave)) == 2
    reach(run, 1)
    assert is_resting(run)


def test_a_wish_that_is_taken_back_in_time_has_no_effect() -> None:
    run = running()
    pause(run)
    run.feed(c.ResumeAsked())
    assert len(run.all_of(c.CallOffSave)) == 1
    run.save()
    run.commit()
    run.leave(0)
    run.leave(1)
    assert run.outcome is not None and run.outcome.kind == "done" and not run.notes("paused")


def test_asking_twice_is_asking_once() -> None:
    run = running()
    pause(run)
    pause(run)
    assert len(run.all_of(c.AgreeOnSave)) == 1
    reach(run)
    pause(run)
    assert is_resting(run) and len(run.all_of(c.ReleaseWorkers)) == 1
    run.feed(c.ResumeAsked())
    run.feed(c.ResumeAsked())
    assert len(run.all_of(c.PrepareGroup)) == 2


@pytest.mark.parametrize("cancel", [False, True])
def test_a_run_that_rests_can_be_ended(cancel: bool) -> None:
    run = running()
    pause(run)
    reach(run)
    run.stop(cancel=cancel)
    assert run.is_closed and run.outcome is not None
    assert run.outcome.kind == ("cancelled" if cancel else "stopped")


@pytest.mark.parametrize("cancel", [False, True])
def test_a_run_that_is_about_to_can_be_ended(cancel: bool) -> None:
    run = running()
    pause(run)
    run.stop(cancel=cancel)
    for rank in range(2):
        run.leave(rank, e.Ended() if cancel else RETURNED)
    run.advance(GATHER_S)
    assert run.is_closed and not run.all_of(c.ReleaseWorkers)


def test_a_checkpoint_of_all_ranks_can_be_rested_at_and_keeps_the_size() -> None:
    run = running()
    run.save(all_ranks=True)
    run.commit()
    pause(run)
    run.save(1, 2, all_ranks=True)
    run.commit()
    for rank in range(2):
        run.say(rank, e.AtSavePoint(1))
    for rank in range(2):
        run.leave(rank, e.Ended())
    assert is_resting(run)
    run.feed(c.ResumeAsked())
    assert run.all_of(c.PrepareGroup)[-1].keep_size


def test_what_is_in_memory_alone_is_on_storage_before_the_workers_go() -> None:
    run = running(checkpoint=CheckpointConfig(memory_only_between=10))
    pause(run)
    run.say(0, reports(0), saved(), e.PartHeld(0, 10))
    run.say(1, reports(0), saved(), part())
    for rank in range(2):
        run.say(rank, e.AtSavePoint(0))
    for rank in range(2):
        run.leave(rank, e.Ended())
    (asked,) = run.all_of(c.StoreHeld)
    assert not is_resting(run)
    run.feed(c.HeldStored(asked.manifest))
    assert not is_resting(run)
    run.commit()
    assert is_resting(run)


def test_parts_that_come_late_change_nothing() -> None:
    run = running()
    pause(run)
    reach(run)
    assert run.say(0, part(0), saved(1)) == []
    assert run.gone(0, "killed") == []
    run.advance(60)
    assert is_resting(run)


def test_a_checkpoint_in_memory_alone_is_not_left_there_by_a_pause_between_two_attempts() -> None:
    run = running(checkpoint=CheckpointConfig(memory_only_between=10))
    run.say(0, reports(0), saved(), e.PartHeld(0, 10))
    run.say(1, reports(0), saved(), part())
    kill(run)
    pause(run)
    assert not is_resting(run), "no worker is there that could write it"
    run.ready()
    assert len(run.all_of(c.AgreeOnSave)) == 1
