"""All frames of a run, for any number of readers, each at its own pace. Runs in the TrainerActor's event loop.

Readers get reports when a round is complete: one batch for each round, whatever the number of ranks. Recent frames are
held in memory, older reports only in the journal. So slow, late and disconnected readers cost nothing and lose nothing.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal.journal import Journal
from raysgd.controller.rounds import RoundCount


class Pacer:
    """Limits how often a stream flushes. A token bucket: ``burst`` flushes at once, and one more every ``interval_s``.

    The burst lets the batches of all ranks of a round pass together after a pause.
    """

    def __init__(self, interval_s: float, burst: int) -> None:
        self._interval_s = interval_s
        self._burst = burst
        self._tokens = float(burst)
        self._at = float("-inf")

    def spend(self, now: float) -> float:
        """Count the next flush; return the seconds until it is allowed, 0 if it is allowed now."""
        if self._interval_s <= 0:
            return 0.0
        tokens = min(float(self._burst), self._tokens + (now - self._at) / self._interval_s)
        wait_s = max(0.0, 1 - tokens) * self._interval_s
        self._tokens, self._at = max(0.0, tokens - 1), now + wait_s
        return wait_s


#: CPU seconds that a batch costs the controller, and the share of one core for all batches in one direction.
_ITEM_COST_S = 0.0002
_STREAM_SHARE = 0.11
_MAX_INTERVAL_S = 2.0


def stream_interval_s(num_streams: int) -> float:
    """Return the least time between two batches of a stream, if the controller reads or writes ``num_streams`` of them.

    A batch costs it about 0.2 ms of CPU whatever its size, so all streams together are limited to a part of one core.
    """
    return min(_MAX_INTERVAL_S, num_streams * _ITEM_COST_S / _STREAM_SHARE)


#: Reports held in memory for readers.
MEMORY_BYTES = 64 << 20
#: Maximum size of one batch for a reader.
ITEM_BYTES = 4 << 20
#: Batches that a reader may get at once after a pause.
BURST = 4
#: Seconds that reports of an incomplete round wait for the others.
HOLD_S = 0.02


class FrameLog:
    """The numbered sequence of a run's frames.

    A reader that is behind the frames in memory does not get the samples of workers' processes: they are for live displays, and
    a thousand workers send 500 in a second. The journal has them.

    Args:
        journal: Records every frame.
        min_interval_s: Least time between two batches for one reader.
        earlier: For a resumed run: the frames in the journal that are not reports.
        next_seq: The number of the next frame; it may leave a gap after those in the journal.

    Attributes:
        next_seq: As above.
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
        # Older frames other than reports and samples; they are few and small.
        self._kept = [frame for frame in earlier if not frame.is_sample]
        self.next_seq = next_seq
        self._released = next_seq  # frames before this one may go to readers
        self._held: int | None = None  # the last frame of the run, until it is on storage
        self._rounds = RoundCount()
        self._holding: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._grown = asyncio.Event()

    def append(
        self, kind: str, attempt: int, rank: int = -1, data: dict[str, Any] | None = None, rows: bytes = b""
    ) -> None:
        """Add a frame; the arguments are the fields of `Frame`."""
        frame = Frame(self.next_seq, kind, attempt, rank, {} if data is None else data, rows)
        self.next_seq += 1
        self._journal.append(frame)
        self._recent.append(frame)
        self._recent_bytes += frame.size_bytes
        while self._recent_bytes > self._memory_bytes:
            oldest = self._recent.popleft()
            self._recent_bytes -= oldest.size_bytes
            if oldest.kind != frames.REPORTS and not oldest.is_sample:
                self._kept.append(oldest)
        self._is_closed = self._is_closed or (frame.kind == frames.RUN_CLOSED and self._held is None)
        if self._rounds.feed(frame):
            self._release()
        elif self._holding is None:
            self._holding = asyncio.get_running_loop().call_later(HOLD_S, self._release)

    async def close(self, attempt: int, flush: Callable[[], Awaitable[Any]]) -> None:
        """Add the last frame; readers get it when it is on storage, so that nothing is written any more when they read the files.

        An object is replaced as a whole on an object store, but a file on a remote disk is empty while it is written again.
        """
        self._held = self.next_seq
        self.append(frames.RUN_CLOSED, attempt)
        try:
            await flush()
        finally:
            self._held, self._is_closed = None, True
            self._release()

    @property
    def iteration(self) -> int:
        """The last complete round, counted from the run's beginning."""
        return self._rounds.iteration

    async def read(self, seq: int) -> AsyncIterator[list[Frame]]:
        """Yield the frames from ``seq`` on, as they come, until the run is closed."""
        loop = asyncio.get_running_loop()
        pacer = Pacer(self._min_interval_s, BURST)
        while True:
            while seq >= self._released:
                if self._is_closed:
                    return
                self._grown.clear()
                await self._grown.wait()
            if not self._is_closed and (wait_s := pacer.spend(loop.time())) > 0:
                await asyncio.sleep(wait_s)
            first = self._recent[0].seq if self._recent else self.next_seq
            if seq < first:
                batch = await loop.run_in_executor(None, self._from_journal, seq, first)
            else:
                end = len(self._recent) if self._held is None else self._held - first
                batch = _take_batch(map(self._recent.__getitem__, range(seq - first, end)))
            seq = (
                batch[-1].seq + 1 if batch else first
            )  # none: the journal's last frame is not the one before the first here
            if batch:
                yield batch

    def _release(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        self._released = self.next_seq if self._held is None else self._held
        self._grown.set()

    def _from_journal(self, seq: int, before: int) -> list[Frame]:
        kept = [frame for frame in self._kept if seq <= frame.seq < before]
        return _take_batch(heapq.merge(kept, self._journal.frames_from(seq, before), key=lambda frame: frame.seq))


def _take_batch(found: Iterable[Frame]) -> list[Frame]:
    """Return the first frames, up to `ITEM_BYTES`."""
    batch, size = [], 0
    for frame in found:
        batch.append(frame)
        size += frame.size_bytes
        if size >= ITEM_BYTES:
            break
    return batch
