"""Training by a file: components by name, one loop, from YAML or Python.

The names are resolved on first use, so that importing the package loads no torch.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from raysgd.declarative.args import (
        CheckpointConfig,
        ComputeConfig,
        DataloaderConfig,
        DatasetConfig,
        DatasetSamplerConfig,
        HookConfig,
        LogConfig,
        LRSchedulerConfig,
        ModelConfig,
        OptimizerConfig,
        TrainerArgs,
    )
    from raysgd.declarative.checking import load_args
    from raysgd.declarative.entry import evaluate, export, merge_checkpoint, train
    from raysgd.declarative.hooks import AggregatedOutputs, TrainHook

__all__ = [
    "AggregatedOutputs",
    "CheckpointConfig",
    "ComputeConfig",
    "DataloaderConfig",
    "DatasetConfig",
    "DatasetSamplerConfig",
    "HookConfig",
    "LRSchedulerConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "TrainHook",
    "TrainerArgs",
    "evaluate",
    "export",
    "load_args",
    "merge_checkpoint",
    "train",
]

_MODULE_OF = {
    **dict.fromkeys(__all__, "args"),
    **dict.fromkeys(("AggregatedOutputs", "TrainHook"), "hooks"),
    **dict.fromkeys(("evaluate", "export", "merge_checkpoint", "train"), "entry"),
    "load_args": "checking",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(f"raysgd.declarative.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
