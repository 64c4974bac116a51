"""Slots are found, moved by Ray, taken and removed; Ray is faked."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from raysgd.workers.placement import slots as module
from raysgd.workers.placement.slots import WorkerSlot, WorkerSlots


class FakeSlot(WorkerSlot):
    """A slot whose placement changes with the number of checks."""

    checks = 0
    placed_at = 0
    nodes = ("elsewhere",)

    def is_placed(self) -> bool:
        type(self).checks += 1
        return self.checks > self.placed_at

    def node_id(self) -> str:
        return self.nodes[min(self.checks, len(self.nodes) - 1)]


class NeverPlaced(FakeSlot):
    placed_at = 1_000_000


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of placement groups that were removed."""
    found: list[Any] = []
    monkeypatch.setattr(module, "remove_placement_group", found.append)
    monkeypatch.setattr(module, "placement_group_table", lambda placement: {"state": "CREATED"})
    monkeypatch.setattr(module, "POLL_S", 0.001)
    return found


def slots_with(free: WorkerSlot, added: WorkerSlot) -> WorkerSlots:
    slots = WorkerSlots("trainer", {"CPU": 1}, "PACK")
    slots._placements = [free.placement]
    slots._free = [free]

    def add(avoid: Any = ()) -> WorkerSlot:
        assert avoid == {"lost"}
        slots._placements.append(added.placement)
        return added

    slots.add = add  # type: ignore[method-assign]
    return slots


def test_requested_slot_is_found_once_it_is_placed(removed: list[Any]) -> None:
    class OnLostNode(FakeSlot):
        nodes = ("lost",)

    class PlacedSoon(FakeSlot):
        placed_at = 3

    added = PlacedSoon(cast(Any, "added"), 0)
    slots = slots_with(OnLostNode(cast(Any, "first"), 0), added)
    assert asyncio.run(slots.find({"lost"})) is added
    assert removed == []


def test_slot_that_ray_moves_is_found_if_it_takes_the_only_room(removed: list[Any]) -> None:
    """Ray noticed the lost node right after one more slot was requested, which is never placed then."""

    class Moved(FakeSlot):
        nodes = ("lost", "lost", "lost", "elsewhere")

    moved = Moved(cast(Any, "first"), 1)
    slots = slots_with(moved, NeverPlaced(cast(Any, "added"), 0))
    assert asyncio.run(slots.find({"lost"})) is moved
    assert removed == ["added"] and slots._free == []


def test_cancelled_search_removes_the_requested_slot(removed: list[Any]) -> None:
    class NeverMoved(NeverPlaced):
        nodes = ("lost",)

    async def search() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(slots.find({"lost"}), 0.05)

    slots = slots_with(NeverMoved(cast(Any, "first"), 0), NeverPlaced(cast(Any, "added"), 0))
    asyncio.run(search())
    assert removed == ["added"]


def test_slot_without_a_node_is_taken_only_by_callers_that_can_wait() -> None:
    class WithNode(FakeSlot):
        nodes = ("node",)

    class WithoutNode(FakeSlot):
        nodes = ("",)

    slots = WorkerSlots("trainer", {"CPU": 1}, "PACK")
    without_node, with_node = WithoutNode(cast(Any, "first"), 0), WithNode(cast(Any, "first"), 1)
    slots._free = [without_node, with_node]
    assert slots.take({"node"}, must_have_node=True) is None
    assert slots.take(must_have_node=True) is with_node
    assert slots.take(must_have_node=True) is None
    assert slots.take({"lost"}) is without_node


def test_strict_spread_avoids_nodes_with_a_slot_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = {"first": {0: "a", 1: "b", 2: "c"}, "beyond": {0: "d"}, "lost": {0: ""}}
    monkeypatch.setattr(module, "placement_group_table", lambda placement: {"bundles_to_node_id": nodes[placement]})
    for strategy, avoided in [("STRICT_SPREAD", {"z", "a", "c", "d"}), ("SPREAD", {"z"}), ("PACK", {"z"})]:
        slots = WorkerSlots("trainer", {"CPU": 1}, strategy)
        slots._placements = [cast(Any, name) for name in nodes]
        slots._free = [WorkerSlot(cast(Any, "first"), 1)]
        requested: list[Any] = []

        def add(avoid: Any, requested: list[Any] = requested) -> WorkerSlot:
            requested.append(set(avoid))
            return FakeSlot(cast(Any, "added"), 0)

        slots.add = add  # type: ignore[method-assign]
        asyncio.run(slots.find({"z"}))
        assert requested == [avoided]


TABLE = {
    "queued": {"state": "PENDING", "stats": {"scheduling_state": "QUEUED"}},
    "reserving": {"state": "PREPARED", "stats": {"scheduling_state": "QUEUED"}},
    "created": {"state": "CREATED", "stats": {"scheduling_state": "FINISHED"}},
    "waiting": {"state": "PENDING", "stats": {"scheduling_state": "NO_RESOURCES"}},
    "too large": {"state": "PENDING", "stats": {"scheduling_state": "INFEASIBLE"}},
    "lost": {"state": "RESCHEDULING", "stats": {"scheduling_state": "FAILED_TO_COMMIT_RESOURCES"}},
}


def test_first_placement_group_has_a_new_name_each_time(removed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous one may still exist, for example because its node is lost, and Ray refuses a name in use."""
    names: list[str] = []
    monkeypatch.setattr(module, "placement_group", lambda bundles, strategy, name: names.append(name))
    slots = WorkerSlots("trainer", {"CPU": 1}, "PACK")
    for _ in range(3):
        slots.open(2)
        slots.close()
    assert len(set(names)) == 3
    assert names[0] == "trainer" and all(name.startswith("trainer-") for name in names[1:])


class FakeTable:
    """Ray's table of placement groups, which steps through the given states and stays at the last one."""

    def __init__(self, *states: str) -> None:
        self.states = list(states)

    def __call__(self, placement: Any) -> dict[str, Any]:
        return TABLE[self.states.pop(0) if len(self.states) > 1 else self.states[0]]


def slots_in(*placements: str) -> WorkerSlots:
    slots = WorkerSlots("trainer", {"CPU": 1}, "PACK")
    slots._placements = [cast(Any, name) for name in placements]
    return slots


@pytest.mark.parametrize("state", ["created", "waiting", "too large", "lost"])
def test_placement_group_is_removed_at_once_unless_a_node_is_reserving_it(
    removed: list[Any], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(module, "placement_group_table", FakeTable(state))
    slots_in("first", "second").close()
    assert removed == ["first", "second"]


@pytest.mark.parametrize("last", ["created", "waiting"])
def test_placement_group_that_is_being_reserved_is_removed_afterwards(
    removed: list[Any], monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Otherwise Ray loses the resources."""
    table = FakeTable("queued", "queued", "reserving", last)
    monkeypatch.setattr(module, "placement_group_table", table)

    async def remove() -> None:
        slots = slots_in("first", "added")
        slots.remove(WorkerSlot(cast(Any, "added"), 0))
        assert removed == []
        await slots.wait_removed()
        assert removed == ["added"] and table.states == [last]

    asyncio.run(remove())


def test_placement_group_that_never_settles_is_removed_after_a_while(
    removed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "placement_group_table", FakeTable("queued"))
    monkeypatch.setattr(module, "SETTLE_S", 0.02)

    async def close() -> None:
        slots = slots_in("first")
        slots.close()
        await slots.wait_removed()

    asyncio.run(close())
    assert removed == ["first"]
