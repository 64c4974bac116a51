"""A run whose driver gets Ctrl-C or SIGTERM: its ranks save and leave, and it is cancelled when the grace is over."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.controller import commands as c
from raysgd.session import events as e
from support.simulation import SimulatedRun, kill, running, saved, uri_of

GRACE_S = 30.0
SAW_STOP = e.Returned(b"value", 5, saw_stop=True)


def stopping(**settings: Any) -> SimulatedRun:
    """Return a run of two ranks that has a checkpoint and was asked to stop."""
    run = running(**settings)
    run.save()
    run.commit()
    run.stop(grace_s=GRACE_S)
    return run


def outcome_of(run: SimulatedRun) -> tuple[str, str]:
    assert run.is_closed and run.outcome is not None
    return run.outcome.kind, run.outcome.message


def test_ranks_that_check_should_stop_save_and_return() -> None:
    run = stopping()
    assert run.is_asked_to_stop and not run.all_of(c.RequestStop)[-1].ends_reports
    run.save(1, 2)
    for rank in (0, 1):
        run.leave(rank, SAW_STOP)
    run.commit()
    assert outcome_of(run) == ("stopped", "enough") and run.machine.status()["checkpoint"] == uri_of(2)


def test_ranks_that_do_not_check_leave_after_their_next_save() -> None:
    run = stopping()
    assert run.has_save_point
    run.save(1, 2)
    run.commit()
    for rank in (0, 1):
        run.deliver(rank, e.AtSavePoint(1, 1))
    for rank in (0, 1):
        run.leave(rank, e.Ended())
    assert outcome_of(run) == ("stopped", "enough") and run.prepared_attempts == [1]


def test_checkpoint_that_only_its_size_can_load_is_left_from_too() -> None:
    run = running()
    run.save(all_ranks=True)
    run.commit()
    run.stop(grace_s=GRACE_S)
    run.save(1, 2, all_ranks=True)
    run.commit()
    for rank in (0, 1):
        run.deliver(rank, e.AtSavePoint(1, 1))
        run.leave(rank, e.Ended())
    assert outcome_of(run)[0] == "stopped" and run.events("warning") == []


def test_ranks_that_neither_check_nor_save_are_cancelled_when_the_grace_is_over() -> None:
    run = stopping()
    run.advance(GRACE_S - 1)
    assert run.all_of(c.EndAttempt) == []
    run.advance(1)
    assert [command.ranks for command in run.all_of(c.EndAttempt)] == [(0, 1)]
    for rank in (0, 1):
        run.leave(rank, e.Ended())
    assert outcome_of(run) == ("cancelled", "enough: the ranks did not leave in time")


def test_run_without_a_checkpoint_ends_at_a_report() -> None:
    run = running()
    run.stop(grace_s=GRACE_S)
    assert run.all_of(c.RequestStop)[-1].ends_reports and not run.has_save_point


@pytest.mark.parametrize("grace_s", [None, GRACE_S])
def test_second_request_cancels_at_once(grace_s: float | None) -> None:
    run = running()
    run.stop(grace_s=grace_s)
    run.stop(cancel=True)
    for rank in (0, 1):
        run.leave(rank, e.Ended())
    assert outcome_of(run) == ("cancelled", "enough")


def test_grace_counts_also_after_the_stop_of_a_callback() -> None:
    run = running()
    run.stop()
    run.stop(grace_s=GRACE_S)
    run.advance(GRACE_S)
    assert len(run.all_of(c.EndAttempt)) == 1 and len(run.all_of(c.RequestStop)) == 1


def test_worker_that_dies_while_it_saves_is_not_replaced() -> None:
    run = stopping()
    kill(run)
    assert outcome_of(run) == ("stopped", "enough") and run.prepared_attempts == [1]


def test_unusable_start_begins_no_further_attempt() -> None:
    run = running()
    for call in (0, 1):
        run.save(call, call + 1)
        run.commit()
    kill(run)
    run.ready()
    run.stop(grace_s=GRACE_S)
    run.deliver(0, e.StartUnusable("damaged"))
    for rank in (0, 1):
        run.leave(rank, e.Ended())
    assert outcome_of(run) == ("stopped", "enough") and run.prepared_attempts == [1, 2]


def test_run_that_waits_for_workers_ends_at_once() -> None:
    run = SimulatedRun()
    run.stop(grace_s=GRACE_S)
    assert outcome_of(run) == ("stopped", "enough")


def test_save_after_the_stop_may_fail() -> None:
    run = stopping()
    run.deliver(0, saved(1, 2), e.PartFailed(1, "disk full"))
    for rank in (0, 1):
        run.leave(rank, e.Ended())
    assert run.is_closed and run.outcome is not None and run.outcome.kind == "error"
