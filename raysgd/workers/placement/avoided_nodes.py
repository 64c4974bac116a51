"""The nodes on which a group starts no processes: lost, draining, faulty, refused. Runs in the TrainerActor; needs no Ray.

A lost node is on probation: a cable that is plugged in again, or a switch that restarts, gives the same node back. The node
counts again once its agent has answered for some time, which doubles with each loss.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from raysgd.workers.orders import WorkerInfo
from raysgd.workers.placement.capacity import Node, count_fitting

#: A node with this many deaths is faulty, if every other node has at least two deaths fewer.
MIN_DEATHS = 2
#: Deaths on a node within this time of each other count as one.
SAME_DEATH_S = 5.0
#: Seconds for which a lost node must answer before it counts again; doubled with each further loss of it.
PROBATION_S = 5.0
MAX_PROBATION_S = 600.0


@dataclass
class _Lost:
    """A node on probation.

    Attributes:
        name: The node's name for messages.
        since: When it was lost.
        must_answer_s: Seconds for which it must answer.
        answers_since: Since when it has answered without a pause; None if it does not answer.
    """

    name: str
    since: float
    must_answer_s: float
    answers_since: float | None = None


class AvoidedNodes:
    """Collects the nodes to avoid, over all runs of a group, and counts the losses of each node and the deaths on it.

    Args:
        bundle: A worker's resources.
        clock: Returns seconds since any fixed moment.

    Attributes:
        ids: The ids of the nodes to avoid; the same set at all times.
    """

    def __init__(
        self,
        bundle: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ids: set[str] = set()
        self._bundle = bundle
        self._clock = clock
        self._lost: dict[str, _Lost] = {}
        self._losses: Counter[str] = Counter()
        self._silent: set[str] = set()
        self._draining: set[str] = set()
        self._faulty: dict[str, str] = {}  # with what they are, for `describe`
        self._deaths: Counter[str] = Counter()
        self._last_death: dict[str, float] = {}
        self._warnings: list[str] = []

    @property
    def lost(self) -> list[str]:
        """The ids of the nodes on probation, whose agents are to be asked."""
        return list(self._lost)

    def lose(self, info: WorkerInfo) -> None:
        """Put a worker's node on probation, because the node does not answer. All its workers may be reported."""
        if info.node_id not in self._lost:
            self._losses[info.node_id] += 1
            must_answer_s = min(MAX_PROBATION_S, PROBATION_S * 2.0 ** (self._losses[info.node_id] - 1))
            self._lost[info.node_id] = _Lost(info.node, self._clock(), must_answer_s)
        self._update()

    def on_asked(self, node_id: str, *, answers: bool) -> None:
        """Record whether a lost node's agent answers; the node counts again after its probation."""
        if (lost := self._lost.get(node_id)) is None:
            return
        now = self._clock()
        if not answers:
            lost.answers_since = None
        elif lost.answers_since is None:
            lost.answers_since = now
        elif now - lost.answers_since >= lost.must_answer_s:
            del self._lost[node_id]
            self._update()

    def set_silent(self, node_ids: Collection[str]) -> None:
        """Avoid nodes that do not answer at present, until the next call."""
        self._silent = set(node_ids)
        self._update()

    def drain(self, node_ids: Collection[str]) -> None:
        """Avoid nodes that Ray is about to take away."""
        self._draining.update(node_ids)
        self._update()

    def remove_gone(self, nodes: Sequence[Node]) -> None:
        """Forget the nodes that are not among Ray's living ``nodes``, because Ray starts nothing there."""
        living = {node.node_id for node in nodes}
        self._lost = {node_id: lost for node_id, lost in self._lost.items() if node_id in living}
        self._faulty = {node_id: name for node_id, name in self._faulty.items() if node_id in living}
        self._draining &= living
        self._update()

    def record_death(self, info: WorkerInfo) -> bool:
        """Count a worker's death on a living node; return whether the node is faulty now, for `avoid_faulty` to decide."""
        node_id, now = info.node_id, self._clock()
        is_new = now - self._last_death.get(node_id, -SAME_DEATH_S) >= SAME_DEATH_S
        self._last_death[node_id] = now
        self._deaths[node_id] += is_new
        return node_id not in self.ids and self._is_faulty(node_id)

    def avoid_faulty(self, info: WorkerInfo, nodes: Sequence[Node]) -> None:
        """Avoid a worker's node, because it is faulty, if another one of ``nodes`` has room for a worker."""
        if self._has_room_elsewhere(info.node_id, nodes):
            self._faulty[info.node_id] = f"{info.node}, on which workers died repeatedly, in this Trainer"
            self._update()
            self._warnings.append(
                f"{info.node} is not used any more: workers have died there {self._deaths[info.node_id]} times, "
                "and less often on every other node"
            )

    def refuse(self, info: WorkerInfo, why: str) -> None:
        """Avoid a worker's node, because its versions do not fit to the driver's, until its Ray is started again."""
        if info.node_id not in self._faulty:
            self._faulty[info.node_id] = f"{info.node}, whose versions differ, until its Ray is started again"
            self._update()
            self._warnings.append(f"{info.node} is not used until its Ray is started again: {why}")

    def take_warnings(self) -> list[str]:
        """Return a line for each node that was found faulty, or was refused, since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def describe(self) -> str | None:
        """Say which nodes are not used, why, and until when; None if there are none."""
        now = self._clock()
        lines = [self._describe_lost(lost, now) for lost in self._lost.values()]
        lines += [f"the draining node {node_id[:12]} until it is gone" for node_id in sorted(self._draining)]
        lines += self._faulty.values()
        return f"not used: {'; '.join(lines)}" if lines else None

    @staticmethod
    def _describe_lost(lost: _Lost, now: float) -> str:
        if lost.answers_since is None:
            return (
                f"{lost.name}, lost or cut off {now - lost.since:.0f} s ago, until it has answered for "
                f"{lost.must_answer_s:g} s or is removed from the cluster"
            )
        left_s = max(0.0, lost.must_answer_s - (now - lost.answers_since))
        return f"{lost.name}, which answers again, for another {left_s:.0f} s"

    def _update(self) -> None:
        self.ids.clear()
        self.ids.update(self._lost, self._silent, self._draining, self._faulty)

    def _is_faulty(self, node_id: str) -> bool:
        others = max((count for other, count in self._deaths.items() if other != node_id), default=0)
        return self._deaths[node_id] >= max(MIN_DEATHS, others + 2)

    def _has_room_elsewhere(self, node_id: str, nodes: Sequence[Node]) -> bool:
        others = [node for node in nodes if node.node_id not in {node_id, *self.ids}]
        return count_fitting(self._bundle, others) > 0
