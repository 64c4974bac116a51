"""Measure how the controller's cost grows with the number of workers.

    python benchmarks/scale.py [--quick] [--output FOLDER]

There are 1, 8, 64 and 512 simulated workers that report at 10 Hz, then up to 1,000 that report at 1 Hz and save every 10 s,
then 64 real actors without a CPU, and 20 Trainers with 5 of these each at the same time. The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from bench import results
from bench.children import run_module, work_folder
from bench.machine import describe_machine
from bench.pages.scale import STEM, render
from bench.picture import draw_scale
from bench.program import PUBLISHED, SCRATCH
from bench.results import growth, rounded

SIMULATED = (1, 8, 64, 512)
SAVING = (1, 8, 64, 512, 1000)
#: Growth is also given from this number of workers on, because the first workers cost little in addition to none.
MANY = 64
REAL = 64
#: Trainers at the same time, and workers of each.
TRAINERS = (20, 5)
SECONDS = 10.0
SAVING_SECONDS = 35.0
SAVE_EVERY_S = 10.0
_TIMEOUT_S = 600.0
#: The figures whose growth is shown: what they are, and whether they are of a single report.
_GROWTH = {
    "cpu_share": "CPU of the controller",
    "messages_per_s": "messages",
    "memory_growth_mib": "memory",
    "cpu_per_report_s": "CPU per report",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few workers, a short time: does it all work?")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    document = {
        "machine": describe_machine(),
        "measured": date.today().isoformat(),
        "load": rounded(os.getloadavg()[0]),
        "quick": args.quick,
    }
    with work_folder() as work:
        document |= measure_all(work, is_quick=args.quick)
    print(write_scale(document, output))


def write_scale(document: results.Document, output: Path) -> Path:
    """Write the results, the page and the picture; return the page's path."""
    results.save(document, output / f"{STEM}.json")
    (output / f"{STEM}.md").write_text(render(document), encoding="utf-8")
    draw_scale(document, output / f"{STEM}.svg")
    return output / f"{STEM}.md"


def measure_all(work: Path, *, is_quick: bool) -> dict[str, Any]:
    """Take all measures, each in processes of its own."""
    sizes = slice(2 if is_quick else None)
    seconds, saving_seconds = (2.0, 3.0) if is_quick else (SECONDS, SAVING_SECONDS)
    save_every_s, hz = (1.0, 2.0) if is_quick else (SAVE_EVERY_S, 1.0)
    trainers = (2, 2) if is_quick else TRAINERS
    simulated = [_measure("simulated", n, seconds, work) for n in SIMULATED[sizes]]
    saving = [
        _measure("simulated", n, saving_seconds, work, hz, save_every_s) for n in (SAVING[1:2] if is_quick else SAVING)
    ]
    return {
        "simulated": simulated,
        "saving": saving,
        "real": _measure("real", 4 if is_quick else REAL, seconds, work),
        "real_saving": _measure("real", 4 if is_quick else REAL, saving_seconds, work, hz, save_every_s),
        "trainers": _measure("trainers", trainers[0], trainers[1], work),
        **conclude(simulated),
        "growth": growth_of(saving),
    }


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


def growth_of(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the exponents of growth to the largest number of workers, by what grows, from the first one and from `MANY` on."""
    good = [point for point in points if "error" not in point]
    found: dict[str, dict[str, float]] = {}
    for name, what in _GROWTH.items():
        for first in good[:1] + [point for point in good if point["workers"] == MANY]:
            last = good[-1]
            if first["workers"] < last["workers"] and min(first[name], last[name]) > 0:
                exponent = growth([first["workers"], last["workers"]], [first[name], last[name]])
                found.setdefault(what, {})[f"{first['workers']} to {last['workers']}"] = rounded(exponent)
    return found


def _measure(kind: str, number: int, seconds: float, work: Path, *more: float) -> dict[str, Any]:
    print(f"{number} {kind}{' that save' if more else ''}", end="", flush=True)
    start = time.monotonic()
    folder = work / f"{kind}-{number}{'-saving' if more else ''}"
    folder.mkdir()
    out = folder / "out.json"
    args = [str(number), str(seconds), str(out), str(folder), *map(str, more)]
    module = f"bench.scale_{kind}"
    why = run_module(module, args, {}, folder / "log.txt", _TIMEOUT_S)
    print(f"  {time.monotonic() - start:.1f} s", flush=True)
    if not out.exists():
        print((folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-3000:])
        return {"workers": number, "error": why or "no result"}
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return _rounded(found)


def _rounded(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _rounded(value) if isinstance(value, dict) else rounded(value) if isinstance(value, float) else value
        for name, value in found.items()
    }


if __name__ == "__main__":
    main()
