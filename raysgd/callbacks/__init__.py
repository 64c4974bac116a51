"""Callbacks: they follow a run, show or log its results, and may end it early.

Names are resolved on first use, so importing this package imports neither rich nor the library of a logger. Code of raysgd
imports the modules themselves: `raysgd.callbacks.base` has the contract, `raysgd.callbacks.runner` calls the hooks.
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from raysgd.callbacks.base import Callback, Stop
    from raysgd.callbacks.early_stopping import EarlyStoppingCallback
    from raysgd.callbacks.files import CsvCallback, JsonLinesCallback
    from raysgd.callbacks.mlflow import MLflowCallback
    from raysgd.callbacks.profiler import TorchProfilerCallback
    from raysgd.callbacks.progress.callback import ProgressCallback
    from raysgd.callbacks.progress.lines import PrintCallback
    from raysgd.callbacks.tensorboard import TensorBoardCallback
    from raysgd.callbacks.wandb import WandbCallback

_MODULES = {
    "Callback": "base",
    "CsvCallback": "files",
    "EarlyStoppingCallback": "early_stopping",
    "JsonLinesCallback": "files",
    "MLflowCallback": "mlflow",
    "PrintCallback": "progress.lines",
    "ProgressCallback": "progress.callback",
    "Stop": "base",
    "TensorBoardCallback": "tensorboard",
    "TorchProfilerCallback": "profiler",
    "WandbCallback": "wandb",
}

__all__ = [
    "Callback",
    "CsvCallback",
    "EarlyStoppingCallback",
    "JsonLinesCallback",
    "MLflowCallback",
    "PrintCallback",
    "ProgressCallback",
    "Stop",
    "TensorBoardCallback",
    "TorchProfilerCallback",
    "WandbCallback",
]


if not _typing.TYPE_CHECKING:  # type checkers would take every name for a public one

    def __getattr__(name: str) -> _typing.Any:
        import importlib

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
