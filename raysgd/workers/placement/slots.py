"""Worker slots: bundles of placement groups, each of which holds one worker process at a time. Runs in the TrainerActor.

A placement group cannot change its size. The first one has the slots of the smallest group and of the spares, so that they
are reserved together or not at all. Each further slot is a placement group of its own. Spares have priority over growth.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysgd.workers.placement.calls import call_cluster

#: Seconds between two checks of a placement group's state.
POLL_S = 0.05
#: How long the removal of a placement group waits for resources that are just being reserved.
SETTLE_S = 5.0
#: Ray's scheduling states of a placement group that waits for room; in the last one only a part of the group waits.
_WAITING = ("NO_RESOURCES", "INFEASIBLE", "FAILED_TO_COMMIT_RESOURCES")


@dataclass(frozen=True, eq=False)
class WorkerSlot:
    """One bundle of a placement group."""

    placement: PlacementGroup
    index: int

    def scheduling_strategy(self) -> PlacementGroupSchedulingStrategy:
        """Return the strategy that starts an actor in this slot."""
        return PlacementGroupSchedulingStrategy(placement_group=self.placement, placement_group_bundle_index=self.index)


@dataclass(frozen=True)
class ExistingPlacement:
    """A placement group of others, such as of a Tune trial, with room for the first slots: ``bundles`` has their indices."""

    placement: PlacementGroup
    bundles: tuple[int, ...]


class WorkerSlots:
    """The slots of one worker group.

    Args:
        name: Name of the first placement group; prefix of the names of the others.
        bundle: The resources of a slot.
        strategy: Placement strategy of the first placement group.
        existing: Where the first slots are, if not in a placement group of their own.

    Attributes:
        on_slot_added: Called in a thread for each slot that is requested in addition to those of an existing placement group.
            Ray does not remove it together with that group.
    """

    def __init__(
        self, name: str, bundle: Mapping[str, float], strategy: str, existing: ExistingPlacement | None = None
    ) -> None:
        self.name = name
        self._bundle = dict(bundle)
        self._strategy = strategy
        self._existing = existing
        self._placements: list[PlacementGroup] = []  # the first one holds the slots that were requested together
        self._num_opened = 0
        self._num_added = 0
        self._free: list[WorkerSlot] = []
        self._seen: dict[PlacementGroup, Mapping[str, Any]] = {}  # what Ray said of the placement groups last
        self._removals: set[asyncio.Task[None]] = set()
        self.on_slot_added: Callable[[], None] = lambda: None

    @property
    def is_in_existing_placement(self) -> bool:
        return self._existing is not None

    @property
    def is_open(self) -> bool:
        return bool(self._placements)

    async def open(self, count: int) -> None:
        """Request ``count`` slots together; use all slots of an existing placement group instead, if there is one."""
        if self._existing is not None:
            placement, bundles = self._existing.placement, self._existing.bundles
        else:
            # The previous group may still wait for its removal, and keeps its name until then.
            name = self.name if not self._num_opened else f"{self.name}-again{self._num_opened}"
            self._num_opened += 1
            placement = await self._request([self._bundle] * count, strategy=self._strategy, name=name)
            bundles = tuple(range(count))
        self._placements.append(placement)
        self._free += [WorkerSlot(placement, index) for index in bundles]

    async def look(self) -> None:
        """Ask Ray where the slots are: what `is_placed` and `node_id` say from then on."""
        placements = list(self._placements)
        seen = await call_cluster(lambda: [placement_group_table(each) for each in placements])
        self._seen = dict(zip(placements, seen, strict=True))

    def is_placed(self, slot: WorkerSlot) -> bool:
        """Return True if the slot's whole placement group is reserved on nodes that Ray sees."""
        return bool(self._seen.get(slot.placement, {}).get("state") == "CREATED")

    def node_id(self, slot: WorkerSlot) -> str:
        """Return the id of the slot's node; empty if Ray has not placed the slot, or the node is gone."""
        return str(self._seen.get(slot.placement, {}).get("bundles_to_node_id", {}).get(slot.index, ""))

    async def add(self, avoid: Collection[str] = ()) -> WorkerSlot:
        """Request one more slot, on a node that is not in ``avoid``."""
        if self.is_in_existing_placement:
            await call_cluster(self.on_slot_added)
        self._num_added += 1
        name = f"{self.name}-{self._num_added}"
        selector = [{"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}] if avoid else None
        placement = await self._request([self._bundle], name=name, bundle_label_selector=selector)
        self._placements.append(placement)
        return WorkerSlot(placement, 0)

    async def take(self, avoid: Collection[str] = (), *, must_have_node: bool = False) -> WorkerSlot | None:
        """Take a free slot that is not on a node in ``avoid``; its resources may not be reserved yet.

        With ``must_have_node``, a slot without a node is not taken. A slot whose node is lost may never get another node,
        because a joining worker may use the only room that there is.
        """
        if avoid or must_have_node:
            await self.look()
        for slot in self._free:
            node = self.node_id(slot) if avoid or must_have_node else ""
            if node not in avoid and (node or not must_have_node):
                self._free.remove(slot)
                return slot
        return None

    async def find(self, avoid: Collection[str]) -> WorkerSlot:
        """Wait for a slot with reserved resources that is not on a node in ``avoid``, which may change meanwhile.

        ``STRICT_SPREAD`` also avoids nodes with a slot in use. A new slot is requested, and again when a node is avoided no
        longer. Meanwhile Ray may move a free slot from a lost node to the only room that there is; then that slot is taken.
        """
        in_use: set[str] = set()
        if self._strategy == "STRICT_SPREAD":
            await self.look()
            in_use = self._nodes_in_use()
        requested = {*avoid, *in_use}
        added = await self.add(requested)
        try:
            while True:
                moved = await self.take_placed(avoided := {*avoid, *in_use})
                if self.is_placed(added):
                    break
                if moved is not None:
                    self.remove(added)
                    return moved
                if not requested <= avoided:
                    self.remove(added)
                    requested = avoided
                    added = await self.add(requested)
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            self.remove(added)
            raise
        if moved is not None:
            self.release(moved)
        return added

    def release(self, slot: WorkerSlot) -> None:
        """Make a slot free for another process; the process in it is gone or is about to end."""
        if slot.placement in self._placements:
            self._free.append(slot)

    async def take_placed(self, avoid: Collection[str] = (), *, num_left: int = 0) -> WorkerSlot | None:
        """Take a free slot with reserved resources that is not on a node in ``avoid``, if ``num_left`` others like it stay."""
        await self.look()
        placed = [slot for slot in self._free if self.is_placed(slot) and self.node_id(slot) not in avoid]
        if len(placed) <= num_left:
            return None
        self._free.remove(placed[0])
        return placed[0]

    def remove(self, slot: WorkerSlot) -> None:
        """Return a slot's resources to the cluster; a slot that was requested together with others becomes free instead."""
        if slot.placement in self._placements[1:]:
            self._placements.remove(slot.placement)
            self._remove_placement(slot.placement)
        else:
            self.release(slot)

    async def remove_unplaced(self) -> None:
        """Remove free slots whose node is gone; slots that were requested together with others stay."""
        await self.look()
        for slot in list(self._free):
            if slot.placement in self._placements[1:] and not self.is_placed(slot):
                self._free.remove(slot)
                self.remove(slot)

    def close(self) -> None:
        """Return all resources to the cluster, except those of an existing placement group."""
        for placement in self._placements:
            if self._existing is None or placement != self._existing.placement:
                self._remove_placement(placement)
        self._placements.clear()
        self._free.clear()

    async def wait_removed(self) -> None:
        """Wait until every placement group that was to be removed is removed."""
        if self._removals:
            await asyncio.wait(self._removals)

    def _nodes_in_use(self) -> set[str]:
        free = {(slot.placement, slot.index) for slot in self._free}
        in_use: set[str] = set()
        for placement in self._placements:
            nodes = self._seen[placement].get("bundles_to_node_id", {})
            in_use |= {str(node) for index, node in nodes.items() if node and (placement, index) not in free}
        return in_use

    async def _request(self, bundles: list[dict[str, float]], **settings: Any) -> PlacementGroup:
        return await call_cluster(partial(placement_group, bundles, **settings), on_abandoned=remove_placement_group)

    def _remove_placement(self, placement: PlacementGroup) -> None:
        removal = asyncio.ensure_future(_remove_when_settled(placement))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)


def _is_settled(placement: PlacementGroup) -> bool:
    """Return True unless a node is reserving the resources at this moment.

    If a placement group is removed then, Ray 2.60 loses the resources until the node restarts (decision 0020).
    """
    table = placement_group_table(placement)
    return table.get("state") in (None, "CREATED", "REMOVED") or table["stats"]["scheduling_state"] in _WAITING


async def _remove_when_settled(placement: PlacementGroup) -> None:
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        if await call_cluster(_is_settled, placement):
            break
        await asyncio.sleep(POLL_S)
    await call_cluster(remove_placement_group, placement)


def has_waiting_groups(name: str, totals: Sequence[Mapping[str, float]]) -> bool:
    """Return True if a placement group without the prefix ``name`` waits for resources that ``totals`` allow; blocks."""
    for group in placement_group_table().values():
        if group["state"] in ("PENDING", "RESCHEDULING") and not str(group["name"]).startswith(name):
            bundles = [dict(bundle) for bundle in group["bundles"].values()]
            if all(any(_holds(total, bundle) for total in totals) for bundle in bundles):
                return True
    return False


def _holds(total: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(total.get(resource, 0.0) >= amount for resource, amount in bundle.items())


def remove_placement_groups(name: str) -> None:
    """Remove the placement groups that a dead TrainerActor left: those named ``name`` or with that prefix. Blocks."""
    deadline = time.monotonic() + SETTLE_S  # for all of them together
    for group in placement_group_table().values():
        found = str(group["name"])
        if group["state"] != "REMOVED" and (found == name or found.startswith(f"{name}-")):
            with contextlib.suppress(Exception):  # it may be gone by now
                placement = get_placement_group(found)
                while time.monotonic() < deadline and not _is_settled(placement):
                    time.sleep(POLL_S)
                remove_placement_group(placement)
