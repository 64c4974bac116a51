"""Measure each backend and its framework alone, launched by its own launcher or as plain processes.

    python benchmarks/backends.py [--quick | --own] [--only NAME] [--system NAME] [--repeat N] [--output FOLDER]

Writes backends.json, backends.md and backends.svg to doc/benchmarks, or to build/benchmarks with --quick. A framework that is
not installed is left out. With --only the other measures of an earlier run on the same machine stay. The machine should have
nothing else to do.
"""

from bench.measures import BACKENDS
from bench.pages.backends import PAGE
from bench.program import run_program

if __name__ == "__main__":
    run_program(__doc__.splitlines()[0], BACKENDS, PAGE)
