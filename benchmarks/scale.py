"""Measure how the controller's cost grows with the number of workers.

    python benchmarks/scale.py [--quick] [--output FOLDER]

There are 1, 8, 64 and 512 simulated workers at 10 Hz, then 64 real actors without a CPU. The results are added to the
results.json, the page and the pictures that vs_ray_train.py wrote.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import results
from bench.children import run_module, work_folder
from bench.machine import describe_machine
from bench.pages.comparison import PAGE
from bench.program import PUBLISHED, SCRATCH, write_page
from bench.results import growth, rounded

SIMULATED = (1, 8, 64, 512)
REAL = 64
SECONDS = 10.0
_TIMEOUT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few workers, a short time: does it all work?")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    document = results.load(output / "results.json", describe_machine())
    seconds = 2.0 if args.quick else SECONDS
    with work_folder() as work:
        simulated = [_measure("bench.scale_simulated", n, seconds, work) for n in SIMULATED[: 2 if args.quick else 4]]
        real = _measure("bench.scale_real", 4 if args.quick else REAL, seconds, work)
    document["scale"] = {"quick": args.quick, "simulated": simulated, "real": real, **conclude(simulated)}
    write_page(document, output, PAGE)
    print(output / PAGE.file_name)


def conclude(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the exponent with which CPU grows with the number of workers, and a sentence about it."""
    good = [point for point in points if "error" not in point and point["cpu_share"] > 0]
    if len(good) < 2:
        return {}
    sizes = [point["workers"] for point in good]
    exponent = growth(sizes, [point["cpu_share"] for point in good])
    kind = "linear or better" if exponent <= 1.05 else "worse than linear"
    text = (
        f"From {sizes[0]} to {sizes[-1]} workers the controller's CPU grows as workers to the power of {exponent:.2f}: "
        f"{kind}."
    )
    return {"exponent": rounded(exponent), "verdict": text}


def _measure(module: str, num_workers: int, seconds: float, work: Path) -> dict[str, Any]:
    kind = module.rpartition("_")[2]
    print(f"{num_workers} {kind} workers", end="", flush=True)
    start = time.monotonic()
    folder = work / f"{kind}-{num_workers}"
    folder.mkdir()
    out = folder / "out.json"
    args = [str(num_workers), str(seconds), str(out), str(folder)]
    why = run_module(module, args, {}, folder / "log.txt", _TIMEOUT_S)
    print(f"  {time.monotonic() - start:.1f} s", flush=True)
    if not out.exists():
        print((folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-3000:])
        return {"workers": num_workers, "error": why or "no result"}
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return {name: rounded(value) if isinstance(value, float) else value for name, value in found.items()}


if __name__ == "__main__":
    main()
