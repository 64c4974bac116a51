"""Fast, slow and late readers of the frames of a run: each gets all frames, and none affects the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal import frame_log as framelog
from raysgd.controller.journal.frame_log import BURST, ITEM_BYTES, FrameLog
from raysgd.controller.journal.journal import Journal
from support.poll import turn_loop

TINY = 1000  # bytes of memory, enough for two or three frames


class CountingJournal(Journal):
    """A journal that records which frames readers fetched."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.fetched: list[int] = []

    def frames_from(self, seq: int, before: int) -> Iterator[Frame]:
        for frame in super().frames_from(seq, before):
            self.fetched.append(frame.seq)
            yield frame


@pytest.fixture
def journal(tmp_path: Path) -> CountingJournal:
    return CountingJournal(Storage.from_uri(tmp_path))


def make_log(journal: Journal, memory_bytes: int = TINY, min_interval_s: float = 0.0) -> FrameLog:
    return FrameLog(journal, min_interval_s=min_interval_s, memory_bytes=memory_bytes)


def report(log: FrameLog, num_bytes: int = 100) -> None:
    rows = json.dumps([[0.0, 0.0, {"x": "x" * num_bytes}]]).encode()
    seq = log.next_seq
    log.append(frames.REPORTS, 1, seq % 3, {"first": seq, "count": 1}, rows)


def say(log: FrameLog, kind: str) -> None:
    log.append(kind, 1, -1, {"seq": log.next_seq})


def close(log: FrameLog) -> None:
    say(log, frames.RUN_CLOSED)


def fill(log: FrameLog, num_frames: int = 20) -> None:
    """Append reports with some other frames among them, and the end."""
    for number in range(num_frames - 1):
        if number % 5 == 0:
            say(log, frames.CHECKPOINT)
        else:
            report(log)
    close(log)


async def read(log: FrameLog, seq: int = 0) -> list[Frame]:
    return [frame async for batch in log.read(seq) for frame in batch]


# -- one reader --------------------------------------------------------------------------------------------------------


async def test_reader_gets_every_frame_in_order(journal: CountingJournal) -> None:
    log = make_log(journal, memory_bytes=1 << 20)
    fill(log)
    got = await read(log)
    assert [frame.seq for frame in got] == list(range(20))
    assert got[-1].kind == frames.RUN_CLOSED
    assert journal.fetched == []


async def test_reader_gets_frames_as_they_arrive(journal: CountingJournal) -> None:
    log = make_log(journal)
    stream = log.read(0)
    for _ in range(3):
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not waiting.done()
        report(log)
        report(log)
        assert len(await waiting) == 2
    close(log)
    assert [frame.kind for frame in await anext(stream)] == [frames.RUN_CLOSED]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("seq", range(21))
async def test_late_reader_gets_the_same_frames_from_any_number(
    journal: CountingJournal, tmp_path: Path, seq: int
) -> None:
    roomy, tight = make_log(journal, memory_bytes=1 << 20), make_log(Journal(Storage.from_uri(tmp_path / "tight")))
    (tmp_path / "tight").mkdir()
    fill(roomy)
    fill(tight)
    assert await read(tight, seq) == (await read(roomy))[seq:]


async def test_reader_may_begin_at_a_future_frame(journal: CountingJournal) -> None:
    log = make_log(journal)
    reading = asyncio.ensure_future(read(log, 2))
    for _ in range(4):
        await asyncio.sleep(0)
        report(log)
    close(log)
    assert [frame.seq for frame in await reading] == [2, 3, 4]


async def test_reader_that_begins_after_the_end_gets_nothing(journal: CountingJournal) -> None:
    log = make_log(journal)
    close(log)
    assert await read(log, 5) == []


async def test_waiting_reader_gets_the_last_frame(journal: CountingJournal) -> None:
    log = make_log(journal)
    reading = asyncio.ensure_future(read(log))
    await asyncio.sleep(0)
    close(log)
    assert [frame.kind for frame in await reading] == [frames.RUN_CLOSED]


async def test_last_frame_arrives_when_it_is_on_storage_and_the_others_before(journal: CountingJournal) -> None:
    log = make_log(journal, memory_bytes=1 << 20)
    is_written = asyncio.Event()
    report(log)
    stream = log.read(0)
    closing = asyncio.ensure_future(log.close(1, is_written.wait))
    await asyncio.sleep(0)
    say(log, frames.EVENT)  # a late warning
    assert [frame.kind for frame in await anext(stream)] == [frames.REPORTS]
    waiting = asyncio.ensure_future(anext(stream))
    late = asyncio.ensure_future(read(log, 1))
    await turn_loop()
    assert not waiting.done() and not late.done()
    is_written.set()
    await closing
    assert [frame.kind for frame in await waiting] == [frames.RUN_CLOSED, frames.EVENT]
    assert [frame.seq for frame in await late] == [1, 2]


async def test_last_frame_arrives_although_it_cannot_be_written(journal: CountingJournal) -> None:
    async def fail() -> None:
        raise OSError("disk full")

    log = make_log(journal)
    with pytest.raises(OSError, match="disk full"):
        await log.close(1, fail)
    assert [frame.kind for frame in await read(log)] == [frames.RUN_CLOSED]


# -- several readers ---------------------------------------------------------------------------------------------------


async def test_slow_reader_delays_nobody_and_misses_nothing(journal: CountingJournal) -> None:
    log = make_log(journal)
    slow = log.read(0)
    report(log)
    got = await anext(slow)
    fill(log, 200)  # while the reader is busy
    assert len(await read(log)) == 201
    async for batch in slow:
        got += batch
    assert [frame.seq for frame in got] == list(range(201))
    assert journal.fetched


async def test_reader_that_leaves_does_not_affect_others(journal: CountingJournal) -> None:
    log = make_log(journal)
    leaving, staying = asyncio.ensure_future(read(log)), asyncio.ensure_future(read(log))
    await asyncio.sleep(0)
    leaving.cancel()
    fill(log)
    assert len(await staying) == 20


async def test_all_waiting_readers_get_a_frame(journal: CountingJournal) -> None:
    log = make_log(journal, memory_bytes=1 << 20)
    readers = [asyncio.ensure_future(read(log)) for _ in range(5)]
    for _ in range(10):
        await asyncio.sleep(0)
        report(log)
    close(log)
    assert [len(got) for got in await asyncio.gather(*readers)] == [11] * 5


# -- memory ------------------------------------------------------------------------------------------------------------


async def test_old_reports_are_read_from_the_journal(journal: CountingJournal) -> None:
    log = make_log(journal)
    fill(log, 20)
    await read(log)
    assert 0 < len(journal.fetched) < 20
    assert journal.fetched == sorted(set(journal.fetched))
    assert all(seq % 5 for seq in journal.fetched)  # frames other than reports stay in memory
    assert max(journal.fetched) < 19


async def test_reader_that_is_behind_gets_no_samples_but_all_other_frames(journal: CountingJournal) -> None:
    log = make_log(journal)
    for kind in ("warning", "sample"):
        data = {"kind": kind, "timestamp": 0.0, "data": {}}
        log.append(frames.EVENT, 1, data=data)
    fill(log)
    assert [frame.seq for frame in await read(log)] == [0, *range(2, 22)]


async def test_frame_larger_than_the_memory_limit_is_read(journal: CountingJournal) -> None:
    log = make_log(journal)
    report(log, num_bytes=5 * TINY)
    close(log)
    got = await read(log)
    assert [frame.kind for frame in got] == [frames.REPORTS, frames.RUN_CLOSED]
    assert len(got[0].rows) > 5 * TINY


@pytest.mark.parametrize("memory_bytes", [TINY, 1 << 30])
async def test_batches_for_a_reader_are_bounded(journal: CountingJournal, memory_bytes: int) -> None:
    log = make_log(journal, memory_bytes)
    for _ in range(5):
        report(log, num_bytes=ITEM_BYTES * 2 // 5)
    close(log)
    sizes = [sum(frame.size_bytes for frame in batch) async for batch in log.read(0)]
    assert len(sizes) >= 2
    assert max(sizes) < ITEM_BYTES * 1.5


async def test_frames_that_arrive_during_a_journal_read_are_not_lost(journal: CountingJournal) -> None:
    log = make_log(journal)
    for _ in range(50):
        report(log)
    got: list[Frame] = []
    is_closed = False
    async for batch in log.read(0):
        got += batch
        if len(got) < 500:
            for _ in range(40):
                report(log)
        elif not is_closed:
            is_closed = True
            close(log)
    assert [frame.seq for frame in got] == list(range(len(got)))


# -- pace --------------------------------------------------------------------------------------------------------------


async def test_batches_after_a_burst_keep_the_minimum_interval(journal: CountingJournal) -> None:
    log = make_log(journal, min_interval_s=0.05)
    loop, stream = asyncio.get_running_loop(), log.read(0)
    began = loop.time()
    for _ in range(BURST):
        report(log)
        assert len(await anext(stream)) == 1
    report(log)
    report(log)
    assert len(await anext(stream)) == 2
    assert loop.time() - began >= 0.045


async def test_closed_run_is_read_without_pauses(journal: CountingJournal) -> None:
    log = make_log(journal, min_interval_s=3600)
    fill(log, 40)
    assert len(await asyncio.wait_for(read(log), timeout=30)) == 40


# -- rounds ------------------------------------------------------------------------------------------------------------


def begin(log: FrameLog, world_size: int) -> None:
    data = {"attempt": 1, "world_size": world_size, "iterations_before": 0, "time_before_s": 0.0}
    log.append(frames.ATTEMPT, 1, data=data)


def report_of(log: FrameLog, rank: int) -> None:
    log.append(frames.REPORTS, 1, rank, {"first": 0, "count": 1}, b"[[0.0,0.0,{}]]")


def test_reader_gets_a_round_in_one_batch(journal: CountingJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framelog, "HOLD_S", 3600.0)

    async def go() -> None:
        log = make_log(journal, memory_bytes=1 << 20)
        begin(log, 3)
        reader = log.read(0)
        assert [frame.kind for frame in await anext(reader)] == [frames.ATTEMPT]
        item = asyncio.ensure_future(anext(reader))
        for rank in (2, 0):
            report_of(log, rank)
            await turn_loop()
            assert not item.done()
        report_of(log, 1)
        assert [frame.rank for frame in await item] == [2, 0, 1]

    asyncio.run(go())


def test_slow_rank_delays_the_reports_of_others_only_briefly(journal: CountingJournal) -> None:
    async def go() -> None:
        log = make_log(journal, memory_bytes=1 << 20)
        begin(log, 2)
        reader = log.read(0)
        await anext(reader)
        report_of(log, 0)
        assert [frame.rank for frame in await asyncio.wait_for(anext(reader), 20)] == [0]

    asyncio.run(go())
