"""As many workers as an elastic group wants are started where there is room, and no more."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from raysgd.config import ScalingConfig
from raysgd.workers.group import joining as module
from raysgd.workers.group.joining import JoiningWorkers
from raysgd.workers.placement.avoided_nodes import AvoidedNodes
from support.poll import until_async
from support.ray_state import RayState


class FakeSlot:
    def __init__(self, *, has_resources: bool) -> None:
        self.has_resources = has_resources


class FakeSlots:
    """Any number of slots."""

    name = "trainer"
    is_in_existing_placement = False

    def __init__(self) -> None:
        self.taken: list[FakeSlot] = []
        self.has_resources = True

    async def add(self, avoid: set[str]) -> FakeSlot:
        self.taken.append(FakeSlot(has_resources=self.has_resources))
        return self.taken[-1]

    async def take_placed(self, avoid: set[str], *, num_left: int) -> None:
        return None

    def remove(self, slot: FakeSlot) -> None:
        self.taken.remove(slot)

    async def remove_unplaced(self) -> None:
        return

    async def look(self) -> None:
        return

    def is_placed(self, slot: FakeSlot) -> bool:
        return slot.has_resources


class FakeWorker:
    """Becomes ready when ``may_load`` is set."""

    def __init__(self, slot: FakeSlot) -> None:
        self.slot = slot
        self.requested_at_s = time.monotonic()
        self.may_load = asyncio.Event()
        self.is_ended = False

    async def wait_loaded(self) -> None:
        await self.may_load.wait()


class FakeStarter:
    def __init__(self) -> None:
        self.started: list[FakeWorker] = []
        self.is_quick = False

    async def start(self, slot: FakeSlot, *, warm_up: bool) -> FakeWorker:
        self.started.append(FakeWorker(slot))
        if self.is_quick:
            self.started[-1].may_load.set()
        return self.started[-1]


class Cluster:
    """A cluster of one node, with room for any number of workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._state = RayState({"node": {"CPU": 100.0}}).install(monkeypatch)

    def set_room(self, num_workers: int) -> None:
        self._state.free["node"] = {"CPU": num_workers}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(module, "SEARCH_INTERVAL_S", 0.001)
    return Cluster(monkeypatch)


def make_joining() -> tuple[JoiningWorkers, FakeSlots, FakeStarter]:
    def end(worker: Any) -> None:
        worker.is_ended = True

    slots, starter = FakeSlots(), FakeStarter()
    joining = JoiningWorkers(
        ScalingConfig(num_workers=(1, 4)),
        slots,  # type: ignore[arg-type]
        starter,  # type: ignore[arg-type]
        AvoidedNodes({}),
        end=end,
        warn=lambda text: None,
        start_timeout_s=60.0,
    )
    return joining, slots, starter


async def search_again() -> None:
    """Let the search run some times more."""
    for _ in range(5):
        await asyncio.sleep(0.002)


async def test_each_ready_worker_is_taken_once(cluster: Cluster) -> None:
    joining, _, starter = make_joining()
    joining.want(2)
    await until_async(lambda: len(starter.started) == 2)
    assert joining.num_ready == 0
    for worker in starter.started:
        worker.may_load.set()
    await until_async(lambda: joining.num_ready == 2)
    assert [joining.take(), joining.take(), joining.take()] == [*starter.started, None]
    joining.close()


async def test_no_worker_is_started_in_place_of_one_that_was_taken(cluster: Cluster) -> None:
    """The group gets ready with the taken worker, which takes a while, and wants fewer workers then."""
    joining, slots, starter = make_joining()
    cluster.set_room(0)
    starter.is_quick = True
    joining.want(1)
    cluster.set_room(100)
    taken: list[Any] = []
    joining.on_ready = lambda: taken.append(joining.take())
    await until_async(lambda: bool(taken))
    await search_again()
    assert taken == starter.started and len(starter.started) == 1
    assert [worker.slot for worker in taken] == slots.taken
    joining.close()


async def test_unwanted_workers_are_ended_and_their_slots_removed(cluster: Cluster) -> None:
    joining, slots, starter = make_joining()
    joining.want(3)
    await until_async(lambda: len(starter.started) == 3)
    ready, *starting = starter.started
    ready.may_load.set()
    await until_async(lambda: joining.num_ready == 1)
    joining.want(1)  # the ready worker stays
    assert joining.all() == [ready] and slots.taken == [ready.slot]
    assert [worker.is_ended for worker in (ready, *starting)] == [False, True, True]
    joining.want(0)
    await search_again()
    assert joining.all() == slots.taken == [] and ready.is_ended
    assert len(starter.started) == 3


async def test_first_group_does_not_wait_for_a_hanging_worker(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_GROUP_WAIT_S", 0.05)
    joining, _, starter = make_joining()
    joining.want(2)
    await until_async(lambda: len(starter.started) == 2)
    starter.started[0].may_load.set()
    await asyncio.wait_for(joining.wait_for_first(), 10)
    assert joining.num_ready == 1 and len(joining.all()) == 2
    joining.close()


async def test_slot_whose_resources_others_took_is_removed_even_if_no_more_workers_are_wanted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLACEMENT_TIMEOUT_S", 0.0)
    joining, slots, starter = make_joining()
    slots.has_resources = False
    joining.want(1)
    await until_async(lambda: bool(starter.started))
    cluster.set_room(0)
    await until_async(lambda: starter.started[0].is_ended)
    assert joining.all() == slots.taken == []
    joining.close()
