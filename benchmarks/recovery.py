"""Measure how soon training goes on after a failure, beside Ray Train, and what it costs to be ready for one.

    python benchmarks/recovery.py [--quick] [--only NAME] [--system NAME] [--repeat N] [--output FOLDER]

Writes recovery.json, recovery.md and recovery.svg to doc/benchmarks, or to build/benchmarks with --quick, which leaves Ray
Train out. With --only the other measures of an earlier run on the same machine stay. The machine should have nothing else
to do.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from bench import recovery_rows, results
from bench.children import measure, work_folder
from bench.machine import describe_machine
from bench.measures import RECOVERY, load_measure
from bench.picture import draw_rows
from bench.rows import fill_rows
from bench.schedule import Turn, make_turns
from report import PUBLISHED, SCRATCH


def main() -> None:
    args = _parse()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    machine = describe_machine()
    measures = {name: load_measure(name) for name in args.only or RECOVERY}
    path = output / "recovery.json"
    document = results.load(path, machine) if args.only else results.new_document(machine)
    for each in measures.values():
        results.begin_measure(document, each.NAME, each.TITLE, each.UNITS, quick=args.quick)
    turns = make_turns(list(measures.values()), quick=args.quick, repeat=args.repeat)
    turns = [turn for turn in turns if args.system in (None, turn.system)]
    begun = time.monotonic()
    with work_folder() as work:
        for number, turn in enumerate(turns, 1):
            (name,) = turn.measures
            start = time.monotonic()
            print(f"[{number}/{len(turns)}] {turn.system}: {name}", end="", flush=True)
            folder = work / f"{number}"
            folder.mkdir()
            _measure(document, measures[name], turn, folder, quick=args.quick)
            print(f"  {time.monotonic() - start:.1f} s", flush=True)
            write_page(document, output)
    _tell(document, time.monotonic() - begun, output)


def write_page(document: results.Document, output: Path) -> None:
    """Write recovery.json with its rows, recovery.md and the picture."""
    document["rows"] = fill_rows(document, recovery_rows.ROWS)
    results.save(document, output / "recovery.json")
    (output / "recovery.md").write_text(recovery_rows.render_page(document), encoding="utf-8")
    draw_rows(document["rows"], output / "recovery.svg")


def _measure(document: results.Document, each: Any, turn: Turn, folder: Path, *, quick: bool) -> None:
    params = each.params(turn.system, quick)
    lines = measure(
        turn.system,
        {each.NAME: params},
        folder,
        timeout_s=each.TIMEOUT_S,
        environment=getattr(each, "ENVIRONMENT", {}),
    )
    for line in lines:
        results.add_samples(document, each.NAME, turn.system, params, line)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions, without Ray Train: does it all work?")
    parser.add_argument("--only", action="append", choices=RECOVERY, help="one measure; may be given again")
    parser.add_argument("--system", help="one system, such as raysgd_spare or ray_train")
    parser.add_argument("--repeat", type=int, help="repetitions of every measure, instead of each one's own number")
    parser.add_argument("--output", type=Path, help="folder for the results")
    return parser.parse_args()


def _tell(document: results.Document, took_s: float, output: Path) -> None:
    for row in document["rows"]:
        cell = row["cells"].get("raysgd", {})
        met = {True: "met", False: "MISSED", None: ""}[row["met"]]
        shown = cell.get("error") or f"{cell.get('value', '-')} {row['unit']}"
        failed = f", {cell['failed']} failed" if cell.get("failed") else ""
        print(f"{met:>7}  {row['title']}: {shown}{failed}  ({row['target'] or 'no target'})")
    for line in recovery_rows.list_failures(document):
        print(f" FAILED  {line}")
    print(f"{took_s / 60:.1f} minutes; {output / 'recovery.md'}")


if __name__ == "__main__":
    main()
