"""Measure a search: Ray Tune with raysgd's trials, compared with Ray Tune and Ray Train.

    python benchmarks/tune.py [--quick | --own] [--system NAME] [--repeat N] [--output FOLDER]

Writes tune.json, tune.md and tune.svg to doc/benchmarks, or to build/benchmarks with --quick. The machine should have
nothing else to do.
"""

from bench.measures import TUNE
from bench.pages.search import PAGE
from bench.program import run_program

if __name__ == "__main__":
    run_program(__doc__.splitlines()[0], TUNE, PAGE)
