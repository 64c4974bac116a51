"""Callbacks: what looks on while a run goes, shows it, logs it, and may end it early.

`base` has the contract, `runner` calls the hooks, and each other module holds one shipped callback. Names are resolved
when they are first used, so importing this package imports neither rich nor a logger's library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.callbacks.base import Callback, Stop
    from raysgd.callbacks.checks import callbacks_in, check_callbacks
    from raysgd.callbacks.csv_ import CsvCallback
    from raysgd.callbacks.defaults import default_callbacks
    from raysgd.callbacks.early_stopping import EarlyStoppingCallback
    from raysgd.callbacks.json_lines import JsonLinesCallback
    from raysgd.callbacks.mlflow_logger import MLflowCallback
    from raysgd.callbacks.print_ import PrintCallback
    from raysgd.callbacks.profiler import TorchProfilerCallback
    from raysgd.callbacks.progress import ProgressCallback
    from raysgd.callbacks.runner import CallbackRunner
    from raysgd.callbacks.tensorboard import TensorBoardCallback
    from raysgd.callbacks.wandb_logger import WandbCallback

__all__ = [
    "Callback",
    "CallbackRunner",
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
    "callbacks_in",
    "check_callbacks",
    "default_callbacks",
]

_MODULES = {
    "Callback": "base",
    "CallbackRunner": "runner",
    "CsvCallback": "csv_",
    "EarlyStoppingCallback": "early_stopping",
    "JsonLinesCallback": "json_lines",
    "MLflowCallback": "mlflow_logger",
    "PrintCallback": "print_",
    "ProgressCallback": "progress",
    "Stop": "base",
    "TensorBoardCallback": "tensorboard",
    "TorchProfilerCallback": "profiler",
    "WandbCallback": "wandb_logger",
    "callbacks_in": "checks",
    "check_callbacks": "checks",
    "default_callbacks": "defaults",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
