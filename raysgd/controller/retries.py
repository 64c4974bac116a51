"""The failures of a run, and what follows from each. Pure: part of the run's machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raysgd.config import FailureConfig
from raysgd.controller.commands import Command, Note
from raysgd.controller.failure_policy import Failure, FailurePolicy, GiveUp
from raysgd.controller.states import Outcome

#: Seconds before workers are asked for again after a start that failed; twice as long after each further one in a row.
PAUSE_S = 0.2
MAX_PAUSE_S = 5.0


class Retries:
    """Counts failures, and starts that failed in a row.

    Args:
        out: Where commands go.
    """

    def __init__(self, config: FailureConfig, out: Callable[[Command], None]) -> None:
        self._policy = FailurePolicy(config)
        self._history: list[Failure] = []
        self._num_false_starts = 0  # in a row
        self._out = out

    @property
    def count(self) -> int:
        """Failures of the run so far."""
        return len(self._history)

    def remember(self, failures: Sequence[Failure]) -> None:
        """What the run had before it went on here."""
        self._history.extend(failures)

    def note(self, failure: Failure, *, is_stopping: bool) -> GiveUp | None:
        """A failure has happened; why no attempt may follow, or None if one may."""
        self._history.append(failure)
        decision = self._policy.decide(self._history)
        if isinstance(decision, GiveUp):
            action = "give up"
        else:
            action = "stop" if is_stopping else f"retry {decision.number}"
        data: dict[str, Any] = {
            "ranks": list(failure.ranks),
            "nodes": list(failure.nodes),
            "error": failure.what,
            "action": action,
        }
        self._out(Note("failure", data | ({"raised": failure.raised} if failure.raised else {})))
        return decision if isinstance(decision, GiveUp) else None

    def given_up(self, decision: GiveUp, last_checkpoint: str) -> Outcome:
        """The outcome of a run that may not go on."""
        return Outcome(
            "error",
            error_type="WorkerDiedError",
            message=f"{decision.why}. {last_checkpoint}",
            ranks=self._history[-1].ranks,
            failures=len(self._history),
        )

    def pause_s(self, *, was_entered: bool) -> float:
        """How long to wait before the next group; not at all if the last one had entered train_func."""
        self._num_false_starts = 0 if was_entered else self._num_false_starts + 1
        return 0.0 if was_entered else min(MAX_PAUSE_S, PAUSE_S * 2.0 ** (self._num_false_starts - 1))
