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
    monkeypatch.setattr(module, "placement_group_table", lambda placement: {"state": "CREATED"})
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


def test_a_seat_that_is_nowhere_any_more_is_taken_only_by_those_who_can_wait() -> None:
    class Somewhere(FakeSeat):
        nodes = ("node",)

    class Nowhere(FakeSeat):
        nodes = ("",)

    seats = Seats("trainer", {"CPU": 1}, "PACK")
    nowhere, somewhere = Nowhere(cast(Any, "first"), 0), Somewhere(cast(Any, "first"), 1)
    seats._free = [nowhere, somewhere]
    assert seats.take({"node"}, is_somewhere=True) is None
    assert seats.take(is_somewhere=True) is somewhere
    assert seats.take(is_somewhere=True) is None
    assert seats.take({"lost"}) is nowhere


def test_a_seat_of_a_group_that_is_to_be_spread_is_sought_where_no_other_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = {"first": {0: "a", 1: "b", 2: "c"}, "beyond": {0: "d"}, "lost": {0: ""}}
    monkeypatch.setattr(module, "placement_group_table", lambda placement: {"bundles_to_node_id": nodes[placement]})
    for strategy, avoided in [("STRICT_SPREAD", {"z", "a", "c", "d"}), ("SPREAD", {"z"}), ("PACK", {"z"})]:
        seats = Seats("trainer", {"CPU": 1}, strategy)
        seats._placements = [cast(Any, name) for name in nodes]
        seats._free = [Seat(cast(Any, "first"), 1)]
        asked: list[Any] = []

        def add(avoid: Any, asked: list[Any] = asked) -> Seat:
            asked.append(set(avoid))
            return FakeSeat(cast(Any, "added"), 0)

        seats.add = add  # type: ignore[method-assign]
        asyncio.run(seats.find({"z"}))
        assert asked == [avoided]


TABLE = {
    "asked": {"state": "PENDING", "stats": {"scheduling_state": "QUEUED"}},
    "reserved": {"state": "PREPARED", "stats": {"scheduling_state": "QUEUED"}},
    "there": {"state": "CREATED", "stats": {"scheduling_state": "FINISHED"}},
    "waits": {"state": "PENDING", "stats": {"scheduling_state": "NO_RESOURCES"}},
    "too large": {"state": "PENDING", "stats": {"scheduling_state": "INFEASIBLE"}},
    "lost": {"state": "RESCHEDULING", "stats": {"scheduling_state": "FAILED_TO_COMMIT_RESOURCES"}},
}


def test_each_time_the_first_ones_have_another_name(removed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The group before may be there still, as one whose node is lost, and Ray gives no name twice."""
    names: list[str] = []
    monkeypatch.setattr(module, "placement_group", lambda bundles, strategy, name: names.append(name))
    seats = Seats("trainer", {"CPU": 1}, "PACK")
    for _ in range(3):
        seats.open(2)
        seats.close()
    assert len(set(names)) == 3
    assert names[0] == "trainer" and all(name.startswith("trainer-") for name in names[1:])


class InTurn:
    """What Ray tells of a placement group, look by look; the last of it for ever."""

    def __init__(self, *states: str) -> None:
        self.states = list(states)

    def __call__(self, placement: Any) -> dict[str, Any]:
        return TABLE[self.states.pop(0) if len(self.states) > 1 else self.states[0]]


def seats_beside(*placements: str) -> Seats:
    seats = Seats("trainer", {"CPU": 1}, "PACK")
    seats._placements = [cast(Any, name) for name in placements]
    return seats


@pytest.mark.parametrize("state", ["there", "waits", "too large", "lost"])
def test_resources_that_no_node_is_just_reserving_are_given_back_at_once(
    removed: list[Any], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(module, "placement_group_table", InTurn(state))
    seats_beside("first", "second").close()
    assert removed == ["first", "second"]


@pytest.mark.parametrize("last", ["there", "waits"])
def test_resources_that_are_just_being_reserved_are_given_back_when_they_are(
    removed: list[Any], monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Ray loses them otherwise."""
    monkeypatch.setattr(module, "placement_group_table", told := InTurn("asked", "asked", "reserved", last))

    async def give_up() -> None:
        seats = seats_beside("first", "added")
        seats.give_up(Seat(cast(Any, "added"), 0))
        assert removed == []
        await seats.removed()
        assert removed == ["added"] and told.states == [last]

    asyncio.run(give_up())


def test_resources_that_never_come_are_given_back_all_the_same(
    removed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "placement_group_table", InTurn("asked"))
    monkeypatch.setattr(module, "_SETTLE_S", 0.02)

    async def close() -> None:
        seats = seats_beside("first")
        seats.close()
        await seats.removed()

    asyncio.run(close())
    assert removed == ["first"]
