"""Compare raysgd with Ray Train, torchrun and bare Ray actors: the same work, in turns, on this machine.

    python benchmarks/vs_ray_train.py [--quick] [--only NAME] [--repeat N] [--output FOLDER]

Writes results.json, index.md and a picture to doc/benchmarks, or to build/benchmarks with --quick. With --only the other
measures of an earlier run on the same machine stay. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from bench import results
from bench.children import measure, work_folder
from bench.machine import describe_machine
from bench.measures import NAMES, load_measure
from bench.program import make_turns
from report import PUBLISHED, SCRATCH, write_report


def main() -> None:
    args = _parse()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    machine = describe_machine()
    chosen = [load_measure(name) for name in args.only or NAMES]
    document = results.load(output / "results.json", machine) if args.only else results.new_document(machine)
    for each in chosen:
        results.begin_measure(document, each.name, each.title, each.units, quick=args.quick)
    turns = make_turns(chosen, quick=args.quick, repeat=args.repeat)
    begun = time.monotonic()
    by_name = {each.name: each for each in chosen}
    with work_folder() as work:
        for number, turn in enumerate(turns, 1):
            params = {name: by_name[name].params(turn.system, args.quick) for name in turn.measures}
            start = time.monotonic()
            print(f"[{number}/{len(turns)}] {turn.system}: {', '.join(turn.measures)}", end="", flush=True)
            folder = work / f"{number}"
            folder.mkdir()
            environment = {k: v for name in params for k, v in by_name[name].environment.items()}
            for line in measure(turn.system, params, folder, environment=environment):
                name = line["measure"]
                results.add_samples(document, name, turn.system, params[name], line)
            print(f"  {time.monotonic() - start:.1f} s", flush=True)
            write_report(document, output)
    _print_rows(document, time.monotonic() - begun, output)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one repetition: does it all work?")
    parser.add_argument("--only", action="append", choices=NAMES, help="one measure; may be given again")
    parser.add_argument("--repeat", type=int, help="repetitions of every measure, instead of each one's own number")
    parser.add_argument("--output", type=Path, help="folder for the results")
    return parser.parse_args()


def _print_rows(document: results.Document, took_s: float, output: Path) -> None:
    for row in document["rows"]:
        cell = row["cells"].get("raysgd", {})
        met = {True: "met", False: "MISSED", None: ""}[row["met"]]
        shown = cell.get("error") or f"{cell.get('value', '-')} {row['unit']}"
        print(f"{met:>7}  {row['title'].replace('`', '')}: {shown}  ({row['target'] or 'no target'})")
    print(f"{took_s / 60:.1f} minutes; {output / 'index.md'}")


if __name__ == "__main__":
    main()
