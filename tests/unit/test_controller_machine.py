"""The state machine of a run: its states, its transitions, and the frames that readers get."""

from __future__ import annotations

import pytest

from raysgd.config import FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.run_plan import Start
from raysgd.controller.states import Running
from raysgd.session import events as e
from raysgd.testing.history import find_violations
from support.simulation import (
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

#: Promised numbers, written out.
EXPLAIN_S = 5.0
GATHER_S = 0.05
MAX_RESTART_DELAY_S = 5.0
RESTART_DELAY_S = 0.2

# -- successful runs ---------------------------------------------------------------------------------------------------


def test_successful_run_goes_through_all_states() -> None:
    run = SimulatedRun()
    assert run.prepared_attempts == [1] and run.entries == []
    run.ready()
    assert isinstance(run.machine.state, Running)
    (entry,) = run.entries
    assert (entry.attempt, entry.start, entry.first_number) == (1, Start(), 1)
    run.leave(0)
    assert not run.is_closed
    run.leave(1)
    assert run.is_closed
    assert run.outcome is not None and run.outcome.kind == "done"
    kinds = [frame.kind for frame in run.frames]
    assert kinds == [frames.ATTEMPT, frames.RANK_DONE, frames.RANK_DONE, frames.ATTEMPT_END]


def test_group_is_closed_once_after_all_ranks_returned() -> None:
    run = running()
    run.leave(0)
    assert run.all_of(c.LeaveGroup) == []
    run.leave(1)
    assert len(run.all_of(c.LeaveGroup)) == 1


def test_rank_has_left_when_its_event_stream_ends() -> None:
    run = running(1)
    run.deliver(0, RETURNED)
    assert run.outcome is None
    run.end_stream(0)
    assert run.is_closed


def test_success_is_published_after_last_checkpoint_is_committed() -> None:
    run = running()
    run.save()
    run.leave(0)
    run.leave(1)
    assert run.outcome is None and not run.is_closed
    run.commit()
    assert run.outcome is not None and run.outcome.kind == "done"
    assert run.is_closed


def test_error_is_published_before_cleanup() -> None:
    run = running(3)
    run.deliver(0, failed())
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.kind == "error"
    assert not run.is_closed
    run.end_stream(0)
    run.leave(1, e.Ended())
    assert not run.is_closed
    run.leave(2, e.Ended())
    assert run.is_closed


def test_worker_events_are_recorded() -> None:
    run = running()
    run.deliver(1, e.Entered(5.0), e.Sample({"rank": 1, "rss_bytes": 7}), e.Warned("careful"))
    assert run.events("entered")[-1] == {"rank": 1, "attempt": 1, "timestamp": 5.0}
    assert run.events("sample") == [{"rank": 1, "rss_bytes": 7}]
    assert run.events("warning") == [{"rank": 1, "message": "careful"}]


# -- workers that do not start -----------------------------------------------------------------------------------------


def test_infeasible_group_ends_the_run_with_its_error() -> None:
    run = SimulatedRun()
    run.feed(c.GroupFailed("InfeasibleError", "needs 4 GPU", can_retry=False))
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.error_type, run.outcome.message) == ("InfeasibleError", "needs 4 GPU")


def test_worker_death_while_starting_counts_as_failure() -> None:
    run = SimulatedRun(failure_config=FailureConfig(max_failures=1))
    died = c.GroupFailed("WorkerDiedError", "a worker died while it was starting", can_retry=True, ranks=(1,))
    run.feed(died)
    run.advance(RESTART_DELAY_S)
    assert run.prepared_attempts == [1, 1]
    run.feed(died)
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.error_type, run.outcome.ranks) == ("WorkerDiedError", (1,))


def test_failed_starts_are_retried_with_growing_delays() -> None:
    run = SimulatedRun(failure_config=FailureConfig(max_failures=-1))
    for number in range(2, 12):
        run.feed(c.GroupFailed("WorkerDiedError", "a worker died while it was starting", can_retry=True))
        delay_s = run.all_of(c.SetTimer)[-1].delay_s
        run.advance(delay_s - 0.01)
        assert len(run.prepared_attempts) == number - 1
        run.advance(0.02)
        assert len(run.prepared_attempts) == number
    delays = [timer.delay_s for timer in run.all_of(c.SetTimer)]
    assert delays == sorted(delays) and (delays[0], delays[1], delays[-1]) == (
        RESTART_DELAY_S,
        2 * RESTART_DELAY_S,
        MAX_RESTART_DELAY_S,
    )
    run.ready()
    run.end_stream(0, "killed")
    run.advance(GATHER_S)
    run.leave(1, e.Ended())
    assert len(run.prepared_attempts) == 12  # a successful start resets the delay


def test_group_that_did_not_form_does_not_use_up_an_attempt_number() -> None:
    run = SimulatedRun(2)
    run.ready(enters=False)
    for rank in (1, 0):
        run.leave(rank, failed("timed out", in_setup=True))
    run.advance(RESTART_DELAY_S)
    (failure,) = run.events("failure")
    assert list(failure["ranks"]) == [0, 1]
    run.ready()
    run.advance(FailureConfig().abort_grace_s)
    assert run.killed_ranks == []  # the timers of the first group do not affect the second
    kill(run)
    run.ready()
    assert [entry.attempt for entry in run.entries] == [1, 1, 2]


def test_attempt_number_is_used_up_when_one_rank_entered() -> None:
    run = SimulatedRun(2)
    run.ready(enters=False)
    run.deliver(1, e.Entered(1.0))
    kill(run)
    run.ready()
    assert [entry.attempt for entry in run.entries] == [1, 2]


@pytest.mark.parametrize("cancel", [False, True])
def test_stop_during_restart_delay_requests_no_more_workers(cancel: bool) -> None:
    run = SimulatedRun()
    run.feed(c.GroupFailed("WorkerDiedError", "a worker died while it was starting", can_retry=True))
    run.stop(cancel=cancel)
    assert run.is_closed
    run.advance(MAX_RESTART_DELAY_S)
    assert len(run.prepared_attempts) == 1


def test_group_events_outside_preparing_are_ignored() -> None:
    run = running()
    assert run.ready() == []
    assert run.feed(c.GroupFailed("WorkerError", "died", can_retry=True)) == []
    assert isinstance(run.machine.state, Running)


# -- deaths ------------------------------------------------------------------------------------------------------------


def test_next_attempt_starts_after_survivors_left() -> None:
    run = running(3)
    run.end_stream(1, "killed by SIGKILL")
    (end,) = run.all_of(c.EndAttempt)
    assert (end.attempt, end.ranks) == (1, (0, 2))
    run.advance(GATHER_S)
    run.leave(0, e.Ended())
    assert len(run.prepared_attempts) == 1
    run.leave(2, e.Ended())
    assert run.prepared_attempts[-1] == 2
    run.ready()
    assert [entry.attempt for entry in run.entries] == [1, 2]


@pytest.mark.parametrize("max_failures", [0, 1, 3])
def test_max_failures_allows_exactly_that_many_restarts(max_failures: int) -> None:
    run = SimulatedRun(failure_config=FailureConfig(max_failures=max_failures))
    for _ in range(max_failures + 1):
        assert run.outcome is None
        run.ready()
        kill(run, rank=1)
    assert len(run.entries) == max_failures + 1
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.kind, run.outcome.error_type, run.outcome.ranks) == ("error", "WorkerDiedError", (1,))
    assert [note["action"] for note in run.events("failure")][-1] == "give up"


def test_run_succeeds_after_max_failures_restarts() -> None:
    run = SimulatedRun(failure_config=FailureConfig(max_failures=2))
    for _ in range(2):
        run.ready()
        kill(run)
    run.ready()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_max_failures_of_minus_one_is_unlimited() -> None:
    run = SimulatedRun(failure_config=FailureConfig(max_failures=-1))
    for _ in range(20):
        run.ready()
        kill(run)
    assert run.outcome is None
    assert run.prepared_attempts == list(range(1, 22))


def test_error_after_max_failures_names_rank_cause_count_and_checkpoint() -> None:
    run = running(failure_config=FailureConfig(max_failures=1))
    run.save()
    run.commit()
    kill(run, rank=1)
    run.ready()
    kill(run, rank=1)
    assert run.outcome is not None
    for part_of_text in ("rank 1", "node1", "killed", "failure 2", "max_failures=1", uri_of(1)):
        assert part_of_text in run.outcome.message
    assert run.outcome.failures == 2


def test_error_after_max_failures_mentions_missing_checkpoint() -> None:
    run = running(failure_config=FailureConfig(max_failures=0))
    kill(run)
    assert run.outcome is not None
    assert "no checkpoint" in run.outcome.message


def test_simultaneous_deaths_count_as_one_failure() -> None:
    run = SimulatedRun(3, failure_config=FailureConfig(max_failures=1))
    run.ready()
    run.end_stream(0, "killed")
    run.advance(GATHER_S / 2)
    run.end_stream(2, "killed")
    run.advance(GATHER_S)
    run.leave(1, e.Ended())
    (failure,) = run.events("failure")
    assert failure["ranks"] == [0, 2]
    assert failure["nodes"] == ["node0", "node2"]
    run.ready()
    assert len(run.entries) == 2


def test_error_names_all_ranks_that_died_together() -> None:
    run = running(failure_config=FailureConfig(max_failures=0))
    run.end_stream(0, "killed")
    run.end_stream(1, "killed")
    run.advance(GATHER_S)
    assert run.outcome is not None
    assert run.outcome.message.startswith("the worker processes of ranks [0, 1] on node0, node1 died: killed")


def test_death_while_survivors_leave_belongs_to_same_failure() -> None:
    run = SimulatedRun(3, failure_config=FailureConfig(max_failures=1))
    run.ready()
    run.end_stream(0, "killed")
    run.advance(GATHER_S)
    run.end_stream(1, "killed too")
    run.leave(2, e.Ended())
    run.ready()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"
    assert len(run.events("failure")) == 1


def test_failures_are_counted_per_run() -> None:
    failure = FailureConfig(max_failures=1)
    for _ in range(3):
        run = running(failure_config=failure)
        kill(run)
        run.ready()
        finish(run)
        assert run.outcome is not None and run.outcome.kind == "done"


def test_returned_rank_runs_again_after_death_of_another() -> None:
    run = running()
    run.leave(0)
    run.end_stream(1, "killed")
    run.advance(GATHER_S)
    run.ready()
    assert isinstance(run.machine.state, Running)
    assert run.machine.state.active == {0, 1}


def test_process_death_after_return_is_a_failure() -> None:
    run = running()
    run.leave(0)
    run.deliver(1, RETURNED)
    run.end_stream(1, "killed")
    run.advance(GATHER_S)
    assert run.prepared_attempts[-1] == 2


# -- exceptions --------------------------------------------------------------------------------------------------------


def test_user_exception_is_not_retried() -> None:
    run = running()
    error = failed("bad batch", at=1000.0)
    run.deliver(1, error)
    run.advance(GATHER_S)
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.failed, run.outcome.rank, run.outcome.node) == ("error", error, 1, "node1")
    assert run.outcome.followed == ()
    run.end_stream(1)
    run.leave(0, e.Ended())
    assert len(run.entries) == 1 and run.is_closed


def test_exception_that_arrived_first_is_raised_despite_clock_skew() -> None:
    run = running(3)
    run.deliver(1, broken("peer gone", at=1000.00))
    run.deliver(2, failed("first", at=1000.02))
    run.deliver(0, failed("second", at=1000.01))
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.failed is not None
    assert (run.outcome.failed.summary, run.outcome.rank) == ("first", 2)
    assert run.outcome.followed == ((1, "peer gone"), (0, "second"))


def test_broken_collective_is_listed_below_the_exception_that_caused_it() -> None:
    run = running()
    run.deliver(1, broken(at=999.0))  # its clock is behind
    run.advance(1.0)
    assert run.outcome is None
    run.deliver(0, failed("the cause", at=1000.0))
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.failed is not None
    assert run.outcome.failed.summary == "the cause"
    assert run.outcome.followed == ((1, "connection closed by peer"),)


def test_broken_collective_is_attributed_to_a_death() -> None:
    run = running(3)
    run.deliver(0, broken(at=1000.0))
    run.end_stream(0)
    run.advance(EXPLAIN_S / 2)
    run.end_stream(1, "killed")
    run.leave(2, broken(at=1000.0))
    run.advance(GATHER_S)
    assert run.outcome is None
    (failure,) = run.events("failure")
    assert failure["ranks"] == [1]
    assert run.prepared_attempts[-1] == 2


def test_unexplained_broken_collective_is_raised_after_delay() -> None:
    run = running(2, failure_config=FailureConfig(abort_grace_s=60))
    run.deliver(0, broken("timed out", at=1000.0))
    run.end_stream(0)
    run.advance(GATHER_S + EXPLAIN_S * 0.9)
    assert run.outcome is None
    run.advance(EXPLAIN_S * 0.2)
    assert run.outcome is not None and run.outcome.failed is not None
    assert (run.outcome.failed.summary, run.outcome.rank) == ("timed out", 0)


def test_broken_collectives_of_all_ranks_are_raised_without_delay() -> None:
    run = running()
    run.leave(0, broken("timed out", at=1000.0))
    run.leave(1, broken("timed out", at=1000.1))
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.rank, run.outcome.followed) == (0, ((1, "timed out"),))


def test_exception_after_a_death_is_attributed_to_the_death() -> None:
    run = running()
    run.end_stream(1, "killed")
    run.deliver(0, failed("queue of the dead peer is closed", at=run.now - 100))  # its clock is far behind
    run.advance(GATHER_S)
    run.end_stream(0)
    assert run.outcome is None
    assert run.prepared_attempts[-1] == 2


def test_error_after_max_failures_names_last_exception_of_train_func() -> None:
    run = running(3, failure_config=FailureConfig(max_failures=2))
    run.deliver(0, failed("ValueError: bad batch"), failed("of another thread"))
    run.deliver(1, failed("KeyError: 'x'"))
    run.end_stream(2, "killed")
    for exception in (failed("OSError: no space left"), broken()):
        run.advance(GATHER_S)
        for rank in range(3):
            run.end_stream(rank)
        run.ready()
        run.deliver(1, exception)
        run.end_stream(2, "killed")
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.error_type == "WorkerDiedError"
    assert "died: killed (failure 3 of the run" in run.outcome.message
    assert (
        "The last exception of train_func that came with a failure was OSError: no space left (rank 1)"
        in run.outcome.message
    )
    assert [failure.get("raised") for failure in run.events("failure")] == [
        "KeyError: 'x' (rank 1)",
        "OSError: no space left (rank 1)",
        None,
    ]


@pytest.mark.parametrize(("before_s", "is_cause"), [(0.29, False), (0.31, True)])
def test_exception_is_raised_that_arrived_more_than_0_3_s_before_a_death(before_s: float, is_cause: bool) -> None:
    run = running()
    run.deliver(0, broken())
    run.deliver(1, failed("the cause", at=2000.0))  # its clock is far ahead
    run.now += before_s  # the controller was busy: its timers come late
    run.end_stream(0, "aborted by its framework")
    run.advance(GATHER_S)
    run.end_stream(1)
    failed_by = None if run.outcome is None or run.outcome.failed is None else run.outcome.failed.summary
    assert failed_by == ("the cause" if is_cause else None)
    assert len(run.events("failure")) == (0 if is_cause else 1)


def test_process_group_setup_error_is_a_retried_failure() -> None:
    run = running(failure_config=FailureConfig(max_failures=1))
    for _ in range(2):
        assert run.outcome is None
        run.leave(0, failed("store timed out", at=run.now, in_setup=True))
        run.leave(1, failed("store timed out", at=run.now, in_setup=True))
        run.ready()
    assert run.outcome is not None and run.outcome.error_type == "WorkerDiedError"
    assert "store timed out" in run.outcome.message


# -- the checkpoint that an attempt resumes from -----------------------------------------------------------------------

GIVEN = Start("/elsewhere/checkpoint_7", iteration=70, time_total_s=7.5)


def test_run_restarts_from_given_checkpoint_before_first_save() -> None:
    run = running(start=GIVEN)
    run.deliver(0, reports(0, 5))
    kill(run)
    run.ready()
    assert [entry.start.uri for entry in run.entries] == [GIVEN.uri, GIVEN.uri]
    assert run.entries[1] == c.StartAttempt(2, GIVEN, 1)


def test_run_resumes_from_newest_checkpoint_after_failure() -> None:
    run = running(start=GIVEN)
    run.save(0, reports=2)
    run.save(1, reports=3)
    run.commit()
    kill(run)
    run.ready()
    assert run.entries[1] == c.StartAttempt(2, Start(uri_of(2), 73, 3.0, 2), 3)
    run.save(0, reports=4)
    run.commit()
    kill(run)
    run.ready()
    assert run.entries[2] == c.StartAttempt(3, Start(uri_of(3), 77, 4.0, 3), 4)


def test_run_does_not_resume_from_incomplete_checkpoint() -> None:
    run = running()
    run.save(0, reports=1)
    run.commit()
    run.deliver(0, saved(1, 2), part(1))  # rank 1 dies before its call
    kill(run, rank=1)
    run.ready()
    assert run.entries[1] == c.StartAttempt(2, Start(uri_of(1), 1, 1.0, 1), 2)


def test_run_resumes_from_checkpoint_completed_while_attempt_ends() -> None:
    run = running(3)
    run.deliver(0, saved())
    run.deliver(1, saved(), part())
    run.deliver(2, saved(), part())
    run.end_stream(2, "killed")
    run.advance(GATHER_S)
    run.deliver(0, part())
    run.leave(0, e.Ended())
    run.leave(1, e.Ended())
    run.commit()
    run.ready()
    assert run.entries[1].start.uri == uri_of(1)


# -- events of previous attempts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [reports(0), saved(), part(), RETURNED, failed(), e.Ended(), e.Warned("late")])
def test_events_of_previous_attempt_are_ignored(event: e.WorkerEvent) -> None:
    run = running()
    kill(run)
    for _ in range(2):  # while the next group is prepared, and while it runs
        assert run.deliver(1, event, attempt=1) == []
        assert run.end_stream(1, "late", attempt=1) == []
        assert run.feed(c.TimerFired("grace", 1)) == []
        run.ready()
    assert isinstance(run.machine.state, Running) and run.machine.state.active == {0, 1}


def test_part_of_previous_attempt_does_not_complete_a_checkpoint() -> None:
    run = running()
    kill(run)
    run.ready()
    run.deliver(0, saved(), part())
    run.deliver(1, saved(), part(), attempt=1)
    assert run.all_of(c.CommitCheckpoint) == []


# -- hung workers ------------------------------------------------------------------------------------------------------


def hung(rank: int, kind: str = "silent", attempt: int = 1) -> c.WorkerHung:
    return c.WorkerHung(rank, attempt, kind, "gave no sign of life for 10 s", {0: "line 1", 1: "line 2"})


@pytest.mark.parametrize("kind", ["silent", "stuck", "lost"])
def test_hung_worker_is_killed_and_replaced(kind: str) -> None:
    run = running(2)
    run.feed(hung(1, kind))
    (killed,) = run.all_of(c.KillWorkers)
    assert killed.ranks == (1,) and killed.is_lost == (kind == "lost")
    (note,) = run.events("hang")
    assert (note["rank"], note["kind"], note["stacks"]) == (1, kind, {"0": "line 1", "1": "line 2"})
    run.end_stream(1, "it was killed")
    run.leave(0, e.Ended())
    run.advance(GATHER_S)
    (failure,) = run.events("failure")
    assert failure["ranks"] == [1] and "hung: it gave no sign of life" in failure["error"]
    assert run.prepared_attempts == [1, 2]


def test_hang_of_previous_attempt_is_ignored() -> None:
    run = running(2)
    run.feed(hung(1, attempt=0))
    assert run.killed_ranks == [] and run.events("hang") == []


def test_hang_after_return_is_not_a_failure() -> None:
    run = running(2)
    run.leave(1)
    run.feed(hung(1))
    assert run.killed_ranks == [1]
    run.leave(0)
    assert run.outcome is not None and run.outcome.kind == "done"


@pytest.mark.parametrize("is_late", [False, True])
def test_run_resumes_from_previous_checkpoint_when_newest_is_damaged(is_late: bool) -> None:
    run = running()
    for call in (0, 1):
        for rank in range(2):
            run.deliver(rank, reports(call))
        run.save(call, call + 1)
    run.commit()
    kill(run)
    run.ready()
    assert run.entries[-1].start.uri == uri_of(2)
    if is_late:  # rank 1 only sees its broken collective
        run.deliver(1, broken())
    else:
        run.deliver(1, e.StartUnusable("its bytes are wrong"))  # every rank reads the checkpoint
    run.deliver(0, e.StartUnusable("its bytes are wrong"))
    for rank in range(2):
        run.leave(rank, failed("CheckpointCorruptError: its bytes are wrong"))
    run.ready()
    entered = run.entries[-1]
    assert (entered.start.uri, entered.start.iteration, entered.first_number) == (uri_of(1), 1, 3)
    assert [note["message"] for note in run.events("warning")] == ["checkpoint 2 skipped: its bytes are wrong"]
    assert len(run.events("failure")) == 1, "a damaged checkpoint is not a worker failure"
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"
    assert find_violations(history_of(run)) == []


def test_only_checkpoint_is_not_skipped_when_damaged() -> None:
    run = running()
    run.save()
    run.commit()
    kill(run)
    run.ready()
    run.deliver(0, e.StartUnusable("its bytes are wrong"))
    for rank in range(2):
        run.leave(rank, failed("its bytes are wrong"))
    run.advance(1)
    assert run.outcome is not None and run.outcome.kind == "error"
