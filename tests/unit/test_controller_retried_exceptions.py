"""The state machine of a run with `FailureConfig(retry_on=...)`: chosen exceptions of train_func are failures."""

from __future__ import annotations

from raysgd.config import FailureConfig
from raysgd.session import events as e
from support.simulation import broken, failed, running, uri_of


def flaky(at: float = 1000.0, **flags: bool) -> e.Failed:
    return failed("ConnectionError: reset by peer", at, can_retry=True, **flags)


def test_exception_to_retry_counts_as_a_failure() -> None:
    run = running(failure_config=FailureConfig(max_failures=1))
    run.save()
    run.commit()
    run.leave(1, flaky())
    run.leave(0, broken())
    assert run.outcome is None and run.prepared_attempts == [1, 2]
    assert run.killed_ranks == []
    run.ready()
    assert run.entries[-1].start.uri == uri_of(1)
    (failure,) = run.events("failure")
    assert failure == {
        "ranks": [1],
        "nodes": ["node1"],
        "error": "train_func raised ConnectionError: reset by peer on rank 1, node1",
        "action": "retry 1",
        "cause": "exception",
    }


def test_exception_to_retry_is_raised_after_max_failures() -> None:
    run = running(failure_config=FailureConfig(max_failures=1))
    for _ in range(2):
        run.leave(1, flaky())
        run.leave(0, broken())
        run.ready()
    assert run.outcome is not None and run.outcome.failed == flaky()
    assert (run.outcome.rank, run.outcome.failures) == (1, 2)
    assert "failure 2 of the run; FailureConfig(max_failures=1) allows no more" in run.outcome.message
    assert "The run has no checkpoint." in run.outcome.message
    assert run.outcome.followed == ((0, "connection closed by peer"),)


def test_other_exception_that_arrived_first_is_not_retried() -> None:
    run = running()
    run.deliver(0, failed("boom"))
    run.leave(1, flaky())
    run.leave(0, e.Ended())
    assert run.outcome is not None and run.outcome.failed is not None and run.outcome.failed.summary == "boom"


def test_broken_collective_without_another_cause_may_be_retried() -> None:
    run = running()
    run.leave(0, flaky(in_collective=True))
    run.leave(1, broken())
    assert run.prepared_attempts == [1, 2]
