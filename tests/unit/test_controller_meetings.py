"""Ranks wait for each other, not for those that have returned, and nobody for ever."""

from __future__ import annotations

import asyncio

from raysgd.controller.meetings import Meetings


async def join(
    meetings: Meetings, rank: int, index: int = 0, payload: bytes | None = None
) -> asyncio.Future[bytes | None]:
    """``rank`` has come to the meeting and waits."""
    task = asyncio.ensure_future(meetings.join(rank, "broadcast", index, payload))
    await asyncio.sleep(0)
    return task


async def test_all_get_what_rank_0_brought_once_all_are_there() -> None:
    meetings = Meetings(3)
    waiting = [await join(meetings, 2), await join(meetings, 0, payload=b"x")]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    waiting.append(await join(meetings, 1))
    assert await asyncio.gather(*waiting) == [b"x"] * 3


async def test_the_meetings_of_a_kind_are_told_apart_by_their_number() -> None:
    meetings = Meetings(2)
    first, second = await join(meetings, 0, 0, b"a"), await join(meetings, 0, 1, b"b")
    assert await meetings.join(1, "broadcast", 1, None) == b"b" == await second
    assert not first.done()
    assert await meetings.join(1, "broadcast", 0, None) == b"a" == await first


async def test_a_rank_that_has_returned_is_not_waited_for() -> None:
    meetings = Meetings(3)
    waiting = [await join(meetings, 0, payload=b"x"), await join(meetings, 1)]
    meetings.left(2)
    assert await asyncio.gather(*waiting) == [b"x", b"x"]


async def test_without_rank_0_there_is_nothing_to_get() -> None:
    meetings = Meetings(2)
    waiting = await join(meetings, 1)
    meetings.left(0)
    assert await waiting == b""


async def test_an_attempt_that_ends_lets_everybody_go() -> None:
    meetings = Meetings(2)
    waiting = await join(meetings, 1)
    meetings.end()
    assert await waiting is None
    assert await meetings.join(0, "broadcast", 0, b"x") is None
