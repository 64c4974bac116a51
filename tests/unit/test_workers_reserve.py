"""Who takes the place of a member."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raysgd.workers.reserve import Reserve


class FakeSeats:
    """One seat is found when it is let go."""

    def __init__(self) -> None:
        self.is_free = asyncio.Event()
        self.removed: list[str] = []
        self.is_given_up = False

    async def find(self, avoid: Any) -> str:
        try:
            await self.is_free.wait()
        except asyncio.CancelledError:
            self.is_given_up = True
            raise
        return "seat"

    def remove(self, seat: str) -> None:
        self.removed.append(seat)


class FakeNewcomers:
    def __init__(self) -> None:
        self.ready: list[Any] = []

    def take(self) -> Any:
        return self.ready.pop(0) if self.ready else None


class FakeWorker:
    """A process that answers when it is let."""

    def __init__(self) -> None:
        self.seat = "its own"
        self.may_answer = asyncio.Event()
        self.handle = self.describe = self
        self.info: Any = None

    async def remote(self) -> Any:
        await self.may_answer.wait()
        return type("Info", (), {"node_id": "node"})


class FakeStarter:
    def start(self, seat: str, **settings: Any) -> str:
        return f"started in {seat}"


def made() -> tuple[Reserve, FakeSeats, FakeNewcomers, list[Any]]:
    seats, newcomers = FakeSeats(), FakeNewcomers()
    ended: list[Any] = []
    reserve: Any = Reserve(seats, FakeStarter(), 0, newcomers, ended.append, ())  # type: ignore[arg-type]
    return reserve, seats, newcomers, ended


async def test_a_process_is_started_in_the_seat_that_is_found() -> None:
    reserve, seats, _, _ = made()
    finding = asyncio.ensure_future(reserve.find())
    await asyncio.sleep(0.01)
    assert not finding.done()
    seats.is_free.set()
    assert await finding == "started in seat"  # type: ignore[comparison-overlap]


async def test_a_newcomer_that_comes_up_first_is_taken() -> None:
    """It may have been started where the one was whose place is to be filled: there is no other seat then."""
    reserve, seats, newcomers, _ = made()
    finding = asyncio.ensure_future(reserve.find())
    await asyncio.sleep(0.01)
    worker = FakeWorker()
    worker.may_answer.set()
    newcomers.ready.append(worker)
    assert await finding is worker  # type: ignore[comparison-overlap]
    await asyncio.sleep(0)
    assert seats.is_given_up


async def test_a_seat_that_is_found_beside_a_newcomer_is_given_back() -> None:
    reserve, seats, newcomers, _ = made()
    worker = FakeWorker()
    newcomers.ready.append(worker)
    finding = asyncio.ensure_future(reserve.find())
    await asyncio.sleep(0.01)
    seats.is_free.set()
    await asyncio.sleep(0.01)
    worker.may_answer.set()
    assert await finding is worker  # type: ignore[comparison-overlap]
    assert seats.removed == ["seat"]


async def test_one_whose_answer_nobody_waits_for_any_more_is_ended() -> None:
    reserve, seats, newcomers, ended = made()
    worker = FakeWorker()
    newcomers.ready.append(worker)
    taking = asyncio.ensure_future(reserve.take_newcomer())
    await asyncio.sleep(0.01)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert ended == [worker] and seats.removed == ["its own"]
