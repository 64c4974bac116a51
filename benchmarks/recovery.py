"""Measure how soon training continues after a failure, compared with Ray Train, and what readiness costs.

    python benchmarks/recovery.py [--quick | --own] [--only NAME] [--system NAME] [--repeat N] [--output FOLDER]

Writes recovery.json, recovery.md and recovery.svg to doc/benchmarks, or to build/benchmarks with --quick, which leaves Ray
Train out. With --only the other measures of an earlier run on the same machine stay. The machine should have nothing else
to do.
"""

from bench.measures import RECOVERY
from bench.pages.recovery import PAGE
from bench.program import run_program

if __name__ == "__main__":
    run_program(__doc__.splitlines()[0], RECOVERY, PAGE)
