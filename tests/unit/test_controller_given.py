"""The pieces that a driver gives to the workers of a live run."""

from __future__ import annotations

import asyncio

import pytest

from raysgd.controller.run import given
from raysgd.controller.run.given import GivenPieces


def test_ranks_that_wait_for_a_piece_get_it_and_may_take_it_again() -> None:
    async def run() -> None:
        pieces = GivenPieces()
        waiting = [asyncio.ensure_future(pieces.take(4)) for _ in range(2)]
        await asyncio.sleep(0)
        await pieces.give(4, ["four"], kept_from=4)
        assert await asyncio.gather(*waiting) == [["four"], ["four"]]
        assert await pieces.take(4) == ["four"]

    asyncio.run(run())


def test_rank_asks_again_for_a_piece_that_has_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "_WAIT_S", 0.01)
    assert asyncio.run(GivenPieces().take(0)) is None


def test_pieces_are_dropped_that_no_checkpoint_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "_WAIT_S", 0.01)

    async def run() -> list[object]:
        pieces = GivenPieces()
        for number in range(4):
            await pieces.give(number, number, kept_from=max(0, number - 1))
        return [await pieces.take(number) for number in range(4)]

    assert asyncio.run(run()) == [None, None, 2, 3]
