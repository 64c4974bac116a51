"""raysgd: distributed training on Ray from a single-machine train_func.

The public names are resolved on first use, so importing raysgd loads neither Ray nor a framework.
"""

import typing as _typing  # editors complete what has no underscore

if _typing.TYPE_CHECKING:
    from raysgd import (
        backends,
        callbacks,
        data,
        declarative,
        engine,
        errors,
        functions,
        jax,
        tensorflow,
        torch,
        tune_integration,
    )
    from raysgd.backends.base import Backend, BackendConfig, Coordinator
    from raysgd.backends.env import EnvConfig
    from raysgd.backends.horovod import HorovodConfig
    from raysgd.backends.jax import JaxConfig
    from raysgd.backends.none import NoneConfig
    from raysgd.backends.tensorflow import TensorflowConfig
    from raysgd.backends.torch import TorchConfig
    from raysgd.callbacks.base import Callback, Stop
    from raysgd.checkpoint.checkpoint import Checkpoint
    from raysgd.checkpoint.resharding import SavedArray
    from raysgd.config import CheckpointConfig, FailureConfig, RunConfig
    from raysgd.engine.accelerate import accelerate
    from raysgd.engine.config import EngineConfig
    from raysgd.engine.engine import Engine
    from raysgd.result import Event, Result, RunInfo, RunStatus
    from raysgd.runs.comparing import compare_runs
    from raysgd.session.api import (
        barrier,
        broadcast,
        data_parallel_rank,
        data_parallel_size,
        gather,
        get_dataset,
        get_datasets,
        in_worker,
        list_checkpoints,
        live_state,
        load_checkpoint,
        local,
        local_rank,
        local_world_size,
        node_rank,
        report,
        save_checkpoint,
        should_stop,
        world_rank,
        world_size,
    )
    from raysgd.session.media import Histogram, Image
    from raysgd.torch.devices import device
    from raysgd.train.templates import Finetuner, PreTrainer, TemplateSettings
    from raysgd.trainer.stream import ResultStream
    from raysgd.trainer.trainer import Trainer
    from raysgd.viewer.loaded_run import load_run

_NAMES_OF = {
    "raysgd.backends.base": ("Backend", "BackendConfig", "Coordinator"),
    "raysgd.backends.env": ("EnvConfig",),
    "raysgd.backends.horovod": ("HorovodConfig",),
    "raysgd.backends.jax": ("JaxConfig",),
    "raysgd.backends.none": ("NoneConfig",),
    "raysgd.backends.tensorflow": ("TensorflowConfig",),
    "raysgd.backends.torch": ("TorchConfig",),
    "raysgd.callbacks.base": ("Callback", "Stop"),
    "raysgd.checkpoint.checkpoint": ("Checkpoint",),
    "raysgd.checkpoint.resharding": ("SavedArray",),
    "raysgd.config": ("CheckpointConfig", "FailureConfig", "RunConfig"),
    "raysgd.engine.accelerate": ("accelerate",),
    "raysgd.engine.config": ("EngineConfig",),
    "raysgd.engine.engine": ("Engine",),
    "raysgd.result": ("Event", "Result", "RunInfo", "RunStatus"),
    "raysgd.runs.comparing": ("compare_runs",),
    "raysgd.session.api": (
        "barrier", "broadcast", "data_parallel_rank", "data_parallel_size", "gather", "get_dataset", "get_datasets", "in_worker",
        "list_checkpoints", "live_state", "load_checkpoint", "local", "local_rank", "local_world_size", "node_rank", "report",
        "save_checkpoint", "should_stop", "world_rank", "world_size",
    ),
    "raysgd.session.media": ("Histogram", "Image"),
    "raysgd.torch.devices": ("device",),
    "raysgd.train.templates": ("Finetuner", "PreTrainer", "TemplateSettings"),
    "raysgd.trainer.stream": ("ResultStream",),
    "raysgd.trainer.trainer": ("Trainer",),
    "raysgd.viewer.loaded_run": ("load_run",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
_PACKAGES = (
    "backends",
    "callbacks",
    "data",
    "declarative",
    "engine",
    "errors",
    "jax",
    "functions",
    "tensorflow",
    "torch",
    "tune_integration",
)

__all__ = [  # noqa: RUF022 - in the order of the documentation
    "Trainer", "ResultStream", "Result", "Checkpoint", "Event", "RunInfo", "RunStatus",
    "RunConfig", "FailureConfig", "CheckpointConfig",
    "TorchConfig", "HorovodConfig", "TensorflowConfig", "JaxConfig", "EnvConfig", "NoneConfig",
    "Backend", "BackendConfig", "Coordinator",
    "Callback", "Stop",
    "report", "Image", "Histogram", "save_checkpoint", "load_checkpoint", "list_checkpoints", "live_state", "SavedArray",
    "get_dataset", "get_datasets", "should_stop", "barrier", "broadcast", "gather", "device",
    "world_rank", "world_size", "local_rank", "local_world_size", "node_rank", "data_parallel_rank", "data_parallel_size",
    "in_worker", "local",
    "load_run", "compare_runs",
    "Engine", "EngineConfig", "accelerate", "PreTrainer", "Finetuner", "TemplateSettings",
    "backends", "callbacks", "data", "declarative", "engine", "errors", "jax", "functions", "tensorflow", "torch",
    "tune_integration",
]  # fmt: skip


if not _typing.TYPE_CHECKING:  # type checkers would take every name for a public one

    def __getattr__(name: str) -> _typing.Any:
        import importlib

        if name in _MODULE_OF:
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        elif name in _PACKAGES:
            value = importlib.import_module(f"raysgd.{name}")
        else:
            raise AttributeError(f"module 'raysgd' has no attribute {name!r}{_advice(name)}")
        globals()[name] = value
        return value


#: What to write for names that other libraries have.
_HINTS = {
    "ScalingConfig": "give num_workers=, cpus_per_worker=, gpus_per_worker= and resources_per_worker= to raysgd.Trainer itself",
    "TorchTrainer": "write raysgd.Trainer(num_workers, backend='torch')",
    "TensorflowTrainer": "write raysgd.Trainer(num_workers, backend='tensorflow')",
    "init": "raysgd.Trainer connects to Ray by itself",
    "get_context": "call raysgd.world_rank(), raysgd.world_size() and so on",
    "get_dataset_shard": "call raysgd.get_dataset(name).get_split()",
    "get_checkpoint": "call raysgd.load_checkpoint(), which returns the state or None",
    "rank": "call raysgd.world_rank()",
    "get_rank": "call raysgd.world_rank()",
    "log": "call raysgd.report(loss=...)",
    "prepare_model": "call raysgd.torch.prepare_model(model)",
    "prepare_data_loader": "call raysgd.torch.prepare_data_loader(loader)",
    "seed_everything": "give seed= to raysgd.Trainer",
}


def _advice(name: str) -> str:
    if name in _HINTS:
        return f"; {_HINTS[name]}"
    if name.startswith("__"):  # asked for by tools such as copy and inspect
        return ""
    import difflib

    close = difflib.get_close_matches(name, __all__, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def __dir__() -> list[str]:
    return __all__
