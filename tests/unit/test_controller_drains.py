"""Which draining nodes a run hears of, and how often."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raysgd.controller import drains
from raysgd.controller.drains import DrainWatch

Told = list[tuple[tuple[int, ...], float | None]]


class Fleet:
    """Ranks on draining nodes, one look after the other; the last one stays."""

    def __init__(self, *looks: dict[int, float | None]) -> None:
        self.looks = list(looks)
        self.is_over = asyncio.Event()

    async def ranks(self) -> dict[int, float | None]:
        if len(self.looks) == 1:
            self.is_over.set()
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


async def told_of(*looks: dict[int, float | None], monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr(drains, "LOOK_S", 0)
    fleet: Any = Fleet(*looks)
    told: Told = []
    watch = asyncio.ensure_future(DrainWatch(fleet, lambda *what: told.append(what)).run())
    await fleet.is_over.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    watch.cancel()
    return told


async def test_ranks_of_a_node_are_told_together_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = await told_of({}, {1: 60.0, 2: 60.0}, {1: 58.0, 2: 58.0}, {}, monkeypatch=monkeypatch)
    assert told == [((1, 2), 60.0)]


async def test_a_node_that_follows_and_one_without_a_deadline_are_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    told = await told_of({1: 60.0}, {0: None, 1: 58.0, 3: 5.0}, monkeypatch=monkeypatch)
    assert told == [((1,), 60.0), ((0,), None), ((3,), 5.0)]
