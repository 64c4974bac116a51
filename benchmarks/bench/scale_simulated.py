"""The controller with simulated workers: ``python -m bench.scale_simulated WORKERS SECONDS OUT FOLDER [HZ SAVE_EVERY_S]``.

This process has what a TrainerActor has: a `Run`, a `WorkerGroup`, the listener and the connections of all workers, but no
Ray. The workers are in another process, a driver in a third one: see `bench.scale_peers`. All workers report in step. After the
measured seconds one worker dies, and the group shrinks. All CPU seconds are of this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.machine import ROOT
from bench.results import quantile
from bench.scale_group import KIND as CALLS
from bench.scale_group import Calls, Formed, SimulatedGroup, without_ray
from raysgd.checkpoint.storage.storage import Storage
from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller.journal import frame_streams as downlink
from raysgd.controller.requests import RunRequest
from raysgd.controller.run.executor import Run
from raysgd.result import Event, RunInfo
from raysgd.transport import Endpoint, Listener
from raysgd.workers import events_connection as uplink
from raysgd.workers.orders import WorkerTask

#: Seconds before the measured ones, in which all workers connect.
_WARM_UP_S = 2.0
_POLL_S = 0.02
#: Rounds that are measured at least, also on a machine that is busy with other work.
_FEWEST_ROUNDS = 4
_TIMEOUT_S = 120.0


class Controller:
    """A run with simulated workers, and its connections."""

    def __init__(self, calls: Calls, num_workers: int, folder: Path) -> None:
        self.calls = calls
        failure = FailureConfig()
        self.group = SimulatedGroup(self.calls, (num_workers - 1, num_workers) if num_workers > 1 else 1, failure)
        self.listener = Listener(
            {
                CALLS: self.calls.serve,
                uplink.KIND: self.group.streams.inboxes.handle,
                downlink.KIND: partial(downlink.serve_frames, self._stream),
            }
        )
        self.commits: dict[int, float] = {}
        self.run = Run(
            RunRequest(WorkerTask("run", b""), str(folder), {}),
            RunInfo("run", str(folder), {}, num_workers, "none"),
            self.group,
            Storage.from_uri(str(folder)),
            failure=failure,
            checkpoint=CheckpointConfig(),
            share=lambda order: b"reference",
            observe=self._observe,
        )

    async def open(self) -> Endpoint:
        endpoint = self.group.streams.endpoint = await self.listener.open("127.0.0.1")
        return endpoint

    def _observe(self, event: Event, iteration: int) -> None:
        if event.kind == "checkpoint":
            self.commits[event.data["number"]] = time.time()

    async def _stream(self, run_id: str, seq: int) -> AsyncIterator[Any]:
        return self.run.log.read(seq)

    async def stats(self) -> dict[str, Any]:
        """Return what the workers' process has measured, and the state of this process."""
        process = psutil.Process()
        return {
            **await self.calls.call(0, "stats", ()),
            "calls": self.calls.num_calls + self.calls.num_items,
            "at": time.time(),
            "cpu_s": time.process_time(),
            "rss_mib": process.memory_info().rss / 2**20,
        }


class Round(NamedTuple):
    """A round as the driver got it.

    Attributes:
        at: When it arrived.
        newest_s: The age of its newest report then.
        oldest_s: The age of its oldest report then.
        cpu_s: CPU seconds of the driver's process so far.
        batches: Messages that the driver has read so far.
    """

    attempt: int
    iteration: int
    num_ranks: int
    at: float
    newest_s: float
    oldest_s: float
    cpu_s: float
    batches: int


async def measure(
    num_workers: int, seconds: float, folder: str, hz: float = 10.0, save_every_s: float = 0.0
) -> dict[str, Any]:
    """Run, measure for ``seconds``, let a worker die, and end the run.

    Args:
        num_workers: The number of workers.
        seconds: How long to measure.
        folder: An empty folder.
        hz: Reports of each worker in a second.
        save_every_s: Seconds between two saves; 0: no saves.
    """
    at = Path(folder)
    rss_mib = psutil.Process().memory_info().rss / 2**20
    calls = Calls()
    with without_ray(calls):
        controller = Controller(calls, num_workers, at)
        endpoint = await controller.open()
        spec = {
            "host": endpoint.host,
            "port": endpoint.port,
            "token": endpoint.token.hex(),
            "hz": hz,
            "save_every": round(save_every_s * hz),
            "checkpoints": str(at / "checkpoints"),
            "rounds": str(at / "rounds.json"),
        }
        (at / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        peers = [_start(role, at) for role in ("workers", "driver")]
        try:
            before, after, last = await asyncio.wait_for(_run(controller, seconds), _TIMEOUT_S + seconds)
            await asyncio.to_thread(peers[1].wait, _TIMEOUT_S)
        finally:
            for peer in peers:
                peer.kill()
                peer.wait()
    if last["problems"]:
        raise RuntimeError(f"{len(last['problems'])} problems, such as {last['problems'][0]}")
    rounds = [Round(*each) for each in json.loads((at / "rounds.json").read_text(encoding="utf-8"))]
    _check(rounds, num_workers)
    return {
        "workers": num_workers,
        "hz": hz,
        "save_every_s": save_every_s,
        **_load(
            num_workers,
            before,
            after,
            [each for each in rounds if before["at"] <= each.at - each.newest_s <= after["at"]],
        ),
        "memory_mib": after["rss_mib"],
        "memory_growth_mib": after["rss_mib"] - rss_mib,
        **_commits(controller.commits, last),
        **_starts(controller.group.formed, last),
    }


async def _run(controller: Controller, seconds: float) -> tuple[dict[str, Any], ...]:
    """Return the state before and after the measured seconds, and after a worker's death."""
    await controller.calls.is_connected.wait()
    executing = asyncio.ensure_future(controller.run.execute())
    taking = asyncio.ensure_future(_take(controller, seconds))
    await asyncio.wait([executing, taking], return_when=asyncio.FIRST_COMPLETED)
    if not taking.done():
        taking.cancel()
        raise RuntimeError(f"the run has ended early: {controller.run.status()}")
    await controller.run.stop(c.StopRequested("the measure is over", cancel=True))
    await executing
    return taking.result()


async def _take(controller: Controller, seconds: float) -> tuple[dict[str, Any], ...]:
    await controller.group.has_ordered.wait()
    while controller.run.log.iteration < 1:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    await asyncio.sleep(_WARM_UP_S)
    before = await controller.stats()
    first = controller.run.log.iteration
    await asyncio.sleep(seconds)
    while controller.run.log.iteration < first + _FEWEST_ROUNDS:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    after = await controller.stats()
    controller.group.has_ordered.clear()
    controller.calls.call(controller.group.size - 1, "kill", ())
    await controller.group.has_ordered.wait()
    while (last := await controller.stats())["ordered"].get(2) is None:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    return before, after, last


def _start(role: str, folder: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), *filter(None, sys.path)])}
    return subprocess.Popen([sys.executable, "-m", "bench.scale_peers", role, str(folder / "spec.json")], env=env)


def _check(rounds: list[Round], num_workers: int) -> None:
    """Check that no report of the first attempt was lost."""
    first = [each for each in rounds if each.attempt == 1]
    if [each.iteration for each in first] != list(range(1, len(first) + 1)):
        raise RuntimeError("rounds of the first attempt are missing")
    if partial := [each for each in first if each.num_ranks != num_workers]:
        raise RuntimeError(f"round {partial[0].iteration} has {partial[0].num_ranks} of {num_workers} reports")


def _load(num_workers: int, before: dict[str, Any], after: dict[str, Any], rounds: list[Round]) -> dict[str, Any]:
    """Return rates and delays of the measured seconds."""
    took = after["at"] - before["at"]
    cpu_s = after["cpu_s"] - before["cpu_s"]
    batches = after["batches"] - before["batches"]
    num_reports, num_calls = len(rounds) * num_workers, after["calls"] - before["calls"]
    span = rounds[-1].at - rounds[0].at
    return {
        "seconds": took,
        "reports_per_s": num_reports / took,
        "items_per_s": batches / took,
        "messages_per_s": (batches + num_calls) / took + (rounds[-1].batches - rounds[0].batches) / span,
        "cpu_s": cpu_s,
        "cpu_share": cpu_s / took,
        "cpu_per_report_s": cpu_s / num_reports,
        "driver_cpu_share": (rounds[-1].cpu_s - rounds[0].cpu_s) / span,
        "late_s": after["late_s"],
        "latency_p50_s": quantile([each.newest_s for each in rounds], 0.5),
        "latency_p99_s": quantile([each.oldest_s for each in rounds], 0.99),
    }


def _commits(commits: dict[int, float], last: dict[str, Any]) -> dict[str, Any]:
    """Return the longest time from the last part of a checkpoint to its commit: since it was written, and since it was sent."""
    numbers = commits.keys() & last["safe"].keys() & last["sent"].keys()
    if not numbers:
        return {}
    return {
        "commits": len(numbers),
        "commit_s": max(commits[number] - last["safe"][number] for number in numbers),
        "commit_since_sent_s": max(commits[number] - last["sent"][number] for number in numbers),
    }


def _starts(formed: list[Formed], last: dict[str, Any]) -> dict[str, Any]:
    """Return what the first group and the group after the death took."""
    first, second = formed[0], formed[1]
    return {
        "start_per_worker_s": first.per_worker_s(),
        "resize_per_worker_s": second.per_worker_s(),
        "death_to_order_s": second.times["begun"] - last["died_at"],
        "death_to_ready_s": second.times["ready"] - last["died_at"],
        "death_to_entered_s": last["ordered"][2] - last["died_at"],
    }


def main(num_workers: str, seconds: str, out: str, folder: str, hz: str = "10", save_every_s: str = "0") -> None:
    found = asyncio.run(measure(int(num_workers), float(seconds), folder, float(hz), float(save_every_s)))
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
