"""Data: what was given to ``run(dataset=...)``, split among the workers, each row once per epoch through any failure.

`source` describes datasets on the driver, `plan` is what travels, `ledger` the order of rows and who takes which,
`dataset` and `shard` what a worker reads. `position` is what a checkpoint carries. Rows come from memory (`reader`), from
files (`files`, `file_reader`), or from a dataset that is executed meanwhile (`stream`, `stream_reader`). Nothing here
imports Ray: blocks are stored and fetched through callables.

Names resolve on first use: the TrainerActor takes `DatasetPlan` and `check_agreement` from here without loading NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.data.batches import Batches, Rows
    from raysgd.data.dataset import DataContext, WorkerDataset
    from raysgd.data.folds import to_cv
    from raysgd.data.plan import DatasetPlan
    from raysgd.data.position import check_agreement
    from raysgd.data.shard import Shard
    from raysgd.data.source import resolve_datasets

_HOME_OF = {
    "Batches": "batches",
    "DataContext": "dataset",
    "DatasetPlan": "plan",
    "Rows": "batches",
    "Shard": "shard",
    "WorkerDataset": "dataset",
    "check_agreement": "position",
    "resolve_datasets": "source",
    "to_cv": "folds",
}

__all__ = [
    "Batches",
    "DataContext",
    "DatasetPlan",
    "Rows",
    "Shard",
    "WorkerDataset",
    "check_agreement",
    "resolve_datasets",
    "to_cv",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
