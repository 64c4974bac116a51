"""The state machine of a run: how runs stop, what is cleaned up, and what is still written."""

from __future__ import annotations

import dataclasses

import pytest

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.rounds import RoundMerger
from raysgd.controller.states import Closing, Ending, Preparing, has_succeeded
from raysgd.session import events as e
from support.simulation import (
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
    scoring,
    uri_of,
)

#: Promised numbers, written out.
EXPLAIN_S = 5.0
GATHER_S = 0.05

# -- stopping ----------------------------------------------------------------------------------------------------------


def test_stop_request_lets_train_func_return() -> None:
    run = running()
    run.stop()
    assert run.is_asked_to_stop
    assert run.all_of(c.EndAttempt) == []
    run.leave(0)
    run.leave(1)
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.message) == ("stopped", "enough")
    assert has_succeeded(run.machine.state)


def test_rank_that_ends_at_a_stop_ends_all_ranks() -> None:
    run = running(3)
    run.stop()
    run.deliver(1, e.Ended())
    (end,) = run.all_of(c.EndAttempt)
    assert end.ranks == (0, 1, 2)
    for rank in range(3):
        run.leave(rank, e.Ended())
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.message) == ("stopped", "enough")
    assert len(run.all_of(c.EndAttempt)) == 1
    assert run.is_closed


def test_broken_collective_after_stop_of_a_peer_is_not_an_error() -> None:
    run = running()
    run.stop()
    run.leave(0, e.Ended())
    run.leave(1, broken())
    assert run.outcome is not None and run.outcome.kind == "stopped"


def test_rank_that_does_not_stop_within_grace_period_is_killed() -> None:
    run = running(failure_config=FailureConfig(abort_grace_s=5))
    run.stop()
    run.leave(0, e.Ended())
    run.advance(4.9)
    assert run.killed_ranks == []
    run.advance(0.2)
    assert run.killed_ranks == [1]
    run.end_stream(1, "killed")
    assert run.outcome is not None and run.outcome.kind == "stopped"
    assert run.events("failure") == []


def test_all_rounds_of_a_stopped_run_are_emitted() -> None:
    run = running()
    run.stop()
    run.leave(0, e.Ended())
    run.leave(1, e.Ended())
    (end,) = run.emitted(frames.ATTEMPT_END)
    assert end.data == {"keep_rounds": None}


def test_worker_can_request_stop() -> None:
    run = running()
    run.deliver(0, e.StopRequested("good enough"))
    assert run.is_asked_to_stop
    assert run.events("stop") == [{"why": "good enough"}]


def test_stopping_run_is_not_restarted_after_death() -> None:
    run = running()
    run.stop()
    kill(run)
    assert run.is_closed and run.outcome is not None
    assert run.outcome.kind == "stopped"
    assert len(run.prepared_attempts) == 1


def test_exception_during_stop_is_raised() -> None:
    run = running()
    run.stop()
    run.leave(0, failed("in its last save", at=1000.0))
    run.leave(1, e.Ended())
    assert run.outcome is not None and run.outcome.failed is not None
    assert run.outcome.failed.summary == "in its last save"


def test_exception_before_stop_is_raised() -> None:
    run = running()
    run.deliver(0, failed("first", at=1000.0))
    run.stop()
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.failed is not None
    assert run.outcome.failed.summary == "first"


@pytest.mark.parametrize("cancel", [False, True])
def test_stop_before_workers_are_ready_closes_immediately(cancel: bool) -> None:
    run = SimulatedRun()
    run.stop(cancel=cancel)
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.kind, run.outcome.message) == ("cancelled" if cancel else "stopped", "enough")
    assert run.ready() == []


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("is_settled", [False, True])
def test_stop_between_attempts_prevents_next_attempt(cancel: bool, is_settled: bool) -> None:
    run = running()
    run.end_stream(0, "killed")
    if is_settled:
        run.advance(GATHER_S)
    run.stop(cancel=cancel)
    run.advance(GATHER_S)
    run.leave(1, e.Ended())
    assert run.is_closed and run.outcome is not None
    assert run.outcome.kind == ("cancelled" if cancel else "stopped")
    assert len(run.prepared_attempts) == 1


def test_stop_between_attempts_keeps_rounds_up_to_newest_checkpoint() -> None:
    run = running()
    run.save(0, reports=2)
    run.commit()
    run.end_stream(0, "killed")
    run.advance(GATHER_S)
    run.stop()
    run.leave(1, e.Ended())
    assert [frame.data for frame in run.emitted(frames.ATTEMPT_END)] == [{"keep_rounds": 2}]


@pytest.mark.parametrize("state", ["preparing", "running", "ending"])
def test_error_of_critical_callback_ends_the_run(state: str) -> None:
    run = SimulatedRun() if state == "preparing" else running()
    if state == "ending":
        run.end_stream(1, "killed")
    error = failed("the logger's server is gone")
    run.feed(c.StopRequested("a critical callback failed", cancel=True, failed=error))
    run.advance(GATHER_S)
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.failed, run.outcome.rank) == ("error", error, None)
    for rank in range(run.num_ranks):
        run.end_stream(rank)
    assert run.is_closed
    assert len(run.prepared_attempts) == 1


@pytest.mark.parametrize("cancel", [False, True])
def test_stop_after_outcome_is_decided_has_no_effect(cancel: bool) -> None:
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


def test_cancel_ends_all_ranks_immediately() -> None:
    run = running()
    run.stop(cancel=True)
    (end,) = run.all_of(c.EndAttempt)
    assert end.ranks == (0, 1)
    run.leave(0, e.Ended())
    run.leave(1, failed("in its own clean-up", at=run.now))
    assert run.is_closed and run.outcome is not None
    assert run.outcome.kind == "cancelled"


def test_cancel_after_stop_ends_remaining_ranks() -> None:
    run = running()
    run.stop()
    run.stop(cancel=True)
    assert [end.ranks for end in run.all_of(c.EndAttempt)] == [(0, 1)]
    run.leave(0, e.Ended())
    run.leave(1, e.Ended())
    assert run.outcome is not None and run.outcome.kind == "cancelled"


def test_cancel_takes_precedence_over_unpublished_exception() -> None:
    run = running()
    run.deliver(0, failed(at=1000.0))
    run.stop(cancel=True)
    run.advance(GATHER_S)
    run.end_stream(0)
    run.leave(1, e.Ended())
    assert run.outcome is not None and run.outcome.kind == "cancelled"


def test_second_cancel_has_no_effect() -> None:
    run = running()
    run.stop(cancel=True)
    assert run.stop(cancel=True) == []


# -- the grace timer ---------------------------------------------------------------------------------------------------


def test_rank_that_does_not_leave_within_grace_period_is_killed_and_replaced() -> None:
    run = running(3, failure_config=FailureConfig(abort_grace_s=2, max_failures=1))
    run.end_stream(0, "killed")
    run.advance(1.9)
    run.leave(1, e.Ended())
    assert run.killed_ranks == []
    run.advance(0.2)
    assert run.killed_ranks == [2]
    run.end_stream(2, "killed")
    run.ready()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"
    assert [failure["ranks"] for failure in run.events("failure")] == [[0]]


def test_no_rank_is_killed_when_all_leave_in_time() -> None:
    run = running()
    kill(run)
    run.advance(100)
    run.ready()
    run.advance(100)
    assert run.killed_ranks == []


def test_exception_is_kept_when_hung_rank_is_killed() -> None:
    run = running(failure_config=FailureConfig(abort_grace_s=2))
    run.leave(0, failed("boom", at=1000.0))
    run.advance(2.1)
    assert run.killed_ranks == [1]
    run.end_stream(1, "killed")
    assert run.is_closed and run.outcome is not None
    assert run.outcome.failed is not None


def test_death_of_killed_rank_does_not_explain_broken_collective() -> None:
    run = running(failure_config=FailureConfig(abort_grace_s=1))
    run.leave(0, broken("timed out", at=1000.0))
    run.advance(EXPLAIN_S)
    assert run.killed_ranks == [] and run.outcome is None
    run.advance(GATHER_S * 2)
    assert run.killed_ranks == [1]
    assert run.outcome is not None and run.outcome.failed is not None
    assert run.outcome.failed.summary == "timed out"
    run.end_stream(1, "killed")
    assert run.is_closed


def test_death_reported_after_grace_period_explains_broken_collective() -> None:
    """Ray reports the death of a process on a lost node late when the machine is busy."""
    run = running(3, failure_config=FailureConfig(abort_grace_s=1, max_failures=1))
    for rank in (0, 1):
        run.leave(rank, broken("connection reset by peer", at=1000.0))
    run.advance(EXPLAIN_S * 0.9)
    run.end_stream(2, "its node was lost")
    run.advance(GATHER_S)
    assert run.outcome is None
    assert [failure["ranks"] for failure in run.events("failure")] == [[2]]
    assert run.prepared_attempts[-1] == 2


def test_hung_rank_is_killed_when_death_of_another_is_reported_late() -> None:
    run = running(3, failure_config=FailureConfig(abort_grace_s=1, max_failures=1))
    run.leave(0, broken("connection reset by peer", at=1000.0))
    run.advance(EXPLAIN_S * 0.9)
    assert run.killed_ranks == []
    run.end_stream(2, "its node was lost")
    run.advance(GATHER_S)
    assert run.killed_ranks == [1]
    run.end_stream(1, "killed")
    assert [failure["ranks"] for failure in run.events("failure")] == [[2]]
    assert run.prepared_attempts[-1] == 2


# -- checkpoints in writing --------------------------------------------------------------------------------------------


def test_next_attempt_waits_for_commit_in_flight() -> None:
    run = running()
    run.save()
    kill(run)
    assert isinstance(run.machine.state, Ending)
    run.commit()
    assert run.machine.state == Preparing(2, serial=2)
    run.ready()
    assert run.entries[1].start.uri == uri_of(1)


@pytest.mark.parametrize("ending", ["error", "cancel"])
def test_run_waits_for_commit_in_flight_before_closing(ending: str) -> None:
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
    assert run.machine.checkpoints.newest_number == 1


def test_failed_commit_ends_the_run() -> None:
    run = running()
    run.save()
    run.fail_commit("disk full")
    assert run.all_of(c.EndAttempt)
    run.leave(0, e.Ended())
    run.leave(1, e.Ended())
    assert run.is_closed and run.outcome is not None
    assert run.outcome.error_type == "StorageError"
    assert "checkpoint 1 could not be written: disk full" in run.outcome.message


def test_failed_write_of_a_part_ends_the_run() -> None:
    run = running()
    run.deliver(0, saved(), e.PartFailed(0, "bucket is gone"))
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.error_type == "StorageError"
    assert "bucket is gone" in run.outcome.message


def test_failed_commit_after_all_ranks_returned_is_an_error() -> None:
    run = running()
    run.save()
    run.leave(0)
    run.leave(1)
    run.fail_commit()
    assert run.is_closed and run.outcome is not None
    assert run.outcome.error_type == "StorageError"


def test_on_write_error_warn_continues_training_without_the_checkpoint() -> None:
    run = running(checkpoint_config=CheckpointConfig(on_write_error="warn"))
    run.save(0)
    run.fail_commit()
    run.deliver(0, saved(1, 2), e.PartFailed(1, "disk full"))
    run.deliver(1, saved(1, 2), part(1))
    assert len(run.events("warning")) == 2
    run.save(2, reports=3)
    run.commit()
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"
    assert run.machine.checkpoints.newest_number == 3


def test_failed_write_does_not_replace_user_exception() -> None:
    run = running()
    run.save()
    run.leave(0, failed("boom", at=1000.0))
    run.leave(1, e.Ended())
    run.fail_commit()
    assert run.is_closed and run.outcome is not None
    assert run.outcome.failed is not None


def test_readers_are_notified_of_deleted_checkpoints() -> None:
    run = running(checkpoint_config=CheckpointConfig(num_to_keep=1))
    run.save(0)
    run.commit()
    run.save(1, reports=2)
    run.commit()
    assert [command.number for command in run.all_of(c.DeleteCheckpoint)] == [1]
    assert [frame.data["number"] for frame in run.emitted(frames.CHECKPOINT)] == [1, 2]
    assert [frame.data["number"] for frame in run.emitted(frames.CHECKPOINT_DELETED)] == [1]
    kill(run)
    run.ready()
    assert run.entries[1].start.uri == uri_of(2)


def test_checkpoint_saved_before_its_report_belongs_to_next_round() -> None:
    run = running(1, checkpoint_config=CheckpointConfig(score_attribute="loss"))
    run.deliver(0, saved(0, 0), part())
    run.commit()
    run.deliver(0, scoring({"loss": 0.5}))
    assert [(each.manifest.metrics, each.manifest.iteration) for each in run.all_of(c.CommitCheckpoint)] == [({}, 0)]
    (written,) = run.all_of(c.WriteRound)
    assert (written.manifest.metrics, written.manifest.iteration) == ({"loss": 0.5}, 1)
    assert [frame.data["metrics"] for frame in run.emitted(frames.CHECKPOINT_SCORED)] == [{"loss": 0.5}]
    kill(run)
    run.ready()
    assert run.entries[1].start.iteration == 1


def test_score_that_arrives_during_commit_is_kept() -> None:
    run = running(1)
    run.deliver(0, saved(0, 0), part(), scoring({"loss": 0.5}))
    run.commit()
    (frame,) = run.emitted(frames.CHECKPOINT)
    assert frame.data["metrics"] == {"loss": 0.5}
    assert len(run.all_of(c.CommitCheckpoint)) == len(run.all_of(c.WriteRound)) == 1


def test_checkpoint_takes_as_long_as_its_slowest_part_and_its_commit() -> None:
    run = running(3)
    for rank, seconds in ((0, 0.5), (1, 0.0), (2, 0.25)):
        run.deliver(rank, saved())
        run.advance(60.0)  # which the others wait for this rank's call
        run.deliver(rank, dataclasses.replace(part(), seconds=seconds))
    for commit in run.unanswered():
        run.feed(c.CheckpointCommitted(commit.manifest, 0.125))
    run.save(1, 2)
    kill(run)
    run.commit()
    recorded = [event.data["seconds"] for event in run.all_of(c.RecordEvent) if event.kind == "checkpoint"]
    assert recorded == [0.625, 0.0]


# -- save calls that do not match --------------------------------------------------------------------------------------


def error_of_mismatched_saves(run: SimulatedRun) -> str:
    """Check that the run ended because save calls did not match, and return the error message."""
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.error_type == "CheckpointError"
    for rank in range(run.num_ranks):
        run.end_stream(rank)
    assert run.is_closed
    return run.outcome.message


def test_saves_with_different_arguments_raise() -> None:
    run = running()
    run.deliver(0, saved(all_ranks=True))
    run.deliver(1, saved(all_ranks=False))
    assert "different all_ranks" in error_of_mismatched_saves(run)


def test_saves_at_different_data_positions_raise() -> None:
    run = running()
    run.deliver(0, saved(), part(consumed=20))
    run.deliver(1, saved(), part(consumed=30))
    assert "Take equally many batches" in error_of_mismatched_saves(run)
    assert run.all_of(c.CommitCheckpoint) == []


def test_save_on_rank_0_only_is_detected_during_training() -> None:
    run = running()
    run.deliver(1, reports(0, 2))
    run.deliver(0, reports(0), saved(0, 1), part(), reports(1))
    assert run.outcome is None
    run.deliver(1, reports(2))
    run.deliver(0, saved(1, 2))
    assert "rank 0: 2, rank 1: 0" in error_of_mismatched_saves(run)


def test_missing_save_of_a_rank_is_detected_at_the_end() -> None:
    run = running()
    run.deliver(0, saved(), part(), RETURNED)
    run.end_stream(0)
    run.deliver(1, RETURNED)
    assert "Every rank calls it, equally often" in error_of_mismatched_saves(run)


# -- rounds that readers get -------------------------------------------------------------------------------------------


def iterations(run: SimulatedRun) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the iteration, attempt and ranks of each result that a reader of the run gets."""
    merger = RoundMerger()
    return [
        (result["training_iteration"], result["attempt"], result.ranks)
        for frame in run.frames
        for result in merger.feed(frame)
    ]


def test_rounds_after_newest_checkpoint_are_repeated() -> None:
    run = running()
    run.deliver(0, reports(0, 4), saved(0, 2), part())
    run.deliver(1, reports(0, 1), saved(0, 2), part())
    run.commit()
    kill(run, rank=1)  # rank 1's second report was not flushed
    run.ready()
    run.deliver(0, reports(0, 2))
    run.deliver(1, reports(0, 2))
    finish(run)
    assert iterations(run) == [(1, 1, (0, 1)), (2, 1, (0,)), (3, 2, (0, 1)), (4, 2, (0, 1))]


def test_incomplete_rounds_are_dropped_without_a_checkpoint() -> None:
    run = running()
    run.deliver(0, reports(0, 4))
    run.deliver(1, reports(0, 1))
    kill(run)
    assert iterations(run) == [(1, 1, (0, 1))]


def test_reports_after_published_outcome_make_no_rounds() -> None:
    run = running()
    run.deliver(0, reports(0))
    run.deliver(1, reports(0))
    run.leave(0, failed(at=1000.0))
    run.advance(GATHER_S)
    assert run.outcome is not None
    run.deliver(1, reports(1, 5))
    run.leave(1, e.Ended())
    assert iterations(run) == [(1, 1, (0, 1))]
