"""The check that a simulated run ended as what happened in it explains."""

from __future__ import annotations

from collections.abc import Set

from raysgd.session import events as e
from support.simulated_workers import SimulatedAttempt
from support.simulation import SimulatedRun


def check_outcome(run: SimulatedRun, last: SimulatedAttempt | None, *, happened: Set[str], max_failures: int) -> None:
    """Check the outcome of a run.

    Args:
        run: The run, which is over.
        last: Its last attempt.
        happened: What has happened that may end a run.
        max_failures: The limit of the run.
    """
    outcome = run.outcome
    assert outcome is not None
    if outcome.kind == "done":
        assert last is not None and last.returned == {rank.number for rank in last.ranks}
        assert not (last.preempted and last.saw_stop)
    elif outcome.kind in ("stopped", "cancelled"):
        assert outcome.kind in happened or "ended" in happened
    elif outcome.failed is not None:
        assert last is not None and outcome.rank is not None
        assert last.raised[outcome.rank] == outcome.failed
        _check_cause(run, last, outcome.failed)
        num_failures = max_failures + 1 if outcome.failed.can_retry else 0
        assert outcome.failures == num_failures
    elif outcome.error_type == "WorkerDiedError":
        assert len(run.events("failure")) == max_failures + 1 == outcome.failures
    else:
        needed = {"StorageError": "write failed", "CheckpointError": "one-sided", "InfeasibleError": "infeasible"}
        assert needed[outcome.error_type or ""] in happened
    if not happened:
        assert outcome.kind == "done"


def _check_cause(run: SimulatedRun, last: SimulatedAttempt, cause: e.Failed) -> None:
    own = [error for error in last.raised.values() if not error.in_collective and not error.in_setup]
    assert cause.in_collective is False or not own
    assert not own or cause is own[0] or run.was_clock_corrected  # in order of arrival, where times can be compared
