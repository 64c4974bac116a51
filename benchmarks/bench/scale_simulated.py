"""The controller's loop with simulated workers: ``python -m bench.scale_simulated WORKERS SECONDS OUT FOLDER``.

The process holds only a `Run` with a fake worker group, and one reader of its frames. The fake workers report at 10 Hz and send
a batch when a real one would: at once after a pause, and otherwise once per ``flush_interval_s``. Their own cost is measured
first, without a controller, and subtracted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.results import quantile
from raysgd.backends.base import Member
from raysgd.checkpoint.storage.storage import Storage
from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import frames
from raysgd.controller.journal.frame_log import stream_interval_s
from raysgd.controller.requests import RunRequest
from raysgd.controller.run.executor import Run
from raysgd.result import RunInfo
from raysgd.session.events import Reports, Returned
from raysgd.session.progress import Heartbeat
from raysgd.workers.orders import AttemptOrder, WorkerInfo, WorkerTask

HZ = 10
_ROW = '[%r,%r,{"loss":0.123456789,"accuracy":0.987654321,"step":%d}]'


class FakeGroup:
    """Stands in for `raysgd.workers.group.group.WorkerGroup`, without processes."""

    def __init__(self, num_workers: int, num_reports: int) -> None:
        self.size = num_workers
        self._num_reports = num_reports
        #: The time of each report, by rank.
        self.made: list[list[float]] = [[] for _ in range(num_workers)]
        self.num_items = 0
        self.agreement: Any = None  # no stop is requested
        self.memory: Any = None  # there are no checkpoints

    @property
    def monitor(self) -> FakeGroup:
        return self

    def expect(self, size: int) -> None:
        pass

    def release(self) -> None:
        pass

    async def heartbeat(self, rank: int) -> Heartbeat:
        return Heartbeat()

    async def check_processes(self, ranks: list[int], timeout_s: float) -> dict[int, Any]:
        return {}

    async def stacks(self, timeout_s: float) -> dict[int, str]:
        return {}

    async def collectives(self, ranks: Sequence[int], folder: str, timeout_s: float) -> dict[int, Any]:
        return {}

    @property
    def drains(self) -> Any:
        return self

    async def ranks(self) -> dict[int, float | None]:
        return {}

    @property
    def num_joining(self) -> int:
        return 0

    def on_joining_worker(self, callback: Callable[[], None]) -> None:
        return None

    async def get_ready(self, *, keep_size: bool = False) -> list[str]:
        return []

    async def check_storage(self, storage: Storage) -> None:
        return None

    async def open_rendezvous(self) -> str:
        return ""

    def info(self, rank: int) -> WorkerInfo:
        return WorkerInfo("node", "127.0.0.1", "simulated", 0)

    def member(self, rank: int, rendezvous: str) -> Member:
        return Member(rank, self.size, rank, self.size, 0, rendezvous, "127.0.0.1", False)

    async def run(self, rank: int, run: Any, order: AttemptOrder) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        made = self.made[rank]
        begin = loop.time() + rank / self.size / HZ  # spread over one period
        flushed_at, sent = float("-inf"), 0
        while sent < self._num_reports:
            due = begin + sent / HZ
            await asyncio.sleep(max(due, flushed_at + order.flush_interval_s) - loop.time())
            flushed_at = loop.time()
            ready = min(self._num_reports, int((flushed_at - begin) * HZ) + 1)
            now, zero = time.time(), flushed_at
            rows = []
            for number in range(sent, ready):
                made.append(now - (zero - begin - number / HZ))
                rows.append(_ROW % (made[-1], number / HZ, number))
            yield [Reports(sent, ready - sent, ("[" + ",".join(rows) + "]").encode())]
            self.num_items += 1
            sent = ready
        yield [Returned(b"", 0)]

    def end(self, rank: int, attempt: int, why: str) -> None:
        return None

    async def leave(self) -> None:
        return None

    def kill(self, rank: int, *, is_lost: bool = False) -> None:
        return None


async def cost_of_the_fakes(num_workers: int, num_reports: int) -> float:
    """Return the CPU seconds of the fake workers without a controller."""
    group = FakeGroup(num_workers, num_reports)

    async def drain(slot: int) -> None:
        order = AttemptOrder(1, group.member(slot, ""), None, 1, 0, 0.0, stream_interval_s(num_workers))
        async for _ in group.run(slot, None, order):
            pass

    return await _cpu_of(lambda: _all([drain(slot) for slot in range(num_workers)]))


async def cost_of_a_run(num_workers: int, num_reports: int, folder: str) -> dict[str, Any]:
    """Measure a run of the fake workers with a reader like a driver's."""
    group = FakeGroup(num_workers, num_reports)
    run = Run(
        RunRequest(WorkerTask("run", b""), folder, {}),
        RunInfo("run", folder, {}, num_workers, "none"),
        group,
        Storage.from_uri(folder),
        failure=FailureConfig(),
        checkpoint=CheckpointConfig(),
        share=lambda order: order,
    )
    latencies: list[float] = []
    num_seen = 0

    async def read() -> None:
        nonlocal num_seen
        async for batch in run.log.read(0):
            now = time.time()
            for frame in batch:
                if frame.kind == frames.REPORTS:
                    first, count = frame.data["first"], frame.data["count"]
                    num_seen += count
                    if frame.rank in (0, num_workers - 1):  # two ranks are enough
                        latencies.extend(now - made for made in group.made[frame.rank][first : first + count])

    process = psutil.Process()
    memory = process.memory_info().rss
    begun = time.monotonic()
    cpu = await _cpu_of(lambda: _all([run.execute(), read()]))
    took = time.monotonic() - begun
    expected = num_workers * num_reports
    if num_seen != expected:
        raise RuntimeError(f"{num_seen} of {expected} reports came out")
    return {
        "cpu_s": cpu,
        "took_s": took,
        "reports": num_seen,
        "items": group.num_items,
        "memory_growth_mib": (process.memory_info().rss - memory) / 2**20,
        "latencies": latencies,
    }


async def measure(num_workers: int, seconds: float, folder: str) -> dict[str, Any]:
    num_reports = max(2, round(seconds * HZ))
    fakes_s = await cost_of_the_fakes(num_workers, num_reports)
    run = await cost_of_a_run(num_workers, num_reports, folder)
    net = max(run["cpu_s"] - fakes_s, 0.0)
    return {
        "workers": num_workers,
        "seconds": run["took_s"],
        "reports_per_s": run["reports"] / run["took_s"],
        "items_per_s": run["items"] / run["took_s"],
        "cpu_s": net,
        "cpu_of_the_fakes_s": fakes_s,
        "cpu_share": net / run["took_s"],
        "cpu_per_report_s": net / run["reports"],
        "memory_growth_mib": run["memory_growth_mib"],
        "latency_p50_s": quantile(run["latencies"], 0.5),
        "latency_p99_s": quantile(run["latencies"], 0.99),
    }


async def _cpu_of(work: Callable[[], Coroutine[Any, Any, None]]) -> float:
    start = time.process_time()
    await work()
    return time.process_time() - start


async def _all(work: list[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*work)


def main(num_workers: str, seconds: str, out: str, folder: str) -> None:
    found = asyncio.run(measure(int(num_workers), float(seconds), folder))
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
