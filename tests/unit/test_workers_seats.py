"""Where there is room for one process and two ask for it: the seat that Ray moves itself, and the one that was asked for."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from raysgd.workers import seats as module
from raysgd.workers.seats import Seat, Seats


class FakeSeat(Seat):
    """One whose placement is told by how often it was looked at."""

    looks = 0
    placed_at = 0
    nodes = ("elsewhere",)

    def is_placed(self) -> bool:
        type(self).looks += 1
        return self.looks > self.placed_at

    def node_id(self) -> str:
        return self.nodes[min(self.looks, len(self.nodes) - 1)]


class Never(FakeSeat):
    placed_at = 1_000_000


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The placement groups that were removed."""
    found: list[Any] = []
    monkeypatch.setattr(module, "remove_placement_group", found.append)
    monkeypatch.setattr(module, "_LOOK_S", 0.001)
    return found


def seats_with(free: Seat, added: Seat) -> Seats:
    seats = Seats("trainer", {"CPU": 1}, "PACK")
    seats._placements = [free.placement]
    seats._free = [free]

    def add(avoid: Any = ()) -> Seat:
        assert avoid == {"lost"}
        seats._placements.append(added.placement)
        return added

    seats.add = add  # type: ignore[method-assign]
    return seats


def test_the_one_that_was_asked_for(removed: list[Any]) -> None:
    class OfTheLostNode(FakeSeat):
        nodes = ("lost",)

    class Soon(FakeSeat):
        placed_at = 3

    added = Soon(cast(Any, "added"), 0)
    seats = seats_with(OfTheLostNode(cast(Any, "first"), 0), added)
    assert asyncio.run(seats.find({"lost"})) is added
    assert removed == []


def test_the_one_that_ray_has_moved_takes_the_only_room(removed: list[Any]) -> None:
    """Ray found out that the node is lost right after one more seat was asked for, which is never placed then."""

    class Moved(FakeSeat):
        nodes = ("lost", "lost", "lost", "elsewhere")

    moved = Moved(cast(Any, "first"), 1)
    seats = seats_with(moved, Never(cast(Any, "added"), 0))
    assert asyncio.run(seats.find({"lost"})) is moved
    assert removed == ["added"] and seats._free == []


def test_who_waits_no_longer_leaves_no_seat_behind(removed: list[Any]) -> None:
    class NeverMoved(Never):
        nodes = ("lost",)

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(seats.find({"lost"}), 0.05)

    seats = seats_with(NeverMoved(cast(Any, "first"), 0), Never(cast(Any, "added"), 0))
    asyncio.run(give_up())
    assert removed == ["added"]
