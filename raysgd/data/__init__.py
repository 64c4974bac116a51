"""Datasets given to ``run(dataset=...)``: divided among the workers, each row once per epoch, through failures and resizes.

| package or module | role |
|---|---|
| `sources` | describes datasets on the driver and stores their rows |
| `plan` | the description that travels to the workers |
| `order` | the order of rows, which rank takes which rows, the position in a checkpoint |
| `dataset`, `shard` | what a worker reads from |
| `reading` | rows from memory and files |
| `streams` | rows of a lazy dataset, executed while it is read |
| `batches` | iteration, and the tensors of each framework |
| `cross_validation` | `to_cv` |

No module here imports Ray: blocks are stored and fetched through callables. Public names resolve on first use, so that
importing raysgd does not load NumPy.
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from raysgd.data.batches.batches import Batches, Rows
    from raysgd.data.cross_validation import to_cv
    from raysgd.data.dataset import WorkerDataset
    from raysgd.data.shard import DatasetShard
    from raysgd.data.sources.subsets import DatasetSubset

_MODULE_OF = {
    "Batches": "batches.batches",
    "DatasetShard": "shard",
    "DatasetSubset": "sources.subsets",
    "Rows": "batches.batches",
    "WorkerDataset": "dataset",
    "to_cv": "cross_validation",
}

__all__ = ["Batches", "DatasetShard", "DatasetSubset", "Rows", "WorkerDataset", "to_cv"]


if not _typing.TYPE_CHECKING:  # type checkers would take every name for a public one

    def __getattr__(name: str) -> _typing.Any:
        import importlib

        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
