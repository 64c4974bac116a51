"""A benchmark program of its own page: its arguments, its turns, and what it writes and tells."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from report import PUBLISHED, SCRATCH

from bench import results
from bench.baton import VARIABLE, Baton
from bench.children import MEASURE_TIMEOUT_S, measure, work_folder
from bench.machine import describe_machine
from bench.measures import load_measure
from bench.picture import draw_rows
from bench.rows import Row, fill_rows
from bench.schedule import Turn, at_once, make_turns
from bench.systems import missing_framework


class Page(Protocol):
    """A module with the rows of a table, and the page around it.

    It may have ``PACKAGES``, whose versions belong to the results beside those that always do.
    """

    ROWS: Sequence[Row]

    def render_page(self, document: results.Document) -> str: ...
    def list_failures(self, document: results.Document) -> list[str]: ...


def run_program(description: str, stem: str, names: Sequence[str], page: Page) -> None:
    """Parse the arguments, measure, and write ``stem``.json, .md and .svg.

    Args:
        description: For its help.
        stem: Of its files.
        names: Its measures.
        page: Its table and page.
    """
    args = _parse(description, names)
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    machine = describe_machine(getattr(page, "PACKAGES", ()))
    measures = {name: load_measure(name) for name in args.only or names}
    document = results.load(output / f"{stem}.json", machine) if args.only else results.new_document(machine)
    for each in measures.values():
        today = date.today().isoformat()
        results.begin_measure(document, each.NAME, each.TITLE, each.UNITS, quick=args.quick, measured=today)
    turns = make_turns(list(measures.values()), quick=args.quick, repeat=args.repeat)
    turns = _without_missing([turn for turn in turns if turn.system in (args.system or [turn.system])])
    begun = time.monotonic()
    with work_folder() as work:
        batches = at_once(turns, measures)
        for number, batch in enumerate(batches, 1):
            (name,) = batch[0].measures
            start = time.monotonic()
            print(f"[{number}/{len(batches)}] {', '.join(turn.system for turn in batch)}: {name}", end="", flush=True)
            folder = work / f"{number}"
            folder.mkdir()
            _measure(document, measures[name], batch, folder, quick=args.quick)
            print(f"  {time.monotonic() - start:.1f} s", flush=True)
            write_page(document, output, stem, page)
    _tell(document, page)
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes; {output / stem}.md")


def write_page(document: results.Document, output: Path, stem: str, page: Page) -> None:
    """Write the document with its rows, the page and the picture."""
    document["rows"] = fill_rows(document, page.ROWS)
    results.save(document, output / f"{stem}.json")
    (output / f"{stem}.md").write_text(page.render_page(document), encoding="utf-8")
    draw_rows(document["rows"], output / f"{stem}.svg")


def _measure(document: results.Document, each: Any, batch: Sequence[Turn], folder: Path, *, quick: bool) -> None:
    """Measure these systems, at once if there are several."""
    with Baton(len(batch)) as baton, ThreadPoolExecutor(len(batch)) as pool:

        def one(turn: Turn) -> list[dict[str, Any]]:
            own = folder / turn.system
            own.mkdir()
            timeout_s = getattr(each, "TIMEOUT_S", MEASURE_TIMEOUT_S)
            environment = {**getattr(each, "ENVIRONMENT", {}), VARIABLE: baton.address}
            sizes = {each.NAME: each.params(turn.system, quick)}
            try:
                return measure(turn.system, sizes, own, timeout_s=timeout_s, environment=environment)
            finally:
                baton.ended()

        for turn, lines in zip(batch, pool.map(one, batch), strict=True):
            for line in lines:
                results.add_samples(document, each.NAME, turn.system, each.params(turn.system, quick), line)


def _without_missing(turns: Sequence[Turn]) -> list[Turn]:
    """Those that can be measured here; the others are told."""
    missing = {turn.system: missing_framework(turn.system) for turn in turns}
    for system, framework in missing.items():
        if framework is not None:
            print(f"{system} is left out: {framework} is not installed")
    return [turn for turn in turns if missing[turn.system] is None]


def _parse(description: str, names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="little, once, without the slowest: does it all work?")
    parser.add_argument("--only", action="append", choices=names, help="one measure; may be given again")
    parser.add_argument("--system", action="append", help="one system, such as raysgd; may be given again")
    parser.add_argument("--repeat", type=int, help="repetitions of every measure, instead of each one's own number")
    parser.add_argument("--output", type=Path, help="folder for the results")
    return parser.parse_args()


def _tell(document: results.Document, page: Page) -> None:
    for row in document["rows"]:
        cell = row["cells"].get("raysgd", {})
        met = {True: "met", False: "MISSED", None: ""}[row["met"]]
        shown = cell.get("error") or f"{cell.get('value', '-')} {row['unit']}"
        failed = f", {cell['failed']} failed" if cell.get("failed") else ""
        print(f"{met:>7}  {row['title']}: {shown}{failed}  ({row['target'] or 'no target'})")
    for line in page.list_failures(document):
        print(f" FAILED  {line}")
