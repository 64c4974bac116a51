"""What to do after a failure. Pure.

`find_cause` finds why an attempt ended: the user's exception ends the run, unless it is in `FailureConfig.retry_on`; a failure
of the system may be followed by a retry. `FailurePolicy.decide` then decides between another attempt and the end of the run.
`RunMachine` in `raysgd.controller.state_machine.run_machine` asks both, and makes the attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.config import FailureConfig
from raysgd.controller.states import Ending, Outcome
from raysgd.session.events import Failed

#: Seconds for the errors of other ranks to arrive after the first one, so that a broken collective is not taken for the cause.
GATHER_S = 0.05
#: Seconds that a broken collective waits for the death or exception that explains it. Ray reports a process on a lost node
#: later than one that died alone, and later still on a busy machine.
EXPLAIN_S = 5.0
#: An exception that arrived at least this long before the first death was noticed is not a consequence of that death. A
#: death is noticed late: by about 40 ms, and by the time it takes to read what the process had sent.
_DEATH_DELAY_S = 0.3
#: Seconds before workers are requested again after a start that failed. Doubled for each further one in a row.
RESTART_DELAY_S = 0.2
MAX_RESTART_DELAY_S = 5.0


@dataclass(frozen=True)
class Failure:
    """A reason for a retry: processes that died together, a group that could not form, an exception to retry.

    Attributes:
        ranks: The ranks where the failure began.
        what: One sentence for the user.
        nodes: The nodes of these ranks.
        is_announced: The processes were preempted.
        raised: The last exception of train_func that came with the deaths, in one line.
        outcome: How the run ends if no retry follows; None: with a `WorkerDiedError`.
    """

    ranks: tuple[int, ...]
    what: str
    nodes: tuple[str, ...] = ()
    raised: str = ""
    is_announced: bool = False
    outcome: Outcome | None = None

    @property
    def cause(self) -> str:
        """``"exception"`` of train_func, or ``"death"`` of a worker, also while a group was being formed."""
        return "death" if self.outcome is None else "exception"

    def describe(self, action: str) -> dict[str, Any]:
        """Return the record of the failure, with what follows it."""
        data = {
            "ranks": list(self.ranks),
            "nodes": list(self.nodes),
            "error": self.what,
            "action": action,
            "cause": self.cause,
        }
        return data | ({"raised": self.raised} if self.raised else {})


class FailurePolicy:
    """Counts the failures of a run. ``max_failures=k`` allows exactly k retries.

    Args:
        earlier: The failures that happened before the controller's process was restarted.
    """

    def __init__(self, config: FailureConfig, earlier: Iterable[Failure] = ()) -> None:
        self._max_failures = config.max_failures
        self._failures = list(earlier)
        self._num_failed_starts = 0  # in a row

    @property
    def num_failures(self) -> int:
        return len(self._failures)

    def decide(self, failure: Failure) -> str | None:
        """Count a failure; returns why the run must end, or None if another attempt follows."""
        self._failures.append(failure)
        is_allowed = self._max_failures < 0 or self.num_failures <= self._max_failures
        return None if is_allowed else self._explain(failure)

    def restart_delay_s(self, *, was_entered: bool) -> float:
        """Return the seconds to wait before the next group; 0 if the last group had entered train_func."""
        self._num_failed_starts = 0 if was_entered else self._num_failed_starts + 1
        return 0.0 if was_entered else min(MAX_RESTART_DELAY_S, RESTART_DELAY_S * 2.0 ** (self._num_failed_starts - 1))

    def _explain(self, failure: Failure) -> str:
        if self._max_failures == 0:
            limit = "FailureConfig(max_failures=0) allows none"
        else:
            limit = f"failure {self.num_failures} of the run; FailureConfig(max_failures={self._max_failures}) allows no more"
        raised = next((each.raised for each in reversed(self._failures) if each.raised), "")
        exception = f". The last exception of train_func that came with a failure was {raised}" if raised else ""
        return f"{failure.what} ({limit}){exception}"


def find_cause(ending: Ending, *, is_complete: bool) -> Outcome | Failure | None:
    """Return why an attempt ended.

    The exception that arrived first is the cause. A broken collective is the consequence of something else. So is an
    exception that arrived after a process had died.

    Args:
        ending: The errors and deaths so far.
        is_complete: No further error or death is waited for.

    Returns:
        The user's exception as an `Outcome`, what may be retried as a `Failure`, or None: wait for what explains a broken
        collective.
    """
    own = _own_errors(ending)
    if ending.deaths:
        first_death = min(death.timestamp for death in ending.deaths)
        own = {rank: error for rank, error in own.items() if ending.arrived_at[rank] < first_death - _DEATH_DELAY_S}
        if not own:
            return _failure_by_death(ending)
    if own:
        return _cause_by_exception(own, ending)
    if not is_complete:
        return None
    in_setup = {rank: error for rank, error in ending.errors.items() if error.in_setup}
    if in_setup:
        ranks, first = tuple(sorted(in_setup)), next(iter(in_setup.values()))
        return Failure(ranks, f"the process group could not be formed: {first.summary}", _nodes_of(ranks, ending))
    if ending.errors:
        return _cause_by_exception(ending.errors, ending)
    return Failure((), "an attempt ended and no rank reported why")


def _own_errors(ending: Ending) -> dict[int, Failed]:
    """Return the errors that are not about the process group, in the order of arrival."""
    return {rank: error for rank, error in ending.errors.items() if not error.in_collective and not error.in_setup}


def _nodes_of(ranks: Sequence[int], ending: Ending) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ending.running.nodes[rank] for rank in ranks))


def _failure_by_death(ending: Ending) -> Failure:
    ranks = tuple(sorted({death.rank for death in ending.deaths}))
    nodes = _nodes_of(ranks, ending)
    first = ending.deaths[0]
    reason = first.reason.rstrip(".")
    who, which = f"process of rank {ranks[0]}", "it"
    if len(ranks) > 1:
        who, which = f"processes of ranks {list(ranks)}", "the first"
    how = f"hung: {which}" if first.is_hang else "died:"
    what = f"the worker {who} on {', '.join(nodes)} {how} {reason}"
    raised = [f"{error.summary} (rank {rank})" for rank, error in _own_errors(ending).items()]
    return Failure(ranks, what, nodes, raised[-1] if raised else "")


def _cause_by_exception(causes: Mapping[int, Failed], ending: Ending) -> Outcome | Failure:
    rank, failed = next(iter(causes.items()))
    followed = tuple((other, error.summary) for other, error in ending.errors.items() if other != rank)
    node = ending.running.nodes[rank]
    outcome = Outcome("error", failed=failed, rank=rank, node=node, followed=followed, ranks=(rank,))
    if not failed.can_retry:
        return outcome
    return Failure((rank,), f"train_func raised {failed.summary} on rank {rank}, {node}", (node,), outcome=outcome)
