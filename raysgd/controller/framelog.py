"""All frames of a run, for any number of readers, each at its own pace. Runs in the TrainerActor's event loop.

A reader is told when a round is whole, not of each rank's part of it: one batch a round, whatever the number of ranks.
Recent frames are held in memory, older reports only in the journal: a reader that is slow, or comes late, or went away,
costs nothing and loses nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from raysgd._util.pacing import Pacer
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal import Journal
from raysgd.controller.round_count import RoundCount

#: Reports held in memory for readers.
MEMORY_BYTES = 64 << 20
#: What one item of a reader's stream holds at most.
ITEM_BYTES = 4 << 20
#: Items a reader gets at once after a pause.
BURST = 4
#: Seconds that reports of an incomplete round wait for the others.
HOLD_S = 0.02


class FrameLog:
    """The numbered sequence of a run's frames.

    Args:
        journal: Takes every frame down.
        min_interval_s: Least time between two items of one reader's stream.
        earlier: Of a run that goes on here: the frames in the journal that are no reports.
        next_seq: The number of the next frame; it may leave a gap after those in the journal.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        min_interval_s: float,
        memory_bytes: int = MEMORY_BYTES,
        earlier: Iterable[Frame] = (),
        next_seq: int = 0,
    ) -> None:
        self._journal = journal
        self._min_interval_s = min_interval_s
        self._memory_bytes = memory_bytes
        self._recent: deque[Frame] = deque()
        self._recent_bytes = 0
        self._kept = list(earlier)  # of the frames that left memory, those that are no reports: few and small
        self._next_seq = next_seq
        self._released = next_seq  # frames before this one may go to readers
        self._rounds = RoundCount()
        self._holding: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._grown = asyncio.Event()

    def append(self, make: Callable[[int], Frame]) -> None:
        """Add the frame ``make(seq)``."""
        frame = make(self._next_seq)
        self._next_seq += 1
        self._journal.append(frame)
        self._recent.append(frame)
        self._recent_bytes += frame.size_bytes
        while self._recent_bytes > self._memory_bytes:
            oldest = self._recent.popleft()
            self._recent_bytes -= oldest.size_bytes
            if oldest.kind != frames.REPORTS:
                self._kept.append(oldest)
        self._is_closed = self._is_closed or frame.kind == frames.RUN_CLOSED
        if self._rounds.feed(frame):
            self._release()
        elif self._holding is None:
            self._holding = asyncio.get_running_loop().call_later(HOLD_S, self._release)

    @property
    def iteration(self) -> int:
        """The last round that is whole, counted from the run's beginning."""
        return self._rounds.iteration

    async def read(self, seq: int) -> AsyncIterator[list[Frame]]:
        """Frames from ``seq`` on, as they come, until the run is closed."""
        loop = asyncio.get_running_loop()
        pacer = Pacer(self._min_interval_s, BURST)
        while True:
            while seq >= self._released:
                if self._is_closed:
                    return
                self._grown.clear()
                await self._grown.wait()
            if (wait_s := pacer.wait_s(loop.time())) > 0 and not self._is_closed:
                await asyncio.sleep(wait_s)
            batch = await self._batch(seq)
            if not batch:  # nothing between the journal's last frame and the first here
                seq = self._first_in_memory
                continue
            seq = batch[-1].seq + 1
            pacer.spend(loop.time())
            yield batch

    def _release(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        self._released = self._next_seq
        self._grown.set()

    @property
    def _first_in_memory(self) -> int:
        return self._recent[0].seq if self._recent else self._next_seq

    async def _batch(self, seq: int) -> list[Frame]:
        first_in_memory = self._first_in_memory
        if seq < first_in_memory:
            return await asyncio.get_running_loop().run_in_executor(None, self._from_journal, seq, first_in_memory)
        batch: list[Frame] = []
        size = 0
        for index in range(seq - first_in_memory, len(self._recent)):
            frame = self._recent[index]
            batch.append(frame)
            size += frame.size_bytes
            if size >= ITEM_BYTES:
                break
        return batch

    def _from_journal(self, seq: int, before: int) -> list[Frame]:
        batch: list[Frame] = []
        size = 0
        kept = [frame for frame in self._kept if seq <= frame.seq < before]
        for frame in self._journal.frames_from(seq, before):
            while kept and kept[0].seq < frame.seq:
                batch.append(kept.pop(0))
            batch.append(frame)
            size += frame.size_bytes
            if size >= ITEM_BYTES:
                return batch
        return batch + kept
