"""Slots are found, moved by Ray, taken and removed; Ray is faked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from raysgd.workers.placement import slots as module
from raysgd.workers.placement.slots import WorkerSlots


@dataclass(frozen=True)
class State:
    """What Ray says about a placement group at one moment."""

    state: str
    scheduling_state: str
    nodes: Sequence[str] = ()

    def on(self, *nodes: str) -> State:
        """Return the state with a node for each slot; a slot without a node has an empty one."""
        return replace(self, nodes=nodes)


QUEUED = State("PENDING", "QUEUED")
RESERVING = State("PREPARED", "QUEUED")
CREATED = State("CREATED", "FINISHED")
WAITING = State("PENDING", "NO_RESOURCES")
TOO_LARGE = State("PENDING", "INFEASIBLE")
LOST = State("RESCHEDULING", "FAILED_TO_COMMIT_RESOURCES")


class FakeRay:
    """Ray's placement groups. A placement group is its name here.

    Attributes:
        states: The states of a placement group, by its name: the next one for each look, and the last one from then on. A
            group that is not in here is waiting.
        selectors: The label selectors of the placement groups that were requested, by their names, in order.
        removed: The placement groups that were removed.
    """

    def __init__(self) -> None:
        self.states: dict[str, list[State]] = {}
        self.selectors: dict[str, Any] = {}
        self.removed: list[str] = []

    def request(self, bundles: Any, strategy: str = "PACK", name: str = "", bundle_label_selector: Any = None) -> str:
        self.selectors[name] = bundle_label_selector
        return name

    def table(self, name: str) -> dict[str, Any]:
        states = self.states.get(name, [WAITING])
        now = states.pop(0) if len(states) > 1 else states[0]
        return {
            "state": now.state,
            "stats": {"scheduling_state": now.scheduling_state},
            "bundles_to_node_id": dict(enumerate(now.nodes)),
        }


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(module, "placement_group", fake.request)
    monkeypatch.setattr(module, "placement_group_table", fake.table)
    monkeypatch.setattr(module, "remove_placement_group", fake.removed.append)
    monkeypatch.setattr(module, "POLL_S", 0.001)
    return fake


async def open_slots(count: int = 1, strategy: str = "PACK") -> WorkerSlots:
    """Open ``count`` slots in the placement group "trainer"; further ones are in "trainer-1", "trainer-2" and so on."""
    slots = WorkerSlots("trainer", {"CPU": 1}, strategy)
    await slots.open(count)
    return slots


async def removed(slots: WorkerSlots, fake_ray: FakeRay) -> list[str]:
    """Return what was removed, once it is."""
    await slots.wait_removed()
    return fake_ray.removed


async def test_requested_slot_is_found_once_it_is_placed(fake_ray: FakeRay) -> None:
    fake_ray.states = {"trainer": [CREATED.on("lost")], "trainer-1": [QUEUED, QUEUED, QUEUED, CREATED.on("other")]}
    found = await (await open_slots()).find({"lost"})
    assert (found.placement, fake_ray.removed) == ("trainer-1", [])


async def test_slot_that_ray_moves_is_found_if_it_takes_the_only_room(fake_ray: FakeRay) -> None:
    """Ray noticed the lost node right after one more slot was requested, which is never placed then."""
    fake_ray.states["trainer"] = [*[CREATED.on("here", "lost")] * 3, CREATED.on("here", "elsewhere")]
    slots = await open_slots(2)
    assert await slots.take() is not None
    found = await slots.find({"lost"})
    assert (found.placement, found.index) == ("trainer", 1)
    assert await removed(slots, fake_ray) == ["trainer-1"] and await slots.take() is None


@pytest.mark.parametrize("strategy", ["PACK", "STRICT_SPREAD"])
async def test_node_that_is_avoided_no_longer_is_searched(fake_ray: FakeRay, strategy: str) -> None:
    """The first request excludes the lost node, where the only room is once the node is back."""
    fake_ray.states = {"trainer": [CREATED.on("here")], "trainer-2": [CREATED.on("lost")]}
    slots, avoid = await open_slots(1, strategy), {"lost"}
    await slots.take()
    finding = asyncio.ensure_future(slots.find(avoid))
    await asyncio.sleep(0.05)
    assert not finding.done()
    avoid.clear()
    found = await asyncio.wait_for(finding, 10)
    assert found.placement == "trainer-2" and await removed(slots, fake_ray) == ["trainer-1"]
    also = "here,lost" if strategy == "STRICT_SPREAD" else "lost"
    assert fake_ray.selectors["trainer-1"] == [{"ray.io/node-id": f"!in({also})"}]


async def test_free_slot_on_a_node_that_is_avoided_no_longer_is_found(fake_ray: FakeRay) -> None:
    fake_ray.states["trainer"] = [CREATED.on("here", "lost")]
    slots, avoid = await open_slots(2), {"lost"}
    await slots.take()
    finding = asyncio.ensure_future(slots.find(avoid))
    await asyncio.sleep(0.05)
    avoid.clear()
    found = await asyncio.wait_for(finding, 10)
    assert (found.placement, found.index) == ("trainer", 1)


async def test_cancelled_search_removes_the_requested_slot(fake_ray: FakeRay) -> None:
    fake_ray.states["trainer"] = [CREATED.on("lost")]
    slots = await open_slots()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(slots.find({"lost"}), 0.05)
    assert await removed(slots, fake_ray) == ["trainer-1"]


async def test_slot_without_a_node_is_taken_only_by_callers_that_can_wait(fake_ray: FakeRay) -> None:
    fake_ray.states["trainer"] = [LOST.on("", "node")]
    slots = await open_slots(2)
    assert await slots.take({"node"}, must_have_node=True) is None
    with_node = await slots.take(must_have_node=True)
    assert with_node is not None and with_node.index == 1
    assert await slots.take(must_have_node=True) is None
    without_node = await slots.take({"lost"})
    assert without_node is not None and without_node.index == 0


async def test_placed_slots_are_left_for_others(fake_ray: FakeRay) -> None:
    fake_ray.states["trainer"] = [CREATED.on("a", "b", "lost")]
    slots = await open_slots(3)
    assert await slots.take_placed({"lost"}, num_left=2) is None
    assert await slots.take_placed({"lost"}, num_left=1) is not None
    assert await slots.take_placed({"lost"}, num_left=1) is None


@pytest.mark.parametrize(
    ("strategy", "selector"), [("STRICT_SPREAD", "!in(a,c,d,z)"), ("SPREAD", "!in(z)"), ("PACK", "!in(z)")]
)
async def test_strict_spread_avoids_nodes_with_a_slot_in_use(fake_ray: FakeRay, strategy: str, selector: str) -> None:
    fake_ray.states = {
        "trainer": [CREATED.on("a", "b", "c")],
        "trainer-1": [CREATED.on("d")],
        "trainer-2": [LOST.on("")],
        "trainer-3": [CREATED.on("e")],
    }
    slots = await open_slots(3, strategy)
    _, unused, _ = [await slots.take() for _ in range(3)]
    assert unused is not None
    slots.release(unused)
    for _ in range(2):
        await slots.add()
    assert (await slots.find({"z"})).placement == "trainer-3"
    assert fake_ray.selectors["trainer-3"] == [{"ray.io/node-id": selector}]


async def test_first_placement_group_has_a_new_name_each_time(fake_ray: FakeRay) -> None:
    """The previous one may still exist, for example because its node is lost, and Ray refuses a name in use."""
    slots = WorkerSlots("trainer", {"CPU": 1}, "PACK")
    for _ in range(3):
        await slots.open(2)
        slots.close()
    first, *others = fake_ray.selectors
    assert first == "trainer" and len(others) == 2
    assert all(name.startswith("trainer-") for name in others)


@pytest.mark.parametrize("state", [CREATED, WAITING, TOO_LARGE, LOST])
async def test_placement_groups_are_removed(fake_ray: FakeRay, state: State) -> None:
    fake_ray.states = {"trainer": [state], "trainer-1": [state]}
    slots = await open_slots()
    await slots.add()
    slots.close()
    assert sorted(await removed(slots, fake_ray)) == ["trainer", "trainer-1"]


@pytest.mark.parametrize("last", [CREATED, WAITING])
async def test_placement_group_that_is_being_reserved_is_removed_afterwards(fake_ray: FakeRay, last: State) -> None:
    """Otherwise Ray loses the resources."""
    fake_ray.states["trainer-1"] = [QUEUED, QUEUED, RESERVING, last]

    slots = await open_slots()
    slots.remove(await slots.add())
    assert fake_ray.removed == []
    assert await removed(slots, fake_ray) == ["trainer-1"] and fake_ray.states["trainer-1"] == [last]


async def test_placement_group_that_never_settles_is_removed_after_a_while(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ray.states["trainer"] = [QUEUED]
    monkeypatch.setattr(module, "SETTLE_S", 0.02)

    slots = await open_slots()
    slots.close()
    assert await removed(slots, fake_ray) == ["trainer"]
