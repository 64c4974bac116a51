"""Who is on the way to an elastic group: as many as it wants, and no more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raysgd.config import ScalingConfig
from raysgd.workers import newcomers as module
from raysgd.workers.newcomers import Newcomers


class FakeSeat:
    """A seat, with its resources or without them."""

    def __init__(self, *, has_room: bool) -> None:
        self._has_room = has_room

    def is_placed(self) -> bool:
        return self._has_room


class FakeSeats:
    """Seats without end."""

    name = "trainer"
    is_given = False

    def __init__(self) -> None:
        self.taken: list[FakeSeat] = []
        self.has_room = True

    def add(self, avoid: set[str]) -> FakeSeat:
        self.taken.append(FakeSeat(has_room=self.has_room))
        return self.taken[-1]

    def take_placed(self, avoid: set[str]) -> None:
        return None

    def remove(self, seat: FakeSeat) -> None:
        self.taken.remove(seat)

    def remove_unplaced(self) -> None:
        return


class FakeWorker:
    """A process that is up when it is told to be."""

    def __init__(self, seat: FakeSeat) -> None:
        self.seat = seat
        self.comes_up = asyncio.Event()
        self.is_ended = False

    async def bring_up(self) -> None:
        await self.comes_up.wait()


class FakeStarter:
    def __init__(self) -> None:
        self.started: list[FakeWorker] = []
        self.is_quick = False

    def start(self, seat: FakeSeat, *, warm_up: bool) -> FakeWorker:
        self.started.append(FakeWorker(seat))
        if self.is_quick:
            self.started[-1].comes_up.set()
        return self.started[-1]


class Cluster:
    """One that is looked at all the time."""

    room = 100


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "may_be_scaled", lambda: False)
    monkeypatch.setattr(module, "cluster_nodes", list)
    monkeypatch.setattr(module, "room_for", lambda bundle, nodes: found.room)
    return found


def made() -> tuple[Newcomers, FakeSeats, FakeStarter]:
    def end(worker: Any) -> None:
        worker.is_ended = True

    seats, starter = FakeSeats(), FakeStarter()
    scaling = ScalingConfig(num_workers=(1, 4))
    bring_up = FakeWorker.bring_up
    newcomers = Newcomers(scaling, seats, starter, bring_up=bring_up, end=end, start_timeout_s=60.0)  # type: ignore[arg-type]
    return newcomers, seats, starter


async def looks() -> None:
    await asyncio.sleep(0.1)


async def test_they_come_up_and_are_taken_once(cluster: Cluster) -> None:
    newcomers, _, starter = made()
    newcomers.want(2, set())
    assert len(starter.started) == 2 and newcomers.num_ready == 0
    for worker in starter.started:
        worker.comes_up.set()
    await looks()
    assert newcomers.num_ready == 2
    assert [newcomers.take(), newcomers.take(), newcomers.take()] == [*starter.started, None]
    newcomers.close()


async def test_no_other_is_looked_for_in_the_place_of_one_who_was_taken(cluster: Cluster) -> None:
    """The group is made ready with it, which takes a while, and wants fewer then."""
    newcomers, seats, starter = made()
    cluster.room, starter.is_quick = 0, True
    newcomers.want(1, set())
    cluster.room = 100
    newcomers.on_ready = lambda: taken.append(newcomers.take())
    taken: list[Any] = []
    await looks()
    assert taken == starter.started and len(starter.started) == 1
    assert [worker.seat for worker in taken] == seats.taken
    newcomers.close()


async def test_those_beyond_what_is_wanted_are_let_go_with_their_seats(cluster: Cluster) -> None:
    newcomers, seats, starter = made()
    newcomers.want(3, set())
    up, *coming = starter.started
    up.comes_up.set()
    await looks()
    newcomers.want(1, set())  # those who are up first
    assert newcomers.all() == [up] and seats.taken == [up.seat]
    assert [worker.is_ended for worker in (up, *coming)] == [False, True, True]
    newcomers.want(0, set())
    await looks()
    assert newcomers.all() == seats.taken == [] and up.is_ended
    assert len(starter.started) == 3


async def test_the_first_group_does_not_wait_for_one_that_hangs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOGETHER_S", 0.05)
    newcomers, _, starter = made()
    newcomers.want(2, set())
    starter.started[0].comes_up.set()
    await asyncio.wait_for(newcomers.settle(), 10)
    assert newcomers.num_ready == 1 and len(newcomers.all()) == 2
    newcomers.close()


async def test_a_seat_whose_room_others_have_taken_is_given_back_though_no_more_are_wanted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNPLACED_S", 0.0)
    newcomers, seats, starter = made()
    seats.has_room = False
    newcomers.want(1, set())
    cluster.room = 0
    await looks()
    assert starter.started[0].is_ended and newcomers.all() == seats.taken == []
    newcomers.close()
