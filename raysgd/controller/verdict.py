"""Why did an attempt end? Pure: what the ranks said and which of them died, in; an outcome or a failure, out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from raysgd.controller.failure_policy import Failure
from raysgd.controller.states import Death, Outcome
from raysgd.session.events import Failed

#: An exception that arrived this long before the first death was seen was not caused by it. Deaths are seen late, by about
#: 40 ms, and by as long as it takes to read what the process had sent.
_DEATH_SEEN_LATE_S = 0.3


@dataclass(frozen=True)
class Evidence:
    """What is known when the question is asked.

    Attributes:
        failures: What each rank raised, in the order of arrival. Clocks of two machines tell no better which was first.
        arrived: When each arrived, by the clock that deaths are seen by.
        deaths: The processes that are gone (those the controller killed itself are none).
        nodes: The node of each rank.
        is_complete: Nothing more is to be waited for.
        parked: Ranks whose train_func gets over the loss of its group, and waits for another.
    """

    failures: Mapping[int, Failed]
    arrived: Mapping[int, float]
    deaths: Sequence[Death]
    nodes: Sequence[str]
    is_complete: bool
    parked: Collection[int] = ()


def judge(evidence: Evidence) -> Outcome | Failure | None:
    """The user's exception (an `Outcome`), a failure of the system, or None: wait for what explains a broken collective.

    The exception that arrived first is the cause; a broken collective is the consequence of something else, and so is an
    exception that came after a process had died.
    """
    own = _own(evidence)
    if evidence.deaths:
        first_death = min(death.timestamp for death in evidence.deaths)
        own = {rank: f for rank, f in own.items() if evidence.arrived[rank] < first_death - _DEATH_SEEN_LATE_S}
        if not own:
            return _deaths(evidence)
    if own:
        return _exception(own, evidence)
    if not evidence.is_complete:
        return None
    in_setup = {rank: f for rank, f in evidence.failures.items() if f.in_setup}
    if in_setup:
        return _no_group(in_setup, evidence)
    if evidence.failures and set(evidence.failures) <= set(evidence.parked):
        return _broken_group(evidence)
    if evidence.failures:
        return _exception(evidence.failures, evidence)
    return Failure((), "an attempt ended and no rank said why")


def _own(evidence: Evidence) -> dict[int, Failed]:
    """The exceptions that are not of the group, in the order of arrival."""
    return {rank: f for rank, f in evidence.failures.items() if not f.in_collective and not f.in_setup}


def _deaths(evidence: Evidence) -> Failure:
    ranks = tuple(sorted({death.rank for death in evidence.deaths}))
    nodes = tuple(dict.fromkeys(evidence.nodes[rank] for rank in ranks))
    reason = evidence.deaths[0].reason.rstrip(".")
    if len(ranks) == 1:
        how = "hung: it" if evidence.deaths[0].is_hang else "died:"
        what = f"the worker process of rank {ranks[0]} on {nodes[0]} {how} {reason}"
    else:
        how = "hung: the first" if evidence.deaths[0].is_hang else "died:"
        what = f"the worker processes of ranks {list(ranks)} on {', '.join(nodes)} {how} {reason}"
    raised = [f"{failed.summary} (rank {rank})" for rank, failed in _own(evidence).items()]
    return Failure(ranks, what, nodes, raised[-1] if raised else "")


def _no_group(failures: Mapping[int, Failed], evidence: Evidence) -> Failure:
    ranks = tuple(sorted(failures))
    first = next(iter(failures.values()))
    nodes = tuple(dict.fromkeys(evidence.nodes[rank] for rank in ranks))
    return Failure(ranks, f"the process group could not be formed: {first.summary}", nodes)


def _broken_group(evidence: Evidence) -> Failure:
    ranks = tuple(sorted(evidence.failures))
    nodes = tuple(dict.fromkeys(evidence.nodes[rank] for rank in ranks))
    return Failure(ranks, next(iter(evidence.failures.values())).summary, nodes)


def _exception(causes: Mapping[int, Failed], evidence: Evidence) -> Outcome:
    rank = next(iter(causes))
    followed = tuple((r, f.summary) for r, f in evidence.failures.items() if r != rank)
    return Outcome("error", failed=causes[rank], rank=rank, node=evidence.nodes[rank], followed=followed, ranks=(rank,))
