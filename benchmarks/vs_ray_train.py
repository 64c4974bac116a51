"""Compare raysgd with Ray Train, torchrun and bare Ray actors: the same work, in turns, on this machine.

    python benchmarks/vs_ray_train.py [--quick | --own] [--only NAME] [--system NAME] [--repeat N] [--output FOLDER]

Writes results.json, index.md and a picture to doc/benchmarks, or to build/benchmarks with --quick. With --only the other
measures of an earlier run on the same machine stay. The machine should have nothing else to do.
"""

from bench.measures import NAMES
from bench.pages.comparison import PAGE
from bench.program import run_program

if __name__ == "__main__":
    run_program(__doc__.splitlines()[0], NAMES, PAGE)
