"""Measure what a death costs with a live state, with saves to memory in every step, and with torchft.

    python benchmarks/live.py [--quick] [--only PART] [--torchft PYTHON] [--output FOLDER]

A state of 100 MB: two matrices and the moments of AdamW. With PYTHON, that of an environment with torchft, torchft is measured
too. Writes live.json and live.md to doc/benchmarks, or to build/benchmarks with --quick; the parts of an earlier run that are not
measured stay. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import tempfile
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from bench.faults import Training
from bench.live_loops import WAYS, WIDTH, train_block, train_until_enough
from bench.machine import ROOT, describe_machine
from bench.results import median_ratio, quantile, rounded, spread_of_ratio
from bench.steps import Group
from bench.systems.base import wait_for_calm
from bench.systems.fragile import FragileRaysgd
from bench.table import make_table, say_met

from raysgd.session.events import HeldStep, StepId
from raysgd.session.live.kept import KeptState
from raysgd.workers.orders import LiveOrder
from raysgd.workers.process.live import LiveHolder

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"
#: Seconds from a kill to the next step, median and 99 %; steps repeated; step time to that without; GB/s to the new rank.
TO_NEXT_STEP_S, SLOWEST_S, REPEATED, STEP_RATIO, RATE = 0.5, 1.0, 1, 1.0, 1.0
SIZES = (2, 4)
KILLS = {"live": 10, "memory": 3}
STATE_BYTES = 2 * WIDTH * WIDTH * 4 * 3
#: The lighthouse of torchft: as its README starts it, and with short times.
TORCHFT = {
    "as documented": {"min_replicas": 1, "quorum_tick_ms": 100, "join_timeout_ms": 10000},
    "short times": {"min_replicas": 1, "quorum_tick_ms": 20, "join_timeout_ms": 1000, "heartbeat_timeout_ms": 1000},
}
_LIGHTHOUSE = """
import json, sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:0", **json.loads(sys.argv[1]))
print(server.address(), flush=True)
sys.stdin.read()
"""
_LIMIT_S = 90.0
_HELD = HeldStep(StepId(1, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it all work?")
    parser.add_argument("--only", choices=("kills", "transfer", "steps", "torchft"), help="one part")
    parser.add_argument("--torchft", metavar="PYTHON", help="the Python of an environment with torchft")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "live.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    document |= {"measured": date.today().isoformat(), "load": round(os.getloadavg()[0], 1)}
    os.environ.update(RAY_worker_niceness="0", OMP_NUM_THREADS="1", PYTHONPATH=f"{ROOT}:{ROOT / 'benchmarks'}")
    with tempfile.TemporaryDirectory() as folder:
        if args.only in (None, "kills"):
            document["kills"] = measure_kills(Path(folder), quick=args.quick)
        if args.only in (None, "transfer"):
            document["transfer"] = measure_transfer(quick=args.quick)
        if args.only in (None, "steps"):
            document["steps"] = measure_steps(Path(folder), quick=args.quick)
        if args.only in (None, "torchft") and args.torchft:
            document["torchft"] = measure_torchft(Path(folder), args.torchft, quick=args.quick)
    document["machine"] = describe_machine()
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = render(document)
    (output / "live.md").write_text(page, encoding="utf-8")
    print(page)


# -- kills ---------------------------------------------------------------------------------------------------------------


def measure_kills(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Kill a rank at a random moment, again and again, in groups of two sizes; return the figures by size and way."""
    found: dict[str, Any] = {}
    for size in SIZES[:1] if quick else SIZES:
        found[str(size)] = {}
        for way, num_kills in {**KILLS, "none": 0}.items():
            system = FragileRaysgd("raysgd_spare", folder / f"{size}-{way}")
            system.folder.mkdir()
            checkpoint = {"keep_in_memory": True, "storage_interval": 10**6}
            system.start({"num_cpus": size + 1, "num_workers": size, "num_spares": 1, "checkpoint": checkpoint})
            try:
                found[str(size)][way] = _kill_again_and_again(
                    system, way, size, min(num_kills, 2) if quick else num_kills
                )
            finally:
                system.close()
    return found


def _kill_again_and_again(system: FragileRaysgd, way: str, size: int, num_kills: int) -> dict[str, list[float]]:
    series: dict[str, list[float]] = {"seconds": [], "repeated": [], "load_s": [], "memory_mb": []}
    with Training(system, limit_s=_LIMIT_S, train=train_until_enough, config={"way": way, "width": WIDTH}) as training:
        group = training.wait_for_whole(size)
        series["memory_mb"] = [psutil.Process(pid).memory_info().rss / 1e6 for pid in group.pids]
        for _ in range(num_kills):
            group = training.wait_for_whole(size)
            sent = training.send_signal(group)
            after = training.wait_after(group)
            series["seconds"].append(after.first_step - sent)
            series["repeated"].append(_last_step(training.folder, group) - _begin_of(training.folder, after)[0])
            series["load_s"].append(
                max(seconds for seconds, pid in _begin_of(training.folder, after)[1] if pid not in group.pids)
            )
    return {name: [rounded(each) for each in taken] for name, taken in series.items()}


def _begin_of(folder: Path, group: Group) -> tuple[int, list[tuple[float, int]]]:
    """Return the steps before a group, and for each rank the seconds that it loaded, and its process id."""
    about = [path.read_text(encoding="utf-8").split() for path in folder.glob(f"{group.number}-*.begin")]
    return int(about[0][0]), [(float(seconds), int(pid)) for _, seconds, _, pid in about]


def _last_step(folder: Path, group: Group) -> int:
    """Return the last step that a rank of a group has completed."""
    counts = [path.read_bytes().count(b"\n") for path in folder.glob(f"{group.number}-*.steps")]
    return _begin_of(folder, group)[0] + max(counts)


# -- transfer ------------------------------------------------------------------------------------------------------------


def measure_transfer(*, quick: bool) -> dict[str, list[float]]:
    """Return the seconds in which a process copies a state from another one, by the megabytes of the state."""
    context = multiprocessing.get_context("spawn")
    found = {}
    for megabytes in (100, 1000):
        endpoints, done = context.Queue(), context.Event()
        source = context.Process(target=_hold, args=(megabytes, endpoints, done))
        source.start()
        order = LiveOrder(_HELD, None, endpoints.get(timeout=60))
        found[str(megabytes)] = []
        for _ in range(2 if quick else 10):
            holder = LiveHolder("127.0.0.1")
            began = time.perf_counter()
            holder.begin("run", order)
            holder.state_of(_HELD)
            found[str(megabytes)].append(rounded(time.perf_counter() - began))
            holder.release()
        done.set()
        source.join()
    return found


def _hold(megabytes: int, endpoints: Any, done: Any) -> None:
    import torch

    state = {"weights": [torch.rand(2_500_000) for _ in range(megabytes // 10)]}
    holder = LiveHolder("127.0.0.1")
    holder.begin("run", None)
    left: Any = SimpleNamespace(marks=(), take=lambda: KeptState(_HELD, state), close=lambda: None)
    holder.on_left(0, 1, left, None)
    report = holder.report("run")
    assert report is not None
    endpoints.put(report.endpoint)
    done.wait()
    holder.release()


# -- steps ---------------------------------------------------------------------------------------------------------------


def measure_steps(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Return the milliseconds of a step of two workers, by state and way, in rounds with one block of each way."""
    import ray

    import raysgd

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    quiet = [raysgd.callbacks.ProgressCallback(mode="off")]
    memory = raysgd.CheckpointConfig(keep_in_memory=True, storage_interval=10**6)
    found: dict[str, Any] = {}
    try:
        files = raysgd.RunConfig(storage_path=folder / "steps")
        with raysgd.Trainer(2, backend="torch", run_config=files, checkpoint_config=memory) as trainer:
            wait_for_calm()
            for name, width, count in (("100 MB", WIDTH, 12), ("1 MB", WIDTH // 10, 300)):
                ways = {"none": "none", "none again": "none", "live": "live", "memory": "memory"}
                taken: dict[str, list[float]] = {way: [] for way in ways}
                for number in range(1 if quick else 8):
                    for way in random.Random(number).sample(list(ways), len(ways)):
                        few = count // 6 if way == "memory" else count
                        config = {"way": ways[way], "width": width, "count": 2 if quick else few}
                        taken[way].append(rounded(trainer.run(train_block, config, callbacks=quiet)))
                found[name] = taken
    finally:
        ray.shutdown()
    return found


# -- torchft -------------------------------------------------------------------------------------------------------------


def measure_torchft(folder: Path, python: str, *, quick: bool) -> dict[str, Any]:
    """Kill a replica group of torchft again and again; return the seconds to the next committed step, by settings and size."""
    found: dict[str, Any] = {}
    versions = "import importlib.metadata as m; print(m.version('torchft'), m.version('torch'))"
    found["measured"] = date.today().isoformat()
    found["versions"] = subprocess.run(
        [python, "-c", versions], capture_output=True, text=True, check=True
    ).stdout.split()
    for name, settings in TORCHFT.items():
        found[name] = {}
        for size in SIZES[:1] if quick else SIZES:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                group = _ReplicaGroups(python, Path(own), settings, size)
                try:
                    found[name][str(size)] = group.kill_again_and_again(1 if quick else 2)
                finally:
                    group.close()
    return found


class _ReplicaGroups:
    """A training with torchft: its lighthouse, and replica groups with one process each."""

    def __init__(self, python: str, folder: Path, settings: dict[str, int], size: int) -> None:
        self._python, self._folder, self._size = python, folder, size
        self._lighthouse = subprocess.Popen(
            [python, "-c", _LIGHTHOUSE, json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._lighthouse.stdout is not None
        self._address = self._lighthouse.stdout.readline().strip()
        self._members = {number: self._start(number) for number in range(size)}

    def kill_again_and_again(self, num_kills: int) -> dict[str, list[float]]:
        """Return the seconds from each kill to the next committed step of the others, and to one of all, with a new process."""
        series: dict[str, list[float]] = {"seconds": [], "whole_s": []}
        try:
            self._wait_for_step(0.0, self._size)
            for _ in range(num_kills):
                time.sleep(random.uniform(1.0, 1.2))
                killed, number = time.time(), random.randrange(self._size)
                self._members[number].kill()
                self._members[number].wait()
                series["seconds"].append(self._wait_for_step(killed, self._size - 1) - killed)
                started = time.time()
                self._members[number] = self._start(number)
                series["whole_s"].append(self._wait_for_step(started, self._size) - started)
        except TimeoutError as error:
            print(error)
        return {name: [rounded(each) for each in taken] for name, taken in series.items()}

    def close(self) -> None:
        (self._folder / "enough").touch()
        for each in (*self._members.values(), self._lighthouse):
            each.kill()
            each.wait()

    def _start(self, number: int) -> subprocess.Popen[Any]:
        arguments = [str(number), str(self._folder), self._address, str(WIDTH)]
        with (self._folder / f"{number}.log").open("ab") as log:
            command = [self._python, "-m", "bench.torchft_member", *arguments]
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _wait_for_step(self, since: float, size: int) -> float:
        """Return when the first step after a time was committed in which so many replica groups took part."""
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            lines = [
                line.split() for path in self._folder.glob("*.steps") for line in path.read_text().splitlines(True)
            ]
            found = [float(at) for at, *of in lines if of and int(of[0]) == size and float(at) > since]
            if found:
                return min(found)
            time.sleep(0.02)
        logs = [path.read_text(encoding="utf-8")[-1000:] for path in self._folder.glob("*.log")]
        raise TimeoutError("no such step\n" + "\n".join(logs))


# -- the page ------------------------------------------------------------------------------------------------------------


def render(document: dict[str, Any]) -> str:
    """Return the page."""
    return "\n".join(
        [
            *_head(document),
            *_of_kills(document),
            *_of_transfer(document),
            *_of_steps(document),
            *_of_torchft(document),
            *_tail(document),
        ]
    )


def _head(document: dict[str, Any]) -> list[str]:
    machine = document["machine"]
    return [
        "# What a death costs",
        "",
        "<!-- Written by benchmarks/live.py; changes made here are lost. -->",
        "",
        "A rank is killed at a random moment of a step, again and again: with a [live state](../guides/live-state.md), with",
        "saves to memory in every step, and with torchft. The state has "
        f"{STATE_BYTES / 1e6:.0f} MB: two matrices and the moments of AdamW.",
        "Every training has gloo, one thread for each process, and random rows; "
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + ".",
        "",
    ]


def _of_kills(document: dict[str, Any]) -> list[str]:
    if "kills" not in document:
        return []
    rows, verdicts = [], []
    for size, ways in document["kills"].items():
        for way, found in ways.items():
            memory = f"{statistics.median(found['memory_mb']):.0f} MB"
            if not found["seconds"]:
                rows.append([size, WAYS[way], "-", "-", "-", "-", memory])
                continue
            median, slowest = quantile(found["seconds"], 0.5), quantile(found["seconds"], 0.99)
            load_s, most = statistics.median(found["load_s"]), max(found["repeated"])
            number = len(found["seconds"])
            cells = [
                f"{median:.2f} s",
                f"{slowest:.2f} s ({number} kills)",
                f"{most:.0f}",
                f"{1000 * load_s:.0f} ms",
                memory,
            ]
            rows.append([size, WAYS[way], *cells])
            if way == "live":
                verdicts += [
                    f"- {size} ranks: median at most {TO_NEXT_STEP_S:g} s: {say_met(median <= TO_NEXT_STEP_S)}; 99 % at most "
                    f"{SLOWEST_S:g} s: {say_met(slowest <= SLOWEST_S)}; at most {REPEATED} step repeated: "
                    f"{say_met(most <= REPEATED)}."
                ]
    head = [
        "ranks",
        "state",
        "kill to next step, median",
        "99 %",
        "complete steps repeated, most",
        "the new rank waits for the state",
        "a worker",
    ]
    return [
        "## Kills",
        "",
        "A spare replaces the process. The time ends when the slowest rank has completed its first step with the state. A part",
        "of it is the loop's own: making the model, and one step, in all processes at once on the cores of this machine.",
        "",
        make_table(head, rows),
        *verdicts,
        "",
    ]


def _of_transfer(document: dict[str, Any]) -> list[str]:
    if "transfer" not in document:
        return []
    lines = []
    for megabytes, seconds in document["transfer"].items():
        rate = int(megabytes) / statistics.median(seconds) / 1000
        lines.append(
            f"- {megabytes} MB: {rate:.2f} GB/s ({statistics.median(seconds):.2f} s, the slowest of {len(seconds)} took "
            f"{max(seconds):.2f} s); the target is {RATE:g} GB/s: {say_met(rate >= RATE)}."
        )
    return [
        "## The way of the state",
        "",
        "From one process to another on this machine, with checksums, into memory that the process did not have before.",
        "",
        *lines,
        "",
    ]


def _of_steps(document: dict[str, Any]) -> list[str]:
    if "steps" not in document:
        return []
    rows, verdicts = [], []
    for name, taken in document["steps"].items():
        spread, ratio = spread_of_ratio(taken["none again"], taken["none"]), median_ratio(taken["live"], taken["none"])
        cells = [
            f"{statistics.median(each):.2f} ms ({median_ratio(each, taken['none']):.3f})" for each in taken.values()
        ]
        rows.append([name, *cells, f"{spread:.3f}"])
        verdicts.append(
            f"- {name}: a step with a live state takes {ratio:.3f} of one without; the target is {STEP_RATIO:.2f}, within the "
            f"spread of the same loop: {say_met(ratio <= STEP_RATIO + spread)}."
        )
    return [
        "## Steps without a death",
        "",
        "Two workers, medians of rounds in which each way has one block; in brackets the ratio to the first one.",
        "",
        make_table(
            ["state", "not kept", "not kept, again", "live state", "saved to memory in every step", "spread"], rows
        ),
        *verdicts,
        "",
    ]


def _of_torchft(document: dict[str, Any]) -> list[str]:
    if "torchft" not in document:
        return []
    version, torch = document["torchft"]["versions"]
    rows = []
    for name, settings in TORCHFT.items():
        for size, found in document["torchft"][name].items():
            shown = ", ".join(f"{key}={value}" for key, value in settings.items())
            rows.append(
                [
                    size,
                    f"{name}: {shown}",
                    *(
                        f"{statistics.median(found[part]):.2f} s" if found[part] else "none"
                        for part in ("seconds", "whole_s")
                    ),
                ]
            )
    return [
        "## torchft",
        "",
        f"torchft {version} with torch {torch}, measured on {document['torchft']['measured']} in processes without Ray:",
        "the same training in replica groups of one process. The others commit the next step without the killed one, whose rows",
        "of that step are lost. A new process then joins.",
        "Its `DistributedDataParallel` ends the others by an `AssertionError` when an all-reduce of gloo fails; here the hook",
        f"of that class waits for each one. None: no such step within {_LIMIT_S:g} s.",
        "",
        make_table(
            [
                "replica groups",
                "lighthouse",
                "kill to next committed step of the others",
                "new process to a step of all",
            ],
            rows,
        ),
        "",
    ]


def _tail(document: dict[str, Any]) -> list[str]:
    return [
        f"Measured on {document['measured']}; the load average was {document['load']} when it began.",
        "",
        "```console",
        "$ python benchmarks/live.py --torchft ~/torchft/bin/python",
        "```",
        "",
    ]


if __name__ == "__main__":
    main()
