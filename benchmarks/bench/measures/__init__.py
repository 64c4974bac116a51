"""The measures, in modules by subject."""

from __future__ import annotations

import importlib

from bench.measures.base import Measure

_MODULES = {
    "reports": ("report_cost", "latency", "rate", "overhead", "latency_busy"),
    "runs": ("exception", "start", "checkpoint", "ddp"),
    "processes": ("report_cpu", "memory", "script"),
    "recovery": ("kill", "stop", "resize", "node", "reliability", "steady"),
    "cuts": ("cut",),
    "ingest": ("ingest_files", "ingest_memory", "ingest_transformed", "ingest_images", "ingest_planning"),
    "search": ("tune_search",),
    "backends": ("backend_start", "backend_allreduce", "backend_kill"),
    "gpu": ("gpu_step",),
}
#: The measures of `benchmarks/vs_ray_train.py`, in their order.
NAMES = (*_MODULES["reports"], *_MODULES["runs"], *_MODULES["processes"])
#: The measures of the other programs.
RECOVERY, INGEST = (*_MODULES["recovery"], *_MODULES["cuts"]), _MODULES["ingest"]
TUNE, BACKENDS = _MODULES["search"], _MODULES["backends"]
#: Measures that start their systems themselves, because they cause faults or measure that start.
FRAGILE = (*RECOVERY, "backend_kill", "script")


def load_measure(name: str) -> Measure:
    """Return the measure of that name."""
    module = next(module for module, names in _MODULES.items() if name in names)
    measure: Measure = getattr(importlib.import_module(f"bench.measures.{module}"), name.upper())
    return measure
