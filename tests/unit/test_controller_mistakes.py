"""How a run ends, or warns, if ranks make different collectives or train models of their own."""

from __future__ import annotations

from raysgd.controller import commands as c
from raysgd.session import events as e
from support.simulation import RETURNED, broken, failed, running

#: Promised numbers, written out.
GATHER_S = 0.05


def test_ranks_that_wait_without_hope_end_the_run_and_are_not_retried() -> None:
    run = running(3)
    run.deliver(0, RETURNED)
    run.end_stream(0)
    run.feed(c.CollectivesMismatched(1, (1, 2), "ranks 1, 2 wait; rank 0 has returned", {1: "a stack"}))
    (ended,) = run.all_of(c.EndAttempt)
    assert ended.ranks == (1, 2)
    assert run.events("mismatch") == [
        {"ranks": [1, 2], "why": "ranks 1, 2 wait; rank 0 has returned", "stacks": {"1": "a stack"}}
    ]
    run.leave(1, broken())
    run.leave(2, broken())
    assert run.is_closed and run.outcome is not None
    assert (run.outcome.error_type, run.outcome.ranks) == ("CollectiveMismatchError", (1, 2))
    assert "same number of steps on every rank" in run.outcome.message
    assert run.prepared_attempts == [1] and run.events("failure") == []


def test_ranks_that_wait_for_one_which_has_left_for_a_stop_are_stopped() -> None:
    run = running()
    run.feed(c.StopRequested("enough", cancel=False))
    run.leave(0)
    run.feed(c.CollectivesMismatched(1, (1,), "rank 1 waits"))
    run.leave(1, broken())
    assert run.outcome is not None and (run.outcome.kind, run.outcome.message) == ("stopped", "enough")


def test_mismatch_of_an_attempt_that_ends_is_ignored() -> None:
    run = running()
    run.deliver(0, failed())
    run.feed(c.CollectivesMismatched(1, (1,), "rank 1 waits"))
    assert run.events("mismatch") == []
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.failed is not None


def test_models_of_their_own_on_all_ranks_are_one_warning_of_the_run() -> None:
    run = running()
    run.deliver(1, e.Unsynchronized("each rank trains a model of its own"))
    assert run.events("warning") == []
    run.deliver(0, e.Unsynchronized("each rank trains a model of its own"))
    assert run.events("warning") == [{"message": "each rank trains a model of its own"}]
    run.end_stream(0, "killed")
    run.advance(GATHER_S)
    run.leave(1, e.Ended())
    run.ready()
    for rank in range(2):
        run.deliver(rank, e.Unsynchronized("each rank trains a model of its own"))
    assert len(run.events("warning")) == 1
