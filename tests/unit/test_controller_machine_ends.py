"""The run's machine, stepped: how runs stop, what is cleaned up, what is still written."""

from __future__ import annotations

import pytest

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.moves import EXPLAIN_S, GATHER_S
from raysgd.controller.rounds import RoundMerger
from raysgd.controller.states import Closing, Ending, Preparing, has_ended_well
from raysgd.session import events as e
from raysgd.testing.simulation import (
    RETURNED,
    SimulatedRun,
    broken,
    failed,
    finish,
    kill,
    part,
    reports,
    running,
    saved,
    uri_of,
)

# -- stopping ----------------------------------------------------------------------------------------------------------


def test_a_stop_asks_and_leaves_it_to_train_func() -> None:
    run = running()
    assert c.AskToStop(1) in run.stop()
    assert run.all_of(c.EndRanks) == []
    run.leave(0)
    run.leave(1)
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.message) == ("stopped", "enough")
    assert has_ended_well(run.machine.state)


def test_a_rank_that_is_ended_by_a_stop_takes_the_others_with_it() -> None:
    run = running(3)
    run.stop()
    run.say(1, e.Ended())
    (end,) = run.all_of(c.EndRanks)
    assert end.ranks == (0, 1, 2)
    for rank in range(3):
        run.leave(rank, e.Ended())
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.message) == ("stopped", "enough")
    assert len(run.all_of(c.EndRanks)) == 1
    assert run.is_closed


def test_a_collective_that_breaks_because_a_peer_stopped_is_no_error() -> None:
    run = running()
    run.stop()
    run.leave(0, e.Ended())
    run.leave(1, broken())
    assert run.outcome is not None and run.outcome.kind == "stopped"


def test_a_rank_that_does_not_stop_in_time_is_killed() -> None:
    run = running(failure=FailureConfig(abort_grace_s=5))
    run.stop()
    run.leave(0, e.Ended())
    run.advance(4.9)
    assert run.all_of(c.KillRanks) == []
    run.advance(0.2)
    assert run.all_of(c.KillRanks) == [c.KillRanks((1,))]
    run.gone(1, "killed")
    assert run.outcome is not None and run.outcome.kind == "stopped"
    assert run.notes("failure") == []


def test_all_rounds_of_a_stopped_run_are_emitted() -> None:
    run = running()
    run.stop()
    run.leave(0, e.Ended())
    run.leave(1, e.Ended())
    (end,) = run.said(frames.ATTEMPT_END)
    assert end.data == {"keep_rounds": None}


def test_a_worker_may_ask_for_a_stop() -> None:
    run = running()
    assert c.AskToStop(1) in run.say(0, e.StopWanted("good enough"))
    assert run.notes("stop") == [{"why": "good enough"}]


def test_a_run_that_was_asked_to_stop_is_not_started_again_for_a_death() -> None:
    run = running()
    run.stop()
    kill(run)
    assert run.is_closed and run.outcome is not None
    assert run.outcome.kind == "stopped"
    assert len(run.all_of(c.PrepareGroup)) == 1


def test_an_exception_is_raised_though_the_run_was_to_stop() -> None:
    run = running()
    run.stop()
    run.leave(0, failed("in its last save", at=1000.0))
    run.leave(1, e.Ended())
    assert run.outcome is not None and run.outcome.failed is not None
    assert run.outcome.failed.summary == "in its last save"


def test_an_exception_that_came_before_the_stop_is_raised() -> None:
    run = running()
    run.say(0, failed("first", at=1000.0))
    run.stop()
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.failed is not None
    assert run.outcome.failed.summary == "first"


@pytest.mark.parametrize("cancel", [False, True])
def test_stopping_before_the_workers_are_up_closes_at_once(cancel: bool) -> None:
    run = SimulatedRun()
    run.stop(cancel=cancel)
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.kind, run.outcome.message) == ("cancelled" if cancel else "stopped", "enough")
    assert run.ready() == []


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("is_settled", [False, True])
def test_stopping_between_two_attempts_leaves_out_the_next(cancel: bool, is_settled: bool) -> None:
    run = running()
    run.gone(0, "killed")
    if is_settled:
        run.advance(GATHER_S)
    run.stop(cancel=cancel)
    run.advance(GATHER_S)
    run.leave(1, e.Ended())
    assert run.is_closed and run.outcome is not None
    assert run.outcome.kind == ("cancelled" if cancel else "stopped")
    assert len(run.all_of(c.PrepareGroup)) == 1


def test_a_run_that_is_stopped_between_two_attempts_keeps_the_rounds_up_to_its_checkpoint() -> None:
    run = running()
    run.save(0, reports=2)
    run.commit()
    run.gone(0, "killed")
    run.advance(GATHER_S)
    run.stop()
    run.leave(1, e.Ended())
    assert [say.data for say in run.said(frames.ATTEMPT_END)] == [{"keep_rounds": 2}]


@pytest.mark.parametrize("state", ["preparing", "running", "ending"])
def test_the_error_of_a_callback_ends_the_run_with_that_error(state: str) -> None:
    run = SimulatedRun() if state == "preparing" else running()
    if state == "ending":
        run.gone(1, "killed")
    error = failed("the logger's server is gone")
    run.feed(c.StopAsked("a critical callback failed", cancel=True, failed=error))
    run.advance(GATHER_S)
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.failed, run.outcome.rank) == ("error", error, None)
    for rank in range(run.num_ranks):
        run.gone(rank)
    assert run.is_closed
    assert len(run.all_of(c.PrepareGroup)) == 1


@pytest.mark.parametrize("cancel", [False, True])
def test_stopping_a_run_whose_outcome_stands_changes_nothing(cancel: bool) -> None:
    run = running()
    run.save()
    run.leave(0)
    run.leave(1)
    assert isinstance(run.machine.state, Closing)
    assert run.stop(cancel=cancel) == []
    run.commit()
    assert run.outcome is not None and run.outcome.kind == "done"
    assert run.is_closed
    assert run.stop(cancel=cancel) == []


def test_a_cancel_ends_all_ranks_at_once() -> None:
    run = running()
    run.stop(cancel=True)
    (end,) = run.all_of(c.EndRanks)
    assert end.ranks == (0, 1)
    run.leave(0, e.Ended())
    run.leave(1, failed("in its own clean-up", at=run.now))
    assert run.is_closed and run.outcome is not None
    assert run.outcome.kind == "cancelled"


def test_a_cancel_after_a_stop_ends_what_did_not_stop() -> None:
    run = running()
    run.stop()
    run.stop(cancel=True)
    assert [end.ranks for end in run.all_of(c.EndRanks)] == [(0, 1)]
    run.leave(0, e.Ended())
    run.leave(1, e.Ended())
    assert run.outcome is not None and run.outcome.kind == "cancelled"


def test_a_cancel_makes_an_exception_that_is_not_told_yet_unimportant() -> None:
    run = running()
    run.say(0, failed(at=1000.0))
    run.stop(cancel=True)
    run.advance(GATHER_S)
    run.gone(0)
    run.leave(1, e.Ended())
    assert run.outcome is not None and run.outcome.kind == "cancelled"


def test_a_second_cancel_changes_nothing() -> None:
    run = running()
    run.stop(cancel=True)
    assert run.stop(cancel=True) == []


# -- the grace timer ---------------------------------------------------------------------------------------------------


def test_a_rank_still_inside_after_the_grace_time_is_killed_and_replaced() -> None:
    run = running(3, failure=FailureConfig(abort_grace_s=2, max_failures=1))
    run.gone(0, "killed")
    run.advance(1.9)
    run.leave(1, e.Ended())
    assert run.all_of(c.KillRanks) == []
    run.advance(0.2)
    assert run.all_of(c.KillRanks) == [c.KillRanks((2,))]
    run.gone(2, "killed")
    run.ready()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"
    assert [failure["ranks"] for failure in run.notes("failure")] == [[0]]


def test_nobody_is_killed_when_all_left_in_time() -> None:
    run = running()
    kill(run)
    run.advance(100)
    run.ready()
    run.advance(100)
    assert run.all_of(c.KillRanks) == []


def test_a_rank_that_hangs_after_an_exception_elsewhere_is_killed_and_the_error_stays() -> None:
    run = running(failure=FailureConfig(abort_grace_s=2))
    run.leave(0, failed("boom", at=1000.0))
    run.advance(2.1)
    assert run.all_of(c.KillRanks) == [c.KillRanks((1,))]
    run.gone(1, "killed")
    assert run.is_closed and run.outcome is not None
    assert run.outcome.failed is not None


def test_a_rank_that_hangs_in_a_broken_collective_is_killed_and_its_death_explains_nothing() -> None:
    run = running(failure=FailureConfig(abort_grace_s=1))
    run.leave(0, broken("timed out", at=1000.0))
    run.advance(EXPLAIN_S)
    assert run.all_of(c.KillRanks) == [] and run.outcome is None
    run.advance(GATHER_S * 2)
    assert run.all_of(c.KillRanks) == [c.KillRanks((1,))]
    assert run.outcome is not None and run.outcome.failed is not None
    assert run.outcome.failed.summary == "timed out"
    run.gone(1, "killed")
    assert run.is_closed


def test_a_death_explains_a_broken_collective_also_where_it_is_told_after_the_time_to_leave() -> None:
    """As that of a process on a lost node on a busy machine."""
    run = running(3, failure=FailureConfig(abort_grace_s=1, max_failures=1))
    for rank in (0, 1):
        run.leave(rank, broken("connection reset by peer", at=1000.0))
    run.advance(EXPLAIN_S * 0.9)
    run.gone(2, "its node was lost")
    run.advance(GATHER_S)
    assert run.outcome is None
    assert [failure["ranks"] for failure in run.notes("failure")] == [[2]]
    assert run.all_of(c.PrepareGroup)[-1] == c.PrepareGroup(2)


def test_who_hangs_beside_a_death_that_is_told_late_is_killed_then() -> None:
    run = running(3, failure=FailureConfig(abort_grace_s=1, max_failures=1))
    run.leave(0, broken("connection reset by peer", at=1000.0))
    run.advance(EXPLAIN_S * 0.9)
    assert run.all_of(c.KillRanks) == []
    run.gone(2, "its node was lost")
    run.advance(GATHER_S)
    assert run.all_of(c.KillRanks) == [c.KillRanks((1,))]
    run.gone(1, "killed")
    assert [failure["ranks"] for failure in run.notes("failure")] == [[2]]
    assert run.all_of(c.PrepareGroup)[-1] == c.PrepareGroup(2)


# -- what is being written ---------------------------------------------------------------------------------------------


def test_a_commit_in_flight_is_waited_for_before_the_next_attempt() -> None:
    run = running()
    run.save()
    kill(run)
    assert isinstance(run.machine.state, Ending)
    run.commit()
    assert run.machine.state == Preparing(2, serial=2)
    run.ready()
    assert run.entries[1].checkpoint == uri_of(1)


@pytest.mark.parametrize("ending", ["error", "cancel"])
def test_a_commit_in_flight_is_waited_for_before_closing(ending: str) -> None:
    run = running()
    run.save()
    if ending == "error":
        run.leave(0, failed(at=1000.0))
    else:
        run.stop(cancel=True)
        run.leave(0, e.Ended())
    run.leave(1, e.Ended())
    run.advance(1)
    assert isinstance(run.machine.state, Closing)
    run.commit()
    assert run.is_closed
    assert run.machine.desk.newest_number == 1


def test_a_checkpoint_that_cannot_be_written_ends_the_run() -> None:
    run = running()
    run.save()
    run.fail_commit("disk full")
    assert run.all_of(c.EndRanks)
    run.leave(0, e.Ended())
    run.leave(1, e.Ended())
    assert run.is_closed and run.outcome is not None
    assert run.outcome.error_type == "StorageError"
    assert "checkpoint 1 could not be written: disk full" in run.outcome.message


def test_a_part_that_cannot_be_written_ends_the_run() -> None:
    run = running()
    run.say(0, saved(), e.PartFailed(0, "bucket is gone"))
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.error_type == "StorageError"
    assert "bucket is gone" in run.outcome.message


def test_the_last_checkpoint_failing_after_all_have_returned_is_an_error_too() -> None:
    run = running()
    run.save()
    run.leave(0)
    run.leave(1)
    run.fail_commit()
    assert run.is_closed and run.outcome is not None
    assert run.outcome.error_type == "StorageError"


def test_with_warn_training_goes_on_without_that_checkpoint() -> None:
    run = running(checkpoint=CheckpointConfig(on_write_error="warn"))
    run.save(0)
    run.fail_commit()
    run.say(0, saved(1, 2), e.PartFailed(1, "disk full"))
    run.say(1, saved(1, 2), part(1))
    assert len(run.notes("warning")) == 2
    run.save(2, reports=3)
    run.commit()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"
    assert run.machine.desk.newest_number == 3


def test_a_failed_write_does_not_make_an_error_worse() -> None:
    run = running()
    run.save()
    run.leave(0, failed("boom", at=1000.0))
    run.leave(1, e.Ended())
    run.fail_commit()
    assert run.is_closed and run.outcome is not None
    assert run.outcome.failed is not None


def test_what_is_no_longer_kept_is_deleted_and_the_readers_hear_of_it() -> None:
    run = running(checkpoint=CheckpointConfig(num_to_keep=1))
    run.save(0)
    run.commit()
    run.save(1, reports=2)
    run.commit()
    assert run.all_of(c.DeleteCheckpoint) == [c.DeleteCheckpoint(1)]
    assert [say.data["number"] for say in run.said(frames.CHECKPOINT)] == [1, 2]
    assert [say.data["number"] for say in run.said(frames.CHECKPOINT_DELETED)] == [1]
    kill(run)
    run.ready()
    assert run.entries[1].checkpoint == uri_of(2)


def test_a_checkpoint_of_a_loop_that_saves_first_belongs_to_the_round_after_it() -> None:
    run = running(1, checkpoint=CheckpointConfig(score_attribute="loss"))
    run.say(0, saved(0, 0), part())
    run.commit()
    run.say(0, reports(0), e.Scored(0, b'{"loss": 0.5}'))
    (amended,) = [command for command in run.all_of(c.Commit) if command.amend]
    assert (amended.manifest.metrics, amended.manifest.iteration) == ({"loss": 0.5}, 1)
    assert [say.data["metrics"] for say in run.said(frames.CHECKPOINT_SCORED)] == [{"loss": 0.5}]
    kill(run)
    run.ready()
    assert run.entries[1].iterations_before == 1


def test_a_score_that_comes_while_its_checkpoint_is_being_written_is_not_lost() -> None:
    run = running(1)
    run.say(0, saved(0, 0), part(), reports(0), e.Scored(0, b'{"loss": 0.5}'))
    run.commit()
    (say,) = run.said(frames.CHECKPOINT)
    assert say.data["metrics"] == {"loss": 0.5}
    assert [command.amend for command in run.all_of(c.Commit)] == [False, True]


# -- the rule of save_checkpoint ---------------------------------------------------------------------------------------


def broken_rule(run: SimulatedRun) -> str:
    """The run ends for a rule that was broken; returns which, as the user is told."""
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.error_type == "CheckpointError"
    for rank in range(run.num_ranks):
        run.gone(rank)
    assert run.is_closed
    return run.outcome.message


def test_saves_with_different_arguments_break_the_rule() -> None:
    run = running()
    run.say(0, saved(all_ranks=True))
    run.say(1, saved(all_ranks=False))
    assert "different all_ranks" in broken_rule(run)


def test_saves_at_different_places_of_the_data_break_the_rule() -> None:
    run = running()
    run.say(0, saved(), part(consumed=20))
    run.say(1, saved(), part(consumed=30))
    assert "Let every rank take equally many batches" in broken_rule(run)
    assert run.all_of(c.Commit) == []


def test_saving_on_rank_0_alone_is_noticed_while_it_goes_on() -> None:
    run = running()
    run.say(1, reports(0, 2))
    run.say(0, reports(0), saved(0, 1), part(), reports(1))
    assert run.outcome is None
    run.say(1, reports(2))
    run.say(0, saved(1, 2))
    assert "rank 0: 2, rank 1: 0" in broken_rule(run)


def test_a_save_that_some_ranks_never_made_is_noticed_at_the_end() -> None:
    run = running()
    run.say(0, saved(), part(), RETURNED)
    run.gone(0)
    run.say(1, RETURNED)
    assert "Every rank calls it, equally often" in broken_rule(run)


# -- what the readers make of it ---------------------------------------------------------------------------------------


def iterations(run: SimulatedRun) -> list[tuple[int, int, tuple[int, ...]]]:
    """Iteration, attempt and ranks of each result a reader of the run gets."""
    merger = RoundMerger()
    return [
        (result["training_iteration"], result["attempt"], result.ranks)
        for frame in run.frames
        for result in merger.feed(frame)
    ]


def test_rounds_up_to_the_newest_checkpoint_are_emitted_and_later_ones_made_again() -> None:
    run = running()
    run.say(0, reports(0, 4), saved(0, 2), part())
    run.say(1, reports(0, 1), saved(0, 2), part())
    run.commit()
    kill(run, rank=1)  # rank 1's second report was not flushed
    run.ready()
    run.say(0, reports(0, 2))
    run.say(1, reports(0, 2))
    finish(run)
    assert iterations(run) == [(1, 1, (0, 1)), (2, 1, (0,)), (3, 2, (0, 1)), (4, 2, (0, 1))]


def test_without_a_checkpoint_incomplete_rounds_are_dropped() -> None:
    run = running()
    run.say(0, reports(0, 4))
    run.say(1, reports(0, 1))
    kill(run)
    assert iterations(run) == [(1, 1, (0, 1))]


def test_what_ranks_report_after_the_outcome_was_told_makes_no_rounds() -> None:
    run = running()
    run.say(0, reports(0))
    run.say(1, reports(0))
    run.leave(0, failed(at=1000.0))
    run.advance(GATHER_S)
    assert run.outcome is not None
    run.say(1, reports(1, 5))
    run.leave(1, e.Ended())
    assert iterations(run) == [(1, 1, (0, 1))]
