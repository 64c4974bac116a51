"""The state machine of a run: each state, each edge, and what the readers are told on the way."""

from __future__ import annotations

import pytest

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.machine import EXPLAIN_S, GATHER_S
from raysgd.controller.rounds import RoundMerger
from raysgd.controller.shelf import Start
from raysgd.controller.states import Closing, Ending, Preparing, Running
from raysgd.session import events as e
from support.stepping import RETURNED, Stepper, broken, failed, part, reports, saved, uri_of


def running(num_ranks: int = 2, **settings: object) -> Stepper:
    """A run whose first attempt is under way."""
    run = Stepper(num_ranks, **settings)  # type: ignore[arg-type]
    run.ready()
    return run


def kill(run: Stepper, rank: int = 0) -> None:
    """A worker dies, the others leave, and the run goes on to what follows."""
    run.gone(rank, "killed")
    run.advance(GATHER_S)
    for other in set(range(run.num_ranks)) - {rank}:
        run.leave(other, e.Ended())


def finish(run: Stepper) -> None:
    """All ranks return and what is to be written is written."""
    for rank in range(run.num_ranks):
        run.leave(rank)
    run.commit()


# -- the happy path ----------------------------------------------------------------------------------------------------


def test_a_run_prepares_enters_runs_and_closes() -> None:
    run = Stepper()
    assert run.told == [c.PrepareGroup(1)]
    run.ready()
    assert isinstance(run.machine.state, Running)
    assert run.entries == [c.Enter(1, None, 1, 0, 0.0)]
    run.leave(0)
    assert not run.is_closed
    run.leave(1)
    assert run.is_closed
    assert run.outcome is not None and run.outcome.kind == "done"
    kinds = [frame.kind for frame in run.frames]
    assert kinds == [frames.ATTEMPT, frames.RANK_DONE, frames.RANK_DONE, frames.ATTEMPT_END]


def test_reports_are_passed_on_as_the_worker_encoded_them() -> None:
    run = running()
    run.say(1, e.Reports(3, 2, b"[not parsed"))
    (say,) = run.said(frames.REPORTS)
    assert (say.attempt, say.rank, say.data, say.rows) == (1, 1, {"first": 3, "count": 2}, b"[not parsed")


def test_the_group_is_left_once_all_have_returned_and_not_before() -> None:
    run = running()
    run.leave(0)
    assert run.all_of(c.LeaveGroup) == []
    run.leave(1)
    assert run.all_of(c.LeaveGroup) == [c.LeaveGroup(1)]


def test_a_rank_has_left_when_its_stream_has_ended_not_when_it_says_that_it_returned() -> None:
    run = running(1)
    run.say(0, RETURNED)
    assert run.outcome is None
    run.gone(0)
    assert run.is_closed


def test_success_is_told_when_the_last_checkpoint_is_durable() -> None:
    run = running()
    run.save()
    run.leave(0)
    run.leave(1)
    assert run.outcome is None and not run.is_closed
    run.commit()
    assert run.outcome is not None and run.outcome.kind == "done"
    assert run.is_closed


def test_an_error_is_told_before_anything_is_cleaned_up() -> None:
    run = running(3)
    run.say(0, failed())
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.kind == "error"
    assert not run.is_closed
    run.gone(0)
    run.leave(1, e.Ended())
    assert not run.is_closed
    run.leave(2, e.Ended())
    assert run.is_closed


def test_what_workers_have_to_say_beside_training_is_noted() -> None:
    run = running()
    run.say(1, e.Entered(5.0), e.Sample({"rank": 1, "rss_bytes": 7}), e.Warned("careful"))
    assert run.notes("entered") == [{"rank": 1, "attempt": 1, "timestamp": 5.0}]
    assert run.notes("sample") == [{"rank": 1, "rss_bytes": 7}]
    assert run.notes("warning") == [{"rank": 1, "message": "careful"}]


# -- workers that cannot be had ----------------------------------------------------------------------------------------


def test_workers_that_can_never_be_had_end_the_run_with_that_error() -> None:
    run = Stepper()
    run.feed(c.GroupFailed("InfeasibleError", "needs 4 GPU", can_retry=False))
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.error_type, run.outcome.message) == ("InfeasibleError", "needs 4 GPU")


def test_a_worker_that_dies_while_starting_is_a_failure_like_any_other() -> None:
    run = Stepper(failure=FailureConfig(max_failures=1))
    run.feed(c.GroupFailed("WorkerError", "a worker died while it was starting", can_retry=True))
    assert run.machine.state == Preparing(2)
    assert run.all_of(c.PrepareGroup) == [c.PrepareGroup(1), c.PrepareGroup(2)]
    run.feed(c.GroupFailed("WorkerError", "a worker died while it was starting", can_retry=True))
    assert run.is_closed and run.outcome is not None
    assert run.outcome.error_type == "WorkerDiedError"


def test_news_of_a_group_that_nobody_waits_for_are_passed_over() -> None:
    run = running()
    assert run.ready() == []
    assert run.feed(c.GroupFailed("WorkerError", "died", can_retry=True)) == []
    assert isinstance(run.machine.state, Running)


# -- deaths ------------------------------------------------------------------------------------------------------------


def test_a_death_ends_the_attempt_on_the_survivors_and_enters_again_when_they_have_left() -> None:
    run = running(3)
    run.gone(1, "killed by SIGKILL")
    (end,) = run.all_of(c.EndRanks)
    assert (end.attempt, end.ranks) == (1, (0, 2))
    run.advance(GATHER_S)
    run.leave(0, e.Ended())
    assert len(run.all_of(c.PrepareGroup)) == 1
    run.leave(2, e.Ended())
    assert run.all_of(c.PrepareGroup)[-1] == c.PrepareGroup(2)
    run.ready()
    assert [entry.attempt for entry in run.entries] == [1, 2]


@pytest.mark.parametrize("max_failures", [0, 1, 3])
def test_max_failures_allows_exactly_that_many_reentries(max_failures: int) -> None:
    run = Stepper(failure=FailureConfig(max_failures=max_failures))
    for _ in range(max_failures + 1):
        assert run.outcome is None
        run.ready()
        kill(run, rank=1)
    assert len(run.entries) == max_failures + 1
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.kind, run.outcome.error_type, run.outcome.ranks) == ("error", "WorkerDiedError", (1,))
    assert [note["action"] for note in run.notes("failure")][-1] == "give up"


def test_a_run_that_needed_all_its_reentries_still_succeeds() -> None:
    run = Stepper(failure=FailureConfig(max_failures=2))
    for _ in range(2):
        run.ready()
        kill(run)
    run.ready()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_max_failures_of_minus_one_is_no_limit() -> None:
    run = Stepper(failure=FailureConfig(max_failures=-1))
    for _ in range(20):
        run.ready()
        kill(run)
    assert run.outcome is None
    assert [prepare.attempt for prepare in run.all_of(c.PrepareGroup)] == list(range(1, 22))


def test_the_error_after_too_many_failures_says_what_happened_how_often_and_what_to_go_on_from() -> None:
    run = running(failure=FailureConfig(max_failures=1))
    run.save()
    run.commit()
    kill(run, rank=1)
    run.ready()
    kill(run, rank=1)
    assert run.outcome is not None
    for part_of_text in ("rank 1", "node1", "killed", "failure 2", "max_failures=1", uri_of(1)):
        assert part_of_text in run.outcome.message
    assert run.outcome.failures == 2


def test_the_error_says_so_where_there_is_no_checkpoint() -> None:
    run = running(failure=FailureConfig(max_failures=0))
    kill(run)
    assert run.outcome is not None
    assert "no checkpoint" in run.outcome.message


def test_two_deaths_at_once_count_as_one() -> None:
    run = Stepper(3, failure=FailureConfig(max_failures=1))
    run.ready()
    run.gone(0, "killed")
    run.advance(GATHER_S / 2)
    run.gone(2, "killed")
    run.advance(GATHER_S)
    run.leave(1, e.Ended())
    (failure,) = run.notes("failure")
    assert failure["ranks"] == [0, 2]
    assert failure["nodes"] == ["node0", "node2"]
    run.ready()
    assert len(run.entries) == 2


def test_a_death_while_the_survivors_are_leaving_belongs_to_the_same_failure() -> None:
    run = Stepper(3, failure=FailureConfig(max_failures=1))
    run.ready()
    run.gone(0, "killed")
    run.advance(GATHER_S)
    run.gone(1, "killed too")
    run.leave(2, e.Ended())
    run.ready()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"
    assert len(run.notes("failure")) == 1


def test_each_run_has_its_own_count_of_failures() -> None:
    failure = FailureConfig(max_failures=1)
    for _ in range(3):
        run = running(failure=failure)
        kill(run)
        run.ready()
        finish(run)
        assert run.outcome is not None and run.outcome.kind == "done"


def test_a_rank_that_had_returned_runs_again_when_another_dies() -> None:
    run = running()
    run.leave(0)
    run.gone(1, "killed")
    run.advance(GATHER_S)
    run.ready()
    assert isinstance(run.machine.state, Running)
    assert run.machine.state.inside == {0, 1}


def test_a_process_that_dies_on_its_way_out_has_not_returned() -> None:
    run = running()
    run.leave(0)
    run.say(1, RETURNED)
    run.gone(1, "killed")
    run.advance(GATHER_S)
    assert run.all_of(c.PrepareGroup)[-1] == c.PrepareGroup(2)


# -- exceptions --------------------------------------------------------------------------------------------------------


def test_an_exception_of_train_func_is_the_users_and_is_not_retried() -> None:
    run = running()
    error = failed("bad batch", at=1000.0)
    run.say(1, error)
    run.advance(GATHER_S)
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.failed, run.outcome.rank, run.outcome.node) == ("error", error, 1, "node1")
    assert run.outcome.followed == ()
    run.gone(1)
    run.leave(0, e.Ended())
    assert len(run.entries) == 1 and run.is_closed


def test_the_exception_that_was_first_in_time_wins_whichever_arrives_first() -> None:
    run = running(3)
    run.say(2, failed("second", at=1000.02))
    run.say(0, failed("first", at=1000.01))
    run.say(1, broken("peer gone", at=1000.03))
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.failed is not None
    assert (run.outcome.failed.summary, run.outcome.rank) == ("first", 0)
    assert run.outcome.followed == ((2, "second"), (1, "peer gone"))


def test_a_collective_that_broke_before_the_exception_arrived_is_listed_not_raised() -> None:
    run = running()
    run.say(1, broken(at=999.0))  # its clock is behind
    run.advance(1.0)
    assert run.outcome is None
    run.say(0, failed("the cause", at=1000.0))
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.failed is not None
    assert run.outcome.failed.summary == "the cause"
    assert run.outcome.followed == ((1, "connection closed by peer"),)


def test_a_death_explains_a_broken_collective() -> None:
    run = running(3)
    run.say(0, broken(at=1000.0))
    run.gone(0)
    run.advance(EXPLAIN_S / 2)
    run.gone(1, "killed")
    run.leave(2, broken(at=1000.0))
    run.advance(GATHER_S)
    assert run.outcome is None
    (failure,) = run.notes("failure")
    assert failure["ranks"] == [1]
    assert run.all_of(c.PrepareGroup)[-1] == c.PrepareGroup(2)


def test_a_broken_collective_that_nothing_explains_is_raised_after_a_while() -> None:
    run = running(2, failure=FailureConfig(abort_grace_s=60))
    run.say(0, broken("timed out", at=1000.0))
    run.gone(0)
    run.advance(GATHER_S + EXPLAIN_S * 0.9)
    assert run.outcome is None
    run.advance(EXPLAIN_S * 0.2)
    assert run.outcome is not None and run.outcome.failed is not None
    assert (run.outcome.failed.summary, run.outcome.rank) == ("timed out", 0)


def test_there_is_nothing_to_wait_for_when_all_ranks_have_said_why_they_left() -> None:
    run = running()
    run.leave(0, broken("timed out", at=1000.0))
    run.leave(1, broken("timed out", at=1000.1))
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.rank, run.outcome.followed) == (0, ((1, "timed out"),))


def test_an_exception_that_came_after_a_death_followed_from_it() -> None:
    run = running()
    run.gone(1, "killed")
    run.say(0, failed("queue of the dead peer is closed", at=run.now))
    run.advance(GATHER_S)
    run.gone(0)
    assert run.outcome is None
    assert run.all_of(c.PrepareGroup)[-1] == c.PrepareGroup(2)


def test_an_exception_well_before_a_death_is_the_cause() -> None:
    run = running()
    run.say(0, broken(at=1000.0))
    run.now = 1001.0
    run.say(1, failed("the cause", at=1000.0))
    run.gone(0, "aborted by its framework")
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.failed is not None
    assert run.outcome.failed.summary == "the cause"


def test_a_process_group_that_cannot_be_formed_is_a_failure_of_the_system() -> None:
    run = running(failure=FailureConfig(max_failures=1))
    for _ in range(2):
        assert run.outcome is None
        run.leave(0, failed("store timed out", at=run.now, in_setup=True))
        run.leave(1, failed("store timed out", at=run.now, in_setup=True))
        run.ready()
    assert run.outcome is not None and run.outcome.error_type == "WorkerDiedError"
    assert "store timed out" in run.outcome.message


# -- where an attempt starts from --------------------------------------------------------------------------------------

GIVEN = Start("/elsewhere/checkpoint_7", iteration=70, time_total_s=7.5)


def test_a_failure_before_the_first_save_starts_again_from_what_was_given() -> None:
    run = running(start=GIVEN)
    run.say(0, reports(0, 5))
    kill(run)
    run.ready()
    assert [entry.checkpoint for entry in run.entries] == [GIVEN.uri, GIVEN.uri]
    assert run.entries[1] == c.Enter(2, GIVEN.uri, 1, 70, 7.5)


def test_a_failure_after_a_save_goes_on_from_it() -> None:
    run = running(start=GIVEN)
    run.save(0, reports=2)
    run.save(1, reports=3)
    run.commit()
    kill(run)
    run.ready()
    assert run.entries[1] == c.Enter(2, uri_of(2), 3, 73, 3.0)
    run.save(0, reports=4)
    run.commit()
    kill(run)
    run.ready()
    assert run.entries[2] == c.Enter(3, uri_of(3), 4, 77, 4.0)


def test_a_save_that_was_not_complete_when_the_attempt_ended_is_not_gone_on_from() -> None:
    run = running()
    run.save(0, reports=1)
    run.commit()
    run.say(0, saved(1, 2), part(1))  # rank 1 dies before its call
    kill(run, rank=1)
    run.ready()
    assert run.entries[1] == c.Enter(2, uri_of(1), 2, 1, 1.0)


def test_a_save_that_becomes_complete_while_the_attempt_is_ending_counts() -> None:
    run = running(3)
    run.say(0, saved())
    run.say(1, saved(), part())
    run.say(2, saved(), part())
    run.gone(2, "killed")
    run.advance(GATHER_S)
    run.say(0, part())
    run.leave(0, e.Ended())
    run.leave(1, e.Ended())
    run.commit()
    run.ready()
    assert run.entries[1].checkpoint == uri_of(1)


# -- older attempts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [reports(0), saved(), part(), RETURNED, failed(), e.Ended(), e.Warned("late")])
def test_events_of_an_older_attempt_are_refused(event: e.WorkerEvent) -> None:
    run = running()
    kill(run)
    for _ in range(2):  # while workers are had again, and when they run
        assert run.say(1, event, attempt=1) == []
        assert run.gone(1, "late", attempt=1) == []
        assert run.feed(c.TimeUp("grace", 1)) == []
        run.ready()
    assert isinstance(run.machine.state, Running) and run.machine.state.inside == {0, 1}


def test_a_rank_that_died_before_cannot_make_a_checkpoint_of_the_next_attempt_complete() -> None:
    run = running()
    kill(run)
    run.ready()
    run.say(0, saved(), part())
    run.say(1, saved(), part(), attempt=1)
    assert run.all_of(c.Commit) == []


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_a_stop_asks_and_leaves_it_to_train_func() -> None:
    run = running()
    assert c.AskToStop(1) in run.stop()
    assert run.all_of(c.EndRanks) == []
    run.leave(0)
    run.leave(1)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_a_rank_that_is_ended_by_a_stop_takes_the_others_with_it() -> None:
    run = running(3)
    run.stop()
    run.say(1, e.Ended())
    (end,) = run.all_of(c.EndRanks)
    assert end.ranks == (0, 1, 2)
    for rank in range(3):
        run.leave(rank, e.Ended())
    assert run.outcome is not None and run.outcome.kind == "stopped"
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
    run = Stepper()
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
    run.advance(1.1)
    run.gone(1, "killed")
    assert run.outcome is not None and run.outcome.failed is not None
    assert run.outcome.failed.summary == "timed out"


# -- what is being written ---------------------------------------------------------------------------------------------


def test_a_commit_in_flight_is_waited_for_before_the_next_attempt() -> None:
    run = running()
    run.save()
    kill(run)
    assert isinstance(run.machine.state, Ending)
    run.commit()
    assert run.machine.state == Preparing(2)
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
    assert run.machine.newest_checkpoint == uri_of(1)


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
    assert run.machine.newest_checkpoint == uri_of(3)


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
    run.say(0, saved(0, 0, saves_first=True), part())
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
    run.say(0, saved(0, 0, saves_first=True), part(), reports(0), e.Scored(0, b'{"loss": 0.5}'))
    run.commit()
    (say,) = run.said(frames.CHECKPOINT)
    assert say.data["metrics"] == {"loss": 0.5}
    assert [command.amend for command in run.all_of(c.Commit)] == [False, True]


# -- the rule of save_checkpoint ---------------------------------------------------------------------------------------


def broken_rule(run: Stepper) -> str:
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


def iterations(run: Stepper) -> list[tuple[int, int, tuple[int, ...]]]:
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
