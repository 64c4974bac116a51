"""Measure how long commands take that start no Ray: the help, and the list of runs.

    python benchmarks/command.py [--quick] [--repeat N] [--output FOLDER]

Each command is a new process; they alternate. "python" is an interpreter that does nothing, the lower limit. Writes command.json
and command.md to doc/benchmarks, or to build/benchmarks with --quick. The machine should have nothing else to do.
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
from datetime import date
from pathlib import Path
from typing import Any

from bench.machine import ROOT, describe_machine

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"
#: Runs in the folder that is listed, and results in each.
NUM_RUNS, NUM_RESULTS = 50, 1000
#: The limit of the help, in seconds on top of an interpreter that does nothing.
HELP_LIMIT_S = 0.2
COMMANDS = {
    "python": ["-c", "pass"],
    "import": ["-c", "import click"],
    "help": ["-m", "raysgd.cli", "--help"],
    "help of run": ["-m", "raysgd.cli", "run", "--help"],
    "ls": ["-m", "raysgd.cli", "ls", "."],
}
TITLES = {
    "python": "an interpreter that does nothing",
    "import": "`import click`",
    "help": "`raysgd --help`",
    "help of run": "`raysgd run --help`",
    "ls": f"`raysgd ls` of {NUM_RUNS} runs with {NUM_RESULTS:,} results each",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="once: does it all work?")
    parser.add_argument("--repeat", type=int, default=15, help="repetitions of each command")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder))
        samples = measure(Path(folder), 1 if args.quick else args.repeat)
    document = {"machine": describe_machine(), "measured": date.today().isoformat(), "samples": samples}
    output.mkdir(parents=True, exist_ok=True)
    (output / "command.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = render(document)
    (output / "command.md").write_text(page, encoding="utf-8")
    print(page)


def write_runs(folder: Path) -> None:
    """Write finished runs of one rank, as their journals write them."""
    for number in range(NUM_RUNS):
        run = folder / f"job_{number}" / "run_001"
        run.mkdir(parents=True)
        (run / "run.json").write_text(json.dumps({"started": 1000.0 + number, "reduce": {}}))
        attempt = {"attempt": 1, "world_size": 1, "iterations_before": 0, "time_before_s": 0.0}
        frames = [
            {"seq": 0, "attempt": 1, "kind": "attempt", "rank": -1, "data": attempt},
            {"seq": NUM_RESULTS + 1, "attempt": 1, "kind": "rank_done", "rank": 0, "data": {}},
            {"seq": NUM_RESULTS + 2, "attempt": 1, "kind": "run_end", "timestamp": 2000.0, "data": {"kind": "done"}},
        ]
        (run / "events.jsonl").write_text("".join(json.dumps(frame) + "\n" for frame in frames))
        rows = [
            {"seq": step + 1, "attempt": 1, "rank": 0, "first": step, "count": 1, "rows": [[step, step, {"loss": 0.5}]]}
            for step in range(NUM_RESULTS)
        ]
        (run / "metrics-0000.jsonl").write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def measure(folder: Path, repeat: int) -> dict[str, list[float]]:
    """Return the seconds of each command, from its start to its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeat):
        for name, words in COMMANDS.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True, capture_output=True)
            samples[name].append(time.perf_counter() - begin)
    return samples


def render(document: dict[str, Any]) -> str:
    """Make the page of the results."""
    medians = {name: statistics.median(times) for name, times in document["samples"].items()}
    machine = document["machine"]
    rows = [f"| {TITLES[name]} | {medians[name]:.3f} s | {min(document['samples'][name]):.3f} s |" for name in TITLES]
    extra_s = medians["help"] - medians["python"]
    outcome = "met" if extra_s <= HELP_LIMIT_S else "**missed**"
    return "\n".join(
        [
            "# Start of the command",
            "",
            "<!-- Written by benchmarks/command.py; changes made here are lost. -->",
            "",
            "How long commands take that start no Ray. Each is a new process, and they alternate.",
            "",
            "| command | median | fastest |",
            "| --- | ---: | ---: |",
            *rows,
            "",
            f"`raysgd --help` takes {extra_s:.3f} s more than an interpreter that does nothing; at most {HELP_LIMIT_S} s is the "
            f"target: {outcome}. It imports neither Ray nor a framework (tests/unit/test_cli_main.py).",
            "",
            "```console",
            "$ python benchmarks/command.py",
            "```",
            "",
            f"Measured {document['measured']} on {machine['cores']} cores ({machine['processor']}), "
            f"{machine['memory_gib']:.0f} GiB, Python {machine['versions']['python']}; "
            f"{len(document['samples']['help'])} repetitions.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
