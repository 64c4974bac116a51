"""The nodes on which a group starts no processes: lost, draining and faulty ones. Runs in the TrainerActor; needs no Ray.

A lost node is on probation: a cable that is plugged in again, or a switch that restarts, gives the same node back. The node
counts again once its agent has answered for some time, which doubles with each loss.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
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
class _Node:
    """What is known of a node.

    Attributes:
        name: The node's name for messages; empty for one that only drains or is silent.
        lost_at: When it was lost, while it is on probation.
        answers_since: Since when it has answered without a pause; None if it does not answer.
        fault: Why it is not used any more; empty if it may be used.
        died_at: When the last worker died on it.
    """

    name: str = ""
    num_losses: int = 0
    lost_at: float | None = None
    answers_since: float | None = None
    is_silent: bool = False
    is_draining: bool = False
    fault: str = ""
    num_deaths: int = 0
    died_at: float = -math.inf

    @property
    def is_avoided(self) -> bool:
        return self.lost_at is not None or self.is_silent or self.is_draining or bool(self.fault)

    @property
    def must_answer_s(self) -> float:
        """Seconds for which it must answer before it counts again."""
        return min(MAX_PROBATION_S, PROBATION_S * 2.0 ** (self.num_losses - 1))

    def describe(self, node_id: str, now: float) -> list[str]:
        """Say why it is not used, and until when."""
        reasons = []
        if self.lost_at is not None and self.answers_since is None:
            reasons.append(
                f"{self.name}, lost or cut off {now - self.lost_at:.0f} s ago, until it has answered for "
                f"{self.must_answer_s:g} s or is removed from the cluster"
            )
        elif self.lost_at is not None:
            left_s = max(0.0, self.must_answer_s - (now - (self.answers_since or now)))
            reasons.append(f"{self.name}, which answers again, for another {left_s:.0f} s")
        if self.is_draining:
            reasons.append(f"the draining node {node_id[:12]} until it is gone")
        if self.fault:
            reasons.append(f"{self.name}, {self.fault}")
        return reasons


class AvoidedNodes(Set[str]):
    """The ids of the nodes to avoid, as they are at every moment, over all runs of a group.

    Args:
        bundle: A worker's resources.
        clock: Returns seconds since any fixed moment.
    """

    def __init__(self, bundle: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._bundle = bundle
        self._clock = clock
        self._nodes: defaultdict[str, _Node] = defaultdict(_Node)
        self._warnings: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return iter([node_id for node_id, node in self._nodes.items() if node.is_avoided])

    def __contains__(self, node_id: object) -> bool:
        return any(each == node_id for each in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def lost(self) -> list[str]:
        """The ids of the nodes on probation, whose agents are to be asked."""
        return [node_id for node_id, node in self._nodes.items() if node.lost_at is not None]

    def lose(self, info: WorkerInfo) -> None:
        """Put a worker's node on probation, because the node does not answer. All its workers may be reported."""
        node = self._nodes[info.node_id]
        if node.lost_at is None:
            node.name, node.lost_at, node.answers_since = info.node, self._clock(), None
            node.num_losses += 1

    def on_asked(self, node_id: str, *, answers: bool) -> None:
        """Record whether a lost node's agent answers; the node counts again after its probation."""
        node, now = self._nodes[node_id], self._clock()
        if not answers:
            node.answers_since = None
        elif node.answers_since is None:
            node.answers_since = now
        elif now - node.answers_since >= node.must_answer_s:
            node.lost_at = None

    def set_silent(self, node_ids: Collection[str]) -> None:
        """Avoid nodes that do not answer at present, until the next call."""
        for node_id in {*self._nodes, *node_ids}:
            self._nodes[node_id].is_silent = node_id in node_ids

    def drain(self, node_ids: Collection[str]) -> None:
        """Avoid nodes that Ray is about to take away."""
        for node_id in node_ids:
            self._nodes[node_id].is_draining = True

    def remove_gone(self, nodes: Sequence[Node]) -> None:
        """Forget the nodes that are not among Ray's living ``nodes``, because Ray starts nothing there."""
        for node_id in self._nodes.keys() - {node.node_id for node in nodes}:
            gone = self._nodes[node_id]
            gone.lost_at, gone.is_draining, gone.fault = None, False, ""

    def record_death(self, info: WorkerInfo) -> bool:
        """Count a worker's death on a living node; return whether the node is faulty now, for `avoid_faulty` to decide."""
        node, now = self._nodes[info.node_id], self._clock()
        node.num_deaths += now - node.died_at >= SAME_DEATH_S
        node.died_at = now
        others = max((other.num_deaths for other in self._nodes.values() if other is not node), default=0)
        return not node.is_avoided and node.num_deaths >= max(MIN_DEATHS, others + 2)

    def avoid_faulty(self, info: WorkerInfo, nodes: Sequence[Node]) -> None:
        """Avoid a worker's node, because it is faulty, if another one of ``nodes`` has room for a worker."""
        others = [node for node in nodes if node.node_id not in {info.node_id, *self}]
        if count_fitting(self._bundle, others) > 0:
            faulty = self._nodes[info.node_id]
            faulty.name, faulty.fault = info.node, "on which workers died repeatedly, in this Trainer"
            self._warnings.append(
                f"{info.node} is not used any more: workers have died there {faulty.num_deaths} times, "
                "and less often on every other node"
            )

    def refuse(self, info: WorkerInfo, why: str) -> None:
        """Avoid a worker's node, because its versions do not fit to the driver's, until its Ray is started again."""
        node = self._nodes[info.node_id]
        if not node.fault:
            node.name, node.fault = info.node, "whose versions differ, until its Ray is started again"
            self._warnings.append(f"{info.node} is not used until its Ray is started again: {why}")

    def take_warnings(self) -> list[str]:
        """Return a line for each node that was found faulty, or was refused, since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def describe(self) -> str | None:
        """Say which nodes are not used, why, and until when; None if there are none."""
        now = self._clock()
        lines = [line for node_id, node in self._nodes.items() for line in node.describe(node_id, now)]
        return f"not used: {'; '.join(lines)}" if lines else None
