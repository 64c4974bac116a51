"""What to do about a failure. Pure: the history in, a decision out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raysgd.config import FailureConfig


@dataclass(frozen=True)
class Failure:
    """One failure of the system: processes that died together, or a group that could not form.

    Attributes:
        ranks: The ranks it began with.
        what: One sentence for the user.
        nodes: The nodes of these ranks.
        is_announced: The processes were told to end.
        raised: The last exception of train_func that came with the deaths, in one line.
    """

    ranks: tuple[int, ...]
    what: str
    nodes: tuple[str, ...] = ()
    raised: str = ""
    is_announced: bool = False


@dataclass(frozen=True)
class Retry:
    """Enter train_func again."""

    number: int


@dataclass(frozen=True)
class GiveUp:
    """End the run with an error."""

    why: str


class FailurePolicy:
    """Counts the failures of one run; ``max_failures`` of them are followed by exactly that many re-entries."""

    def __init__(self, config: FailureConfig) -> None:
        self._max_failures = config.max_failures

    def decide(self, history: Sequence[Failure]) -> Retry | GiveUp:
        """What to do after the last failure of ``history``, which holds all failures of the run in order."""
        number = len(history)
        if self._max_failures < 0 or number <= self._max_failures:
            return Retry(number)
        return GiveUp(self._explain(history))

    def _explain(self, history: Sequence[Failure]) -> str:
        last = history[-1]
        if self._max_failures == 0:
            limit = "FailureConfig(max_failures=0) allows none"
        else:
            limit = (
                f"failure {len(history)} of the run; FailureConfig(max_failures={self._max_failures}) allows no more"
            )
        raised = next((failure.raised for failure in reversed(history) if failure.raised), "")
        beside = f". The last exception of train_func beside it was {raised}." if raised else ""
        return f"{last.what} ({limit}){beside}"
