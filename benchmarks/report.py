"""Write the page and the pictures of the benchmarks from their results, without measuring anything.

    python benchmarks/report.py [FOLDER]

FOLDER holds results.json; doc/benchmarks by default.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench import results
from bench.machine import ROOT
from bench.pages.comparison import PAGE
from bench.picture import draw
from bench.table import fill_rows

PUBLISHED = ROOT / "doc" / "benchmarks"
#: Where quick runs go: their figures mean nothing and are not published.
SCRATCH = ROOT / "build" / "benchmarks"


def write_report(document: results.Document, folder: Path) -> None:
    """Write results.json with its rows, index.md and the pictures."""
    document["rows"] = fill_rows(document, PAGE.rows)
    results.save(document, folder / "results.json")
    (folder / "index.md").write_text(PAGE.render(document), encoding="utf-8")
    draw(document, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=PUBLISHED)
    folder = parser.parse_args().folder
    write_report(json.loads((folder / "results.json").read_text(encoding="utf-8")), folder)
    print(f"{folder / 'index.md'}")


if __name__ == "__main__":
    main()
