"""Compare a step of logical workers with one of DistributedDataParallel.

    python benchmarks/logical.py [--quick] [--output FOLDER]

Two workers that act as two logical workers take both steps in turns, with the same models, data and settings. Writes
logical.json and logical.md to doc/benchmarks, or to build/benchmarks with --quick. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from bench.logical_loops import LOOPS, measure
from bench.machine import ROOT, describe_machine
from bench.results import median_ratio, rounded, spread_of_ratio
from bench.systems.base import wait_for_calm
from bench.table import make_table, say_met

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"
#: Of a step's time to that of DistributedDataParallel.
LIMIT = 1.15
NUM_WORKERS = 2
#: Rows of a worker's batch.
BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it all work?")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    output.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"measured": date.today().isoformat(), "load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as folder:
        document["steps"] = measure_steps(Path(folder), args.quick)
    document["machine"] = describe_machine(("torch",))
    (output / "logical.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = render(document)
    (output / "logical.md").write_text(page, encoding="utf-8")
    print(page)


def measure_steps(folder: Path, quick: bool) -> dict[str, Any]:
    """Return the milliseconds of a step, by model and loop."""
    import ray

    import raysgd

    os.environ.update(RAY_worker_niceness="0")
    ray.init(address="local", num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    rounds, steps = (2, 4) if quick else (30, 40)
    rng = np.random.default_rng(0)
    num_rows = steps * BATCH * NUM_WORKERS
    data = {"x": rng.random((num_rows, 1, 28, 28), np.float32), "y": rng.integers(0, 10, num_rows)}
    files = raysgd.RunConfig(storage_path=folder / "runs")
    try:
        with raysgd.Trainer(NUM_WORKERS, deterministic=True, logical_workers=NUM_WORKERS, run_config=files) as trainer:
            wait_for_calm()
            found: dict[str, Any] = trainer.run(
                measure, {"rounds": rounds, "rows": BATCH, "steps": steps}, dataset=data
            )
    finally:
        ray.shutdown()
    return {
        model: {loop: [rounded(each) for each in took] for loop, took in loops.items()}
        for model, loops in found.items()
    }


def render(document: dict[str, Any]) -> str:
    """Return the page."""
    machine, rows = document["machine"], []
    for model, taken in document["steps"].items():
        spread = spread_of_ratio(taken["ddp_again"], taken["ddp"])
        ratio = median_ratio(taken["logical"], taken["ddp"])
        cells = [
            f"{statistics.median(taken[loop]):.2f} ms ({median_ratio(taken[loop], taken['ddp']):.3f})" for loop in LOOPS
        ]
        rows.append([model, *cells, f"{spread:.3f}", say_met(ratio <= max(LIMIT, 1 + spread))])
    rounds = len(next(iter(document["steps"].values()))["ddp"])
    return "\n".join(
        [
            "# Logical workers",
            "",
            "<!-- Written by benchmarks/logical.py; changes made here are lost. -->",
            "",
            "A step of [logical workers](../guides/logical_workers.md), and one of `DistributedDataParallel`: the networks of",
            f"the [comparison](index.md), SGD, {BATCH} rows a worker, {NUM_WORKERS} workers with one thread each that act as "
            f"{NUM_WORKERS} logical workers,",
            f"deterministic algorithms, on {machine['cores']} cores ({machine['processor']}); "
            + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
            + ".",
            "",
            f"Medians over {rounds} rounds, in each of which every loop makes an epoch in random order, in the same processes;",
            "in brackets the ratio to the first loop. Target: at most "
            f"{LIMIT}, or within the spread of DistributedDataParallel against itself.",
            "",
            make_table(["", *LOOPS.values(), "spread", "target"], rows),
            "",
            f"Measured on {document['measured']}; the load average was {document['load']} when it began.",
            "",
            "```console",
            "$ python benchmarks/logical.py",
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    main()
