"""Compare how fast ``raysgd run`` and ``torchrun`` start the same script on two workers.

    python benchmarks/run_vs_torchrun.py [--quick] [--repeat N] [--output FOLDER]

The script forms a gloo group and adds a number over all ranks. A Ray cluster runs already; each command is a new process. The
systems alternate, and each repetition begins with another one. Writes scripts.json and scripts.md to doc/benchmarks, or to
build/benchmarks with --quick. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from bench.machine import ROOT, describe_machine
from bench.systems.base import wait_for_calm

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"
NUM_WORKERS = 2
#: The limit of the ratio to torchrun for a cold start, and of a second run to the first.
COLD_LIMIT, WARM_LIMIT = 2.0, 0.1
SCRIPT = """
import time
began = time.time()
import json, os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
formed = time.time()
assert total == dist.get_world_size()
with open(sys.argv[1] + "/" + os.environ["RANK"], "w") as file:
    json.dump({"line": began, "group": formed}, file)
dist.destroy_process_group()
"""
MEASURES = {
    "line": "the script's first line",
    "group": "first collective done on all ranks",
    "end": "the command has ended",
}
TITLES = {
    "torchrun": "`torchrun`",
    "env": "`raysgd run --backend env`",
    "torch": "`raysgd run --backend torch`",
    "second": "second run on the same Trainer, `torch`",
}
Times = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="once: does it all work?")
    parser.add_argument("--repeat", type=int, default=7, help="repetitions of each system")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, _cluster() as address:
        samples = measure(Path(folder), address, 1 if args.quick else args.repeat)
    today = date.today().isoformat()
    document = {"machine": describe_machine(), "measured": today, "load": round(load, 1), "samples": samples}
    output.mkdir(parents=True, exist_ok=True)
    (output / "scripts.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = render(document)
    (output / "scripts.md").write_text(page, encoding="utf-8")
    print(page)


@contextmanager
def _cluster() -> Iterator[str]:
    """Start a Ray cluster, whose workers have the niceness of other processes; yield its address."""
    os.environ.update(RAY_worker_niceness="0")  # by default 15
    import ray

    address = ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False).address_info
    try:
        yield str(address["gcs_address"])
    finally:
        ray.shutdown()


def measure(folder: Path, address: str, repeat: int) -> dict[str, list[Times]]:
    """Return the times of each system, in seconds from the start of the command or the call of the run."""
    (folder / "train.py").write_text(SCRIPT)
    systems: dict[str, Callable[[], Times]] = {
        "torchrun": lambda: _command(folder, address, _torchrun()),
        "env": lambda: _command(folder, address, _raysgd("env", folder)),
        "torch": lambda: _command(folder, address, _raysgd("torch", folder)),
        "second": lambda: _second_run(folder),
    }
    samples: dict[str, list[Times]] = {name: [] for name in systems}
    for repetition in range(repeat):
        names = list(systems)
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            wait_for_calm()
            samples[name].append(systems[name]())
            print(f"{repetition + 1}/{repeat} {name}: {samples[name][-1]}", flush=True)
    return samples


def _torchrun() -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_WORKERS)]


def _raysgd(backend: str, folder: Path) -> list[str]:
    flags = ["--num-workers", str(NUM_WORKERS), "--backend", backend, "--storage-path", str(folder / "runs")]
    return ["-m", "raysgd.cli", "run", *flags]


def _command(folder: Path, address: str, words: list[str]) -> Times:
    """Run a command in a new process."""
    with tempfile.TemporaryDirectory(dir=folder) as notes:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": address,
            "OMP_NUM_THREADS": "1",
        }
        called = time.time()
        done = subprocess.run(
            [sys.executable, *words, "train.py", notes], cwd=folder, env=environment, capture_output=True, text=True
        )
        ended = time.time()
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)} ended with status {done.returncode}:\n{done.stderr}")
        return {**_read(notes, called), "end": ended - called}


def _second_run(folder: Path) -> Times:
    """Run the script twice on a Trainer, as the command does; return the times of the second run."""
    import raysgd
    from raysgd.callbacks import ProgressCallback
    from raysgd.cli.script import Script

    path = folder / "train.py"
    with tempfile.TemporaryDirectory(dir=folder) as notes:
        script = Script(str(path), path.read_bytes(), (notes,), folder=str(folder))
        files = raysgd.RunConfig(storage_path=folder / "runs")
        with raysgd.Trainer(NUM_WORKERS, "torch", run_config=files) as trainer:
            for _ in range(2):
                called = time.time()
                trainer.run(script, callbacks=[ProgressCallback(mode="off")])
                ended = time.time()
        return {**_read(notes, called), "end": ended - called}


def _read(notes: str, called: float) -> Times:
    """Return the times that the ranks noted, of the last rank each."""
    ranks = [json.loads((Path(notes) / str(rank)).read_text()) for rank in range(NUM_WORKERS)]
    return {name: max(rank[name] for rank in ranks) - called for name in ("line", "group")}


def render(document: dict[str, Any]) -> str:
    """Return the page."""
    samples, machine = document["samples"], document["machine"]
    median = {
        (name, measure): statistics.median(times[measure] for times in taken)
        for name, taken in samples.items()
        for measure in MEASURES
    }
    lines = [
        "# Start of scripts",
        "",
        "<!-- Written by benchmarks/run_vs_torchrun.py; changes made here are lost. -->",
        "",
        "How long it takes to start the same script, which imports torch, forms a gloo group and adds a number, on two",
        "workers. Seconds from the start of the command; a Ray cluster runs already. The last line counts from the call of",
        "`Trainer.run`, in processes that have run the script before.",
        "",
        f"| | {' | '.join(MEASURES.values())} | first collective, ratio to torchrun |",
        f"| --- |{' --- |' * (len(MEASURES) + 1)}",
    ]
    for name in samples:
        cells = [f"{median[name, measure]:.2f} s" for measure in MEASURES]
        ratio = median[name, "group"] / median["torchrun", "group"]
        lines.append(f"| {TITLES[name]} | {' | '.join(cells)} | {ratio:.2f} |")
    cold = max(median[name, "group"] for name in ("env", "torch")) / median["torchrun", "group"]
    warm = median["second", "group"] / median["torch", "group"]
    versions = machine["versions"]
    lines += [
        "",
        f"- Target: a cold start takes at most {COLD_LIMIT:g} times as long as torchrun's. It takes {cold:.2f} times as long: "
        f"{_met(cold <= COLD_LIMIT)}.",
        f"- Target: a second run takes at most {WARM_LIMIT:g} of the first. It takes {warm:.3f}: {_met(warm <= WARM_LIMIT)}.",
        "",
        f"Medians of {len(samples['torchrun'])} repetitions in which the systems alternate, {document['measured']}, on "
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB; python {versions['python']}, ray "
        f"{versions.get('ray')}, torch {versions.get('torch')}. `OMP_NUM_THREADS=1` everywhere, and all processes have the same "
        f"niceness. The load average was {document['load']} when it began.",
        "",
        "```console",
        "$ python benchmarks/run_vs_torchrun.py",
        "```",
        "",
    ]
    return "\n".join(lines)


def _met(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


if __name__ == "__main__":
    main()
