"""The state machine of a run: each state, each edge, and what the readers are told on the way."""

from __future__ import annotations

import pytest

from raysgd.config import FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.moves import EXPLAIN_S, GATHER_S
from raysgd.controller.retries import MAX_PAUSE_S, PAUSE_S
from raysgd.controller.shelf import Start
from raysgd.controller.states import Running
from raysgd.session import events as e
from raysgd.testing.history import find_violations
from raysgd.testing.simulation import (
    RETURNED,
    SimulatedRun,
    broken,
    failed,
    finish,
    history_of,
    kill,
    part,
    reports,
    running,
    saved,
    uri_of,
)

# -- the happy path ----------------------------------------------------------------------------------------------------


def test_a_run_prepares_enters_runs_and_closes() -> None:
    run = SimulatedRun()
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
    assert run.notes("entered")[-1] == {"rank": 1, "attempt": 1, "timestamp": 5.0}
    assert run.notes("sample") == [{"rank": 1, "rss_bytes": 7}]
    assert run.notes("warning") == [{"rank": 1, "message": "careful"}]


# -- workers that cannot be had ----------------------------------------------------------------------------------------


def test_workers_that_can_never_be_had_end_the_run_with_that_error() -> None:
    run = SimulatedRun()
    run.feed(c.GroupFailed("InfeasibleError", "needs 4 GPU", can_retry=False))
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.error_type, run.outcome.message) == ("InfeasibleError", "needs 4 GPU")


def test_a_worker_that_dies_while_starting_is_a_failure_like_any_other() -> None:
    run = SimulatedRun(failure=FailureConfig(max_failures=1))
    died = c.GroupFailed("WorkerDiedError", "a worker died while it was starting", can_retry=True, ranks=(1,))
    run.feed(died)
    run.advance(PAUSE_S)
    assert run.all_of(c.PrepareGroup) == [c.PrepareGroup(1), c.PrepareGroup(1)]
    run.feed(died)
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.error_type, run.outcome.ranks) == ("WorkerDiedError", (1,))


def test_starts_that_fail_are_tried_again_after_pauses_that_grow() -> None:
    run = SimulatedRun(failure=FailureConfig(max_failures=-1))
    for number in range(2, 12):
        run.feed(c.GroupFailed("WorkerDiedError", "a worker died while it was starting", can_retry=True))
        pause_s = run.all_of(c.SetTimer)[-1].delay_s
        run.advance(pause_s - 0.01)
        assert len(run.all_of(c.PrepareGroup)) == number - 1
        run.advance(0.02)
        assert len(run.all_of(c.PrepareGroup)) == number
    pauses = [timer.delay_s for timer in run.all_of(c.SetTimer)]
    assert pauses == sorted(pauses) and (pauses[0], pauses[1], pauses[-1]) == (PAUSE_S, 2 * PAUSE_S, MAX_PAUSE_S)
    run.ready()
    run.gone(0, "killed")
    run.advance(GATHER_S)
    run.leave(1, e.Ended())
    assert len(run.all_of(c.PrepareGroup)) == 12  # the last start went well: the next is not held up


def test_a_group_that_did_not_form_leaves_its_number_to_the_next() -> None:
    run = SimulatedRun(2)
    run.ready(enters=False)
    for rank in range(2):
        run.leave(rank, failed("timed out", in_setup=True))
    run.advance(PAUSE_S)
    run.ready()
    run.advance(FailureConfig().abort_grace_s)
    assert run.all_of(c.KillRanks) == []  # the timers of the first group are not those of the second
    kill(run)
    run.ready()
    assert [entry.attempt for entry in run.entries] == [1, 1, 2]


def test_one_rank_that_entered_takes_the_number() -> None:
    run = SimulatedRun(2)
    run.ready(enters=False)
    run.say(1, e.Entered(1.0))
    kill(run)
    run.ready()
    assert [entry.attempt for entry in run.entries] == [1, 2]


@pytest.mark.parametrize("cancel", [False, True])
def test_a_run_that_is_stopped_during_such_a_pause_asks_for_no_more_workers(cancel: bool) -> None:
    run = SimulatedRun()
    run.feed(c.GroupFailed("WorkerDiedError", "a worker died while it was starting", can_retry=True))
    run.stop(cancel=cancel)
    assert run.is_closed
    run.advance(MAX_PAUSE_S)
    assert len(run.all_of(c.PrepareGroup)) == 1


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
    run = SimulatedRun(failure=FailureConfig(max_failures=max_failures))
    for _ in range(max_failures + 1):
        assert run.outcome is None
        run.ready()
        kill(run, rank=1)
    assert len(run.entries) == max_failures + 1
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.kind, run.outcome.error_type, run.outcome.ranks) == ("error", "WorkerDiedError", (1,))
    assert [note["action"] for note in run.notes("failure")][-1] == "give up"


def test_a_run_that_needed_all_its_reentries_still_succeeds() -> None:
    run = SimulatedRun(failure=FailureConfig(max_failures=2))
    for _ in range(2):
        run.ready()
        kill(run)
    run.ready()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_max_failures_of_minus_one_is_no_limit() -> None:
    run = SimulatedRun(failure=FailureConfig(max_failures=-1))
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
    run = SimulatedRun(3, failure=FailureConfig(max_failures=1))
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
    run = SimulatedRun(3, failure=FailureConfig(max_failures=1))
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


def test_the_exception_that_arrived_first_wins_whatever_the_clocks_say() -> None:
    run = running(3)
    run.say(1, broken("peer gone", at=1000.00))
    run.say(2, failed("first", at=1000.02))
    run.say(0, failed("second", at=1000.01))
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.failed is not None
    assert (run.outcome.failed.summary, run.outcome.rank) == ("first", 2)
    assert run.outcome.followed == ((1, "peer gone"), (0, "second"))


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
    run.say(0, failed("queue of the dead peer is closed", at=run.now - 100))  # its clock is far behind
    run.advance(GATHER_S)
    run.gone(0)
    assert run.outcome is None
    assert run.all_of(c.PrepareGroup)[-1] == c.PrepareGroup(2)


def test_the_last_exception_beside_deaths_is_told_when_the_run_is_given_up() -> None:
    run = running(3, failure=FailureConfig(max_failures=2))
    run.say(0, failed("ValueError: bad batch"), failed("of another thread"))
    run.say(1, failed("KeyError: 'x'"))
    run.gone(2, "killed")
    for exception in (failed("OSError: no space left"), broken()):
        run.advance(GATHER_S)
        for rank in range(3):
            run.gone(rank)
        run.ready()
        run.say(1, exception)
        run.gone(2, "killed")
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.error_type == "WorkerDiedError"
    assert "died: killed (failure 3 of the run" in run.outcome.message
    assert "The last exception of train_func beside it was OSError: no space left (rank 1)" in run.outcome.message
    assert [failure.get("raised") for failure in run.notes("failure")] == [
        "KeyError: 'x' (rank 1)",
        "OSError: no space left (rank 1)",
        None,
    ]


def test_an_exception_well_before_a_death_is_the_cause() -> None:
    run = running()
    run.say(0, broken())
    run.say(1, failed("the cause", at=2000.0))  # its clock is far ahead
    run.now += 0.5  # the controller was busy: its timers come late
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


# -- workers that hang -------------------------------------------------------------------------------------------------


def hung(rank: int, kind: str = "silent", attempt: int = 1) -> c.WorkerHung:
    return c.WorkerHung(rank, attempt, kind, "gave no sign of life for 10 s", {0: "line 1", 1: "line 2"})


@pytest.mark.parametrize("kind", ["silent", "stuck", "lost"])
def test_a_worker_that_hangs_is_ended_and_its_place_is_taken(kind: str) -> None:
    run = running(2)
    run.feed(hung(1, kind))
    assert run.all_of(c.KillRanks) == [c.KillRanks((1,), is_lost=kind == "lost")]
    (note,) = run.notes("hang")
    assert (note["rank"], note["kind"], note["stacks"]) == (1, kind, {"0": "line 1", "1": "line 2"})
    run.gone(1, "it was ended")
    run.leave(0, e.Ended())
    run.advance(GATHER_S)
    (failure,) = run.notes("failure")
    assert failure["ranks"] == [1] and "hung: it gave no sign of life" in failure["error"]
    assert run.all_of(c.PrepareGroup) == [c.PrepareGroup(1), c.PrepareGroup(2)]


def test_a_hang_of_an_attempt_that_is_over_is_none() -> None:
    run = running(2)
    run.feed(hung(1, attempt=0))
    assert run.all_of(c.KillRanks) == [] and run.notes("hang") == []


def test_a_worker_that_hangs_after_it_returned_fails_nothing() -> None:
    run = running(2)
    run.leave(1)
    run.feed(hung(1))
    assert run.all_of(c.KillRanks) == [c.KillRanks((1,))]
    run.leave(0)
    assert run.outcome is not None and run.outcome.kind == "done"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_checkpoint_that_is_damaged_is_passed_over_for_the_one_before(is_late: bool) -> None:
    run = running()
    for call in (0, 1):
        for rank in range(2):
            run.say(rank, reports(call))
        run.save(call, call + 1)
    run.commit()
    kill(run)
    run.ready()
    assert run.entries[-1].checkpoint == uri_of(2)
    if is_late:  # rank 1 learns of it by its broken collective
        run.say(1, broken())
    else:
        run.say(1, e.StartUnusable("its bytes are wrong"))  # each rank reads it
    run.say(0, e.StartUnusable("its bytes are wrong"))
    for rank in range(2):
        run.leave(rank, failed("CheckpointCorruptError: its bytes are wrong"))
    run.ready()
    entered = run.entries[-1]
    assert (entered.checkpoint, entered.iterations_before, entered.first_number) == (uri_of(1), 1, 3)
    assert [note["message"] for note in run.notes("warning")] == ["checkpoint 2 passed over: its bytes are wrong"]
    assert len(run.notes("failure")) == 1, "it is no failure of a worker"
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"
    assert find_violations(history_of(run)) == []


def test_the_only_checkpoint_is_not_passed_over_for_nothing() -> None:
    run = running()
    run.save()
    run.commit()
    kill(run)
    run.ready()
    run.say(0, e.StartUnusable("its bytes are wrong"))
    for rank in range(2):
        run.leave(rank, failed("its bytes are wrong"))
    run.advance(1)
    assert run.outcome is not None and run.outcome.kind == "error"
