"""A benchmark program: its arguments, the turns of systems and measures, and the files it writes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from bench import results
from bench.children import measure, work_folder
from bench.machine import ROOT, describe_machine
from bench.measures import Measure, load_measure
from bench.picture import draw_rows
from bench.systems import TITLES, missing_framework
from bench.table import Page, fill_rows, list_failures, make_table, show_cell
from bench.turn_lock import TURN_LOCK_VARIABLE, TurnLock

PUBLISHED = ROOT / "doc" / "benchmarks"
#: The folder of quick runs: their figures mean nothing and are not published.
SCRATCH = ROOT / "build" / "benchmarks"


@dataclass(frozen=True)
class Turn:
    """One process that takes some measures of one system."""

    system: str
    measures: tuple[str, ...]
    repetition: int


def make_turns(measures: Sequence[Measure], *, quick: bool, repeat: int | None = None) -> list[Turn]:
    """Return all turns. Systems alternate within a repetition, and each repetition begins with another one.

    Measures that can share a warm process form one group; each other measure is a group of its own.
    """
    warm = [measure for measure in measures if not measure.is_fresh]
    groups = [[measure] for measure in measures if measure.is_fresh]
    turns = []
    for group in [warm, *groups] if warm else groups:
        times = repeat or (1 if quick else max(measure.repeat for measure in group))
        for number in range(times):
            turns += _one_round(group, number, quick)
    return turns


def at_once(turns: Sequence[Turn], measures: Mapping[str, Measure]) -> list[list[Turn]]:
    """Group the turns whose systems are measured at the same time; the order is that of each group's first turn."""
    batches: dict[tuple[object, ...], list[Turn]] = {}
    for number, turn in enumerate(turns):
        partners_of = measures[turn.measures[0]].partners_of
        key = (number,) if partners_of is None else (turn.measures, turn.repetition, partners_of(turn.system))
        batches.setdefault(key, []).append(turn)
    return list(batches.values())


def _one_round(group: Sequence[Measure], number: int, quick: bool) -> list[Turn]:
    systems = list(dict.fromkeys(name for measure in group for name in measure.systems_of(quick=quick)))
    first = number % len(systems)
    turns = []
    for system in systems[first:] + systems[:first]:
        names = tuple(measure.name for measure in group if system in measure.systems_of(quick=quick))
        turns.append(Turn(system, names, number))
    return turns


def run_program(description: str, names: Sequence[str], page: Page) -> None:
    """Parse the arguments, take the measures ``names``, and write the files of the page."""
    args = _parse(description, names)
    output = args.output or (SCRATCH if args.quick or args.own else PUBLISHED)
    machine = describe_machine(page.packages)
    measures = {name: load_measure(name) for name in args.only or names}
    document = results.load(output / f"{page.stem}.json", machine) if args.only else results.new_document(machine)
    for each in measures.values():
        today = date.today().isoformat()
        results.begin_measure(document, each.name, each.title, each.units, quick=args.quick, measured=today)
    turns = make_turns(list(measures.values()), quick=args.quick, repeat=1 if args.own else args.repeat)
    turns = _without_missing([turn for turn in turns if turn.system in (args.system or [turn.system])])
    if args.own:
        turns = [turn for turn in turns if turn.system.startswith("raysgd")]
    begun = time.monotonic()
    with work_folder() as work:
        batches = at_once(turns, measures)
        for number, batch in enumerate(batches, 1):
            start = time.monotonic()
            systems, taken = (", ".join(found) for found in ([turn.system for turn in batch], batch[0].measures))
            print(f"[{number}/{len(batches)}] {systems}: {taken}", end="", flush=True)
            folder = work / f"{number}"
            folder.mkdir()
            _measure(document, [measures[name] for name in batch[0].measures], batch, folder, quick=args.quick)
            print(f"  {time.monotonic() - start:.1f} s", flush=True)
            write_page(document, output, page)
    if args.own:
        published = results.read(PUBLISHED / f"{page.stem}.json")
        print(compare_with_published(document, published))
    else:
        _print_rows(document)
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes; {output / page.file_name}")


def write_page(document: results.Document, output: Path, page: Page) -> None:
    """Write the document with its rows, the page and the pictures."""
    document["rows"] = fill_rows(document, page.rows)
    results.save(document, output / f"{page.stem}.json")
    (output / page.file_name).write_text(page.render(document), encoding="utf-8")
    draw_rows(document["rows"], output / f"{page.stem}.svg")


def _measure(
    document: results.Document, measures: Sequence[Measure], batch: Sequence[Turn], folder: Path, *, quick: bool
) -> None:
    """Take these measures of the batch's systems, at the same time if there are several."""
    environment = {name: value for each in measures for name, value in each.environment.items()}
    with TurnLock(len(batch)) as turn_lock, ThreadPoolExecutor(len(batch)) as pool:

        def one(turn: Turn) -> list[dict[str, Any]]:
            own = folder / turn.system
            own.mkdir()
            params = {each.name: each.params(turn.system, quick) for each in measures}
            try:
                return measure(
                    turn.system,
                    params,
                    own,
                    timeout_s=max(each.timeout_s for each in measures),
                    environment={**environment, TURN_LOCK_VARIABLE: turn_lock.address},
                )
            finally:
                turn_lock.ended()

        for turn, lines in zip(batch, pool.map(one, batch), strict=True):
            for line in lines:
                params = load_measure(line["measure"]).params(turn.system, quick)
                results.add_samples(document, line["measure"], turn.system, params, line)


def _without_missing(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns of installed frameworks; print the others."""
    missing = {turn.system: missing_framework(turn.system) for turn in turns}
    for system, framework in missing.items():
        if framework is not None:
            print(f"{system} is left out: {framework} is not installed")
    return [turn for turn in turns if missing[turn.system] is None]


def _parse(description: str, names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, once, without the slowest: does it all work?"
    )
    parser.add_argument(
        "--own", action="store_true", help="raysgd alone, once, next to the published figures; nothing is published"
    )
    parser.add_argument("--only", action="append", choices=names, help="one measure; may be given again")
    parser.add_argument("--system", action="append", help="one system, such as raysgd; may be given again")
    parser.add_argument("--repeat", type=int, help="repetitions of every measure, instead of each one's own number")
    parser.add_argument("--output", type=Path, help="folder for the results")
    return parser.parse_args()


def compare_with_published(document: results.Document, published: results.Document | None) -> str:
    """Return a table of raysgd's figures, and next to each what is published of it and of the others. Pure."""
    before = {row["key"]: row for row in (published or {"rows": []})["rows"]}
    lines = []
    for row in document["rows"]:
        cells = before.get(row["key"], {"cells": {}})["cells"]
        others = [f"{TITLES[name]} {show_cell(cell, row['unit'])}" for name, cell in cells.items() if name != "raysgd"]
        ours = [show_cell(found.get("raysgd"), row["unit"]) for found in (row["cells"], cells)]
        lines.append((row["title"], *ours, ", ".join(others) or "-", row["target"] or "-"))
    table = make_table(("measure", "now, once", "published", "others, published", "target"), lines)
    if published is None:
        return f"{table}\nNothing is published.\n"
    day = max((entry.get("measured", "") for entry in published["measures"].values()), default="") or "an unknown day"
    is_same = published["machine"].get("processor") == document["machine"].get("processor")
    return f"{table}\nPublished on {day}{'' if is_same else ', measured on another processor'}.\n"


def _print_rows(document: results.Document) -> None:
    for row in document["rows"]:
        cell = row["cells"].get("raysgd", {})
        met = {True: "met", False: "MISSED", None: ""}[row["met"]]
        shown = cell.get("error") or f"{cell.get('value', '-')} {row['unit']}"
        failed = f", {cell['failed']} failed" if cell.get("failed") else ""
        print(f"{met:>7}  {row['title'].replace('`', '')}: {shown}{failed}  ({row['target'] or 'no target'})")
    for line in list_failures(document):
        print(f" FAILED  {line}")
