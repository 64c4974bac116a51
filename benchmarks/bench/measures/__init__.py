"""What is measured: a module each, with the same interface.

``NAME``, ``TITLE``, ``SYSTEMS``
    What it is called, and whom it compares.
``UNITS``
    The series it gives, with the unit of their samples.
``IS_FRESH``
    Whether each repetition needs processes of its own; measures that do not share one that is warm.
``REPEAT``
    Repetitions in a full run.
``TIMEOUT_S``, ``ENVIRONMENT``
    Seconds for one repetition (of those of recovery), and variables of the process it runs in, if it needs any.
``at_once(system)``
    Of those in which systems are up at once and take turns by themselves: those with the same answer are.
``params(system, quick)``
    Sizes, as plain data.
``run(system, params)``
    Does it once; returns samples by series. Runs in the driver; the train functions beside it run in workers.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bench.systems.base import System

#: Modules, in the order in which they run and are told.
NAMES = ("report_cost", "latency", "rate", "overhead", "exception", "start", "checkpoint", "ddp")
#: Those of what happens when something fails, of `benchmarks/recovery.py`.
RECOVERY = ("kill", "stop", "resize", "node", "reliability", "steady")
#: Those of how rows come to the loop, of `benchmarks/ingest.py`.
INGEST = ("ingest_files", "ingest_memory", "ingest_transformed", "ingest_images", "ingest_planning")
#: That of a search, of `benchmarks/tune.py`.
TUNE = ("tune_search",)
#: Those of the frameworks' groups, of `benchmarks/backends.py`.
BACKENDS = ("backend_start", "backend_allreduce", "backend_kill")
#: Those in which processes are killed. They start their systems themselves.
FRAGILE = (*RECOVERY, "backend_kill")
#: The two Ray Trains and raysgd, and who stands in for them where a quick run has to leave somebody out.
ALL = ("ray_train", "ray_train_tuned", "raysgd")
BOTH = ("ray_train", "raysgd")


class Measure(Protocol):
    """A module of this package."""

    NAME: str
    TITLE: str
    SYSTEMS: Sequence[str]
    QUICK_SYSTEMS: Sequence[str]
    UNITS: Mapping[str, str]
    IS_FRESH: bool
    REPEAT: int

    def params(self, system: str, quick: bool) -> dict[str, Any]: ...
    def run(self, system: System, params: dict[str, Any]) -> dict[str, list[float]]: ...


def load_measure(name: str) -> Measure:
    """The measure of that name."""
    module: Any = importlib.import_module(f"bench.measures.{name}")
    return module
