"""Ranks wait for each other at a barrier, but not for ranks that have returned."""

from __future__ import annotations

import asyncio
import pickle

from raysgd.controller.run.barriers import Barriers


async def join(
    barriers: Barriers, rank: int, index: int = 0, payload: bytes | None = None
) -> asyncio.Future[bytes | None]:
    """Let ``rank`` wait at the barrier."""
    task = asyncio.ensure_future(barriers.join(rank, "broadcast", index, payload))
    await asyncio.sleep(0)
    return task


async def test_all_ranks_get_rank_0s_payload() -> None:
    barriers = Barriers(3)
    waiting = [await join(barriers, 2), await join(barriers, 0, payload=b"x")]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    waiting.append(await join(barriers, 1))
    assert await asyncio.gather(*waiting) == [b"x"] * 3


async def test_barriers_of_a_kind_are_distinguished_by_their_index() -> None:
    barriers = Barriers(2)
    first, second = await join(barriers, 0, 0, b"a"), await join(barriers, 0, 1, b"b")
    assert await barriers.join(1, "broadcast", 1, None) == b"b" == await second
    assert not first.done()
    assert await barriers.join(1, "broadcast", 0, None) == b"a" == await first


async def test_rank_that_has_returned_is_not_waited_for() -> None:
    barriers = Barriers(3)
    waiting = [await join(barriers, 0, payload=b"x"), await join(barriers, 1)]
    barriers.left(2)
    assert await asyncio.gather(*waiting) == [b"x", b"x"]


async def test_barrier_without_rank_0_gives_an_empty_payload() -> None:
    barriers = Barriers(2)
    waiting = await join(barriers, 1)
    barriers.left(0)
    assert await waiting == b""


async def test_rank_whose_answer_was_lost_asks_again_before_and_after_the_others_have_come() -> None:
    barriers = Barriers(2)
    lost, again = await join(barriers, 1, 3), await join(barriers, 1, 3)
    lost.cancel()
    await asyncio.sleep(0)
    assert await barriers.join(0, "broadcast", 3, b"x") == b"x" == await again
    assert await barriers.join(1, "broadcast", 3, None) == b"x"
    barriers.end()
    assert await barriers.join(1, "broadcast", 3, None) is None


async def test_end_of_the_attempt_releases_all_ranks() -> None:
    barriers = Barriers(2)
    waiting = await join(barriers, 1)
    barriers.end()
    assert await waiting is None
    assert await barriers.join(0, "broadcast", 0, b"x") is None


async def test_gather_returns_the_payloads_of_the_ranks_that_have_not_returned() -> None:
    barriers = Barriers(3)
    barriers.left(1)
    waiting = [asyncio.ensure_future(barriers.join(rank, "gather", 0, bytes([rank]))) for rank in (2, 0)]
    answers = await asyncio.gather(*waiting)
    assert [pickle.loads(answer or b"") for answer in answers] == [{0: b"\x00", 2: b"\x02"}] * 2
