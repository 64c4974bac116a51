"""A replacement for a member comes from a slot that is found, or is a joining worker that is ready earlier."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raysgd.workers.group.reserve import Reserve
from raysgd.workers.placement.avoided_nodes import AvoidedNodes


class FakeSlots:
    """Finds one slot, when ``is_free`` is set."""

    def __init__(self) -> None:
        self.is_free = asyncio.Event()
        self.is_searching = asyncio.Event()
        self.removed: list[str] = []
        self.is_cancelled = False

    async def find(self, avoid: Any) -> str:
        self.is_searching.set()
        try:
            await self.is_free.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        return "slot"

    def remove(self, slot: str) -> None:
        self.removed.append(slot)


class FakeJoining:
    def __init__(self) -> None:
        self.ready: list[Any] = []

    def all(self) -> list[Any]:
        return self.ready

    def take(self) -> Any:
        return self.ready.pop(0) if self.ready else None


class FakeWorker:
    """Answers when ``may_answer`` is set."""

    def __init__(self) -> None:
        self.slot = "its own"
        self.may_answer = asyncio.Event()
        self.is_asked = asyncio.Event()
        self.info: Any = None
        self.refusal: str | None = None

    async def locate(self) -> None:
        self.is_asked.set()
        await self.may_answer.wait()
        self.info = type("Info", (), {"node_id": "node"})


class FakeStarter:
    async def start(self, slot: str, **settings: Any) -> str:
        return f"started in {slot}"


def make_reserve() -> tuple[Any, FakeSlots, FakeJoining, list[Any]]:
    slots, joining = FakeSlots(), FakeJoining()
    ended: list[Any] = []
    reserve = Reserve(slots, FakeStarter(), 0, joining, ended.append, AvoidedNodes({}))  # type: ignore[arg-type]
    return reserve, slots, joining, ended


async def test_worker_is_started_in_the_slot_that_is_found() -> None:
    reserve, slots, _, _ = make_reserve()
    finding = asyncio.ensure_future(reserve.find())
    await slots.is_searching.wait()
    assert not finding.done()
    slots.is_free.set()
    assert await finding == "started in slot"


async def test_joining_worker_that_is_ready_earlier_is_taken() -> None:
    """It may have been started in the dead member's place: there is no other slot then."""
    reserve, slots, joining, _ = make_reserve()
    finding = asyncio.ensure_future(reserve.find())
    await slots.is_searching.wait()
    worker = FakeWorker()
    worker.may_answer.set()
    joining.ready.append(worker)
    assert await finding is worker
    await asyncio.sleep(0)
    assert slots.is_cancelled


async def test_slot_found_at_the_same_time_as_a_joining_worker_is_removed() -> None:
    reserve, slots, joining, _ = make_reserve()
    worker = FakeWorker()
    joining.ready.append(worker)
    finding = asyncio.ensure_future(reserve.find())
    await worker.is_asked.wait()
    slots.is_free.set()
    await asyncio.sleep(0)
    worker.may_answer.set()
    assert await finding is worker
    assert slots.removed == ["slot"]


async def test_worker_is_ended_if_waiting_for_its_answer_is_cancelled() -> None:
    reserve, slots, joining, ended = make_reserve()
    worker = FakeWorker()
    joining.ready.append(worker)
    taking = asyncio.ensure_future(reserve.take_joining_worker())
    await worker.is_asked.wait()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert ended == [worker] and slots.removed == ["its own"]


def test_replacements_on_lost_nodes_are_not_counted() -> None:
    reserve, _, joining, _ = make_reserve()
    for node_id in ("lost", "other"):
        joining.ready.append(FakeWorker())
        joining.ready[-1].info = located_on(node_id)
        reserve._spares.append(joining.ready[-1])
    reserve._spares.append(FakeWorker())  # it has not answered where it is
    assert reserve.count_outside({"lost"}) == 3
    assert reserve.count_outside(()) == 5


def located_on(node_id: str) -> Any:
    return type("Info", (), {"node_id": node_id})
