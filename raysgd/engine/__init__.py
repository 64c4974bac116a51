"""The engine: speed-ups and large models for torch, in five lines.

The names are resolved on first use, so that importing the package loads no torch.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from raysgd.engine.config import EngineConfig
    from raysgd.engine.model.memory_use import MemoryUse
    from raysgd.engine.planning import Candidate, Hardware, MemoryEstimate, Plan, plan, predict_memory

_MODULE_OF = {
    "Candidate": "raysgd.engine.planning",
    "EngineConfig": "raysgd.engine.config",
    "Hardware": "raysgd.engine.planning",
    "MemoryEstimate": "raysgd.engine.planning",
    "MemoryUse": "raysgd.engine.model.memory_use",
    "Plan": "raysgd.engine.planning",
    "plan": "raysgd.engine.planning",
    "predict_memory": "raysgd.engine.planning",
}

__all__ = [
    "Candidate",
    "EngineConfig",
    "Hardware",
    "MemoryEstimate",
    "MemoryUse",
    "Plan",
    "plan",
    "predict_memory",
]


def __getattr__(name: str) -> _typing.Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
