"""Compare raysgd of two checkouts on this machine, in turns: what does a change cost?

    python benchmarks/compare_checkouts.py BEFORE AFTER [--only NAME] [--repeat N] [--quick] [--output FILE]

Each checkout is measured by its own benchmarks, with the packages of this environment. Of a measure with several systems of
raysgd, such as kills with a spare and without, the first one is measured. Prints a table, and writes it as a
Markdown table with --output. A ratio above 1 means that the later checkout needs more of the unit, or does more a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
from bench.measures import BACKENDS, INGEST, NAMES, RECOVERY, TUNE

MEASURES = (*NAMES, *RECOVERY, *INGEST, *TUNE, *BACKENDS)
PROGRAM = """
import json, sys, tempfile
from pathlib import Path
from bench.children import measure
from bench.measures import load_measure
name, quick = sys.argv[1], sys.argv[2] == "quick"
each = load_measure(name)
system = next(known for known in each.systems_of(quick=quick) if known.startswith("raysgd"))
with tempfile.TemporaryDirectory() as folder:
    sizes = {name: each.params(system, quick)}
    lines = measure(system, sizes, Path(folder), timeout_s=each.timeout_s, environment=each.environment)
print("RESULT " + json.dumps({"units": dict(each.units), "lines": lines}))
"""


def main() -> None:
    args = _parse()
    checkouts = {"before": args.before.resolve(), "after": args.after.resolve()}
    rows = []
    for repetition in range(args.repeat):
        for name in args.only or MEASURES:
            for label in ("before", "after") if repetition % 2 == 0 else ("after", "before"):
                start = time.monotonic()
                rows += [
                    {"measure": name, "checkout": label, **row} for row in _measure(checkouts[label], name, args.quick)
                ]
                print(f"{repetition + 1}/{args.repeat} {name}, {label}: {time.monotonic() - start:.0f} s", flush=True)
    if {row["checkout"] for row in rows} != set(checkouts):
        sys.exit("nothing was measured in one of the checkouts")
    table = compare(pd.DataFrame(rows))
    print(table.to_string())
    if args.output:
        args.output.write_text(to_markdown(table), encoding="utf-8")


def compare(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the medians of both checkouts, their ratio, and the spread of the earlier one: interquartile range by median.

    Args:
        samples: A row for each sample, with the columns measure, series, unit, checkout and value.
    """
    keys = ["measure", "series", "unit"]
    groups = samples.groupby(["checkout", *keys], sort=False)["value"]
    figures = groups.quantile([0.25, 0.5, 0.75]).unstack().set_axis(["q1", "median", "q3"], axis="columns")
    before, after = (figures.loc[label] for label in ("before", "after"))
    table = pd.DataFrame({"before": before["median"], "after": after["median"]})
    table["ratio"] = table["after"] / table["before"]
    table["spread"] = (before["q3"] - before["q1"]) / before["median"].abs()
    table["samples"] = groups.count().loc["before"]
    return table


def to_markdown(table: pd.DataFrame) -> str:
    """Return the table of `compare` for a page."""
    names = ("measure", "series", "before", "after", "ratio", "quartiles of before", "samples")
    head = f"| {' | '.join(names)} |\n|{' --- |' * len(names)}\n"
    lines = [
        f"| {measure} | {series} | {row.before:.4g} {unit} | {row.after:.4g} {unit} | {row.ratio:.3f} "
        f"| ±{row.spread / 2:.1%} | {row.samples:.0f} |\n"
        for (measure, series, unit), row in table.iterrows()
    ]
    return head + "".join(lines)


def _measure(checkout: Path, name: str, quick: bool) -> list[dict[str, object]]:
    """Measure once, in the checkout's own code; return a row for each sample."""
    command = [sys.executable, "-c", PROGRAM, name, "quick" if quick else "full"]
    folder = checkout / "benchmarks"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(folder)])}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        print(f"  {name} in {checkout}: ended with status {done.returncode}", file=sys.stderr)
        return []
    result = json.loads(found[0].removeprefix("RESULT "))
    rows: list[dict[str, object]] = []
    for line in result["lines"]:
        if "error" in line:
            print(f"  {name} in {checkout}: {line['error']}", file=sys.stderr)
        for series, values in line.get("series", {}).items():
            unit = result["units"].get(series, "")
            rows += [{"series": series, "unit": unit, "value": value} for value in values]
    return rows


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the folder of the earlier checkout")
    parser.add_argument("after", type=Path, help="the folder of the later checkout")
    parser.add_argument("--only", action="append", choices=MEASURES, help="one measure; may be given again")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of every measure")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it all work?")
    parser.add_argument("--output", type=Path, help="file for the table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
