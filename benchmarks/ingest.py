"""Measure how fast rows come to the training loop, compared with Ray Train and plain pyarrow.

    python benchmarks/ingest.py [--quick] [--only NAME] [--system NAME] [--repeat N] [--output FOLDER]

Writes ingest.json, ingest.md and ingest.svg to doc/benchmarks, or to build/benchmarks with --quick. With --only the other
measures of an earlier run on the same machine stay. The machine should have nothing else to do.
"""

from bench.measures import INGEST
from bench.pages.ingest import PAGE
from bench.program import run_program

if __name__ == "__main__":
    run_program(__doc__.splitlines()[0], INGEST, PAGE)
