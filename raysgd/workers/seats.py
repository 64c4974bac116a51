"""Room for worker processes: the bundles of placement groups, which hold one process at a time. Runs in the TrainerActor.

A placement group cannot change its size. The first one has the seats of the smallest group and of the spares, so that
they are had together or not at all; each seat beyond is a placement group of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

#: Seconds between two looks at whether a seat has its resources.
_LOOK_S = 0.05
#: Seconds for which resources that nobody wants any more may be on their way, before they are given back all the same.
_SETTLE_S = 5.0
#: How Ray calls it when it has found no room for a placement group, and will look again later; the last where it looks for
#: another place for a part of one.
_WAITING = ("NO_RESOURCES", "INFEASIBLE", "FAILED_TO_COMMIT_RESOURCES")


@dataclass(frozen=True, eq=False)
class Seat:
    """One bundle."""

    placement: PlacementGroup
    index: int

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Puts an actor there."""
        return PlacementGroupSchedulingStrategy(placement_group=self.placement, placement_group_bundle_index=self.index)

    def node_id(self) -> str:
        """Where it is; empty while it is nowhere."""
        return str(placement_group_table(self.placement).get("bundles_to_node_id", {}).get(self.index, ""))

    def is_placed(self) -> bool:
        """Whether its resources, and those of all seats it was asked for with, are reserved on nodes that Ray sees."""
        return bool(placement_group_table(self.placement).get("state") == "CREATED")


@dataclass(frozen=True)
class Room:
    """A placement group of others, such as that of a Tune trial, which has the first seats and stays theirs.

    Attributes:
        bundles: The bundle of each seat, by index.
    """

    placement: PlacementGroup
    bundles: tuple[int, ...]


class Seats:
    """The seats of one group of workers.

    Args:
        name: Name of the first placement group.
        bundle: The resources of a seat.
        strategy: Placement strategy of the first group.
        room: Where the first seats are, if not in a group of their own.

    Attributes:
        on_added: Called when a seat is asked for beside room that was given: Ray does not know that it goes with that.
    """

    def __init__(self, name: str, bundle: Mapping[str, float], strategy: str, room: Room | None = None) -> None:
        self._name = name
        self._bundle = dict(bundle)
        self._strategy = strategy
        self._room = room
        self._placements: list[PlacementGroup] = []
        self._num_opened = 0
        self._num_added = 0
        self._free: list[Seat] = []
        self._removals: set[asyncio.Task[None]] = set()
        self.on_added: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        """Begins the names of its placement groups."""
        return self._name

    @property
    def is_given(self) -> bool:
        """Whether the first are in room that was given."""
        return self._room is not None

    @property
    def is_open(self) -> bool:
        return bool(self._placements)

    def open(self, count: int) -> None:
        """Ask for ``count`` seats at once; where room was given, all that it has are there."""
        if self._room is not None:
            placement, bundles = self._room.placement, self._room.bundles
        else:
            # The one before may have to wait for its removal, and keeps its name until then.
            name = self._name if not self._num_opened else f"{self._name}-again{self._num_opened}"
            self._num_opened += 1
            placement = placement_group([self._bundle] * count, strategy=self._strategy, name=name)
            bundles = tuple(range(count))
        self._placements.append(placement)
        self._free += [Seat(placement, index) for index in bundles]

    def add(self, avoid: Collection[str] = ()) -> Seat:
        """Ask for one more seat, on none of the nodes ``avoid``."""
        if self.is_given:
            self.on_added()
        self._num_added += 1
        name = f"{self._name}-{self._num_added}"
        selector = [{"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}] if avoid else None
        placement = placement_group([self._bundle], name=name, bundle_label_selector=selector)
        self._placements.append(placement)
        return Seat(placement, 0)

    def take(self, avoid: Collection[str] = (), *, is_somewhere: bool = False) -> Seat | None:
        """A free seat, on none of the nodes ``avoid``; its resources may still be on their way.

        With ``is_somewhere`` it is one that is on a node, as far as Ray knows. One whose node is lost may never be on any again:
        a newcomer may have the only room that there is.
        """
        for seat in self._free:
            node = seat.node_id() if avoid or is_somewhere else ""
            if node not in avoid and (node or not is_somewhere):
                self._free.remove(seat)
                return seat
        return None

    async def find(self, avoid: Collection[str]) -> Seat:
        """A seat on none of the nodes ``avoid``, whose resources are there.

        Under ``STRICT_SPREAD`` it is on none that has a seat in use, either. It is one more, unless Ray puts one of those that it
        had there elsewhere first: it does so with the seats of a node when it finds that the node is lost, and perhaps in the
        only room that there is.
        """
        if self._strategy == "STRICT_SPREAD":
            avoid = {*avoid, *self._nodes_in_use()}
        added = self.add(avoid)
        try:
            while not added.is_placed():
                if (moved := self.take_placed(avoid)) is not None:
                    self.give_up(added)
                    return moved
                await asyncio.sleep(_LOOK_S)
        except asyncio.CancelledError:
            self.give_up(added)
            raise
        return added

    def give_back(self, seat: Seat) -> None:
        """The process that had it is gone, or going."""
        if seat.placement in self._placements:
            self._free.append(seat)

    def take_placed(self, avoid: Collection[str] = ()) -> Seat | None:
        """A free seat whose resources are there, on none of the nodes ``avoid``."""
        for seat in self._free:
            if seat.is_placed() and (not avoid or seat.node_id() not in avoid):
                self._free.remove(seat)
                return seat
        return None

    def remove(self, seat: Seat) -> None:
        """Give a seat's resources back to the cluster; one of those asked for together stays, and is free."""
        if seat.placement in self._placements[1:]:
            self.give_up(seat)
        else:
            self.give_back(seat)

    def give_up(self, seat: Seat) -> None:
        """The node of a seat is lost. One of those asked for together is elsewhere once Ray knows of that."""
        if seat.placement in self._placements[1:]:
            self._placements.remove(seat.placement)
            self._remove(seat.placement)
        else:
            self.give_back(seat)

    def remove_unplaced(self) -> None:
        """Give back the free seats beyond the first, whose resources are not there: their node is gone."""
        for seat in list(self._free):
            if seat.placement in self._placements[1:] and not seat.is_placed():
                self._free.remove(seat)
                self.remove(seat)

    def close(self) -> None:
        """Give all resources back, those of room that was given to whoever has it."""
        for placement in self._placements:
            if self._room is None or placement != self._room.placement:
                self._remove(placement)
        self._placements.clear()
        self._free.clear()

    async def removed(self) -> None:
        """Wait until all that was given back has been."""
        if self._removals:
            await asyncio.wait(self._removals)

    def _nodes_in_use(self) -> set[str]:
        free = {(seat.placement, seat.index) for seat in self._free}
        bundles = {
            placement: placement_group_table(placement).get("bundles_to_node_id", {}) for placement in self._placements
        }
        return {
            str(node)
            for placement, nodes in bundles.items()
            for index, node in nodes.items()
            if node and (placement, index) not in free
        }

    def _remove(self, placement: PlacementGroup) -> None:
        if _is_settled(placement):
            remove_placement_group(placement)
            return
        removal = asyncio.ensure_future(_remove_later(placement))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)


def _is_settled(placement: PlacementGroup) -> bool:
    """Whether no node is just reserving the resources.

    Ray 2.60 loses those of a group that is removed at that time until the node is started anew (decision 0020).
    """
    told = placement_group_table(placement)
    return told.get("state") in (None, "CREATED", "REMOVED") or told["stats"]["scheduling_state"] in _WAITING


async def _remove_later(placement: PlacementGroup) -> None:
    end = time.monotonic() + _SETTLE_S
    while True:
        await asyncio.sleep(_LOOK_S)
        if time.monotonic() > end or _is_settled(placement):
            break
    remove_placement_group(placement)


def are_others_waiting(name: str, totals: Sequence[Mapping[str, float]]) -> bool:
    """Whether placement groups of others wait for resources that nodes of these totals could give them.

    Args:
        name: Begins the names of those that are not others.
        totals: The resources of each node.
    """
    for group in placement_group_table().values():
        if group["state"] in ("PENDING", "RESCHEDULING") and not str(group["name"]).startswith(name):
            bundles = [dict(bundle) for bundle in group["bundles"].values()]
            if all(any(_holds(total, bundle) for total in totals) for bundle in bundles):
                return True
    return False


def _holds(total: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(total.get(resource, 0.0) >= amount for resource, amount in bundle.items())


def remove_placements(name: str) -> None:
    """Remove the placement groups of this name, and those whose names begin with it: of a process that is gone."""
    end = time.monotonic() + _SETTLE_S  # for all of them
    for group in placement_group_table().values():
        found = str(group["name"])
        if group["state"] != "REMOVED" and (found == name or found.startswith(f"{name}-")):
            with contextlib.suppress(Exception):  # it is gone by now
                placement = get_placement_group(found)
                while time.monotonic() < end and not _is_settled(placement):
                    time.sleep(_LOOK_S)
                remove_placement_group(placement)
