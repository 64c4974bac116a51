"""Five functions: training and prediction with JAX on any number of devices, data and tensor parallel by one number.

The names are resolved on first use, and importing the package loads no JAX. Modules of the worker's side import it.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from raysgd.functions.deployer import Deployer
    from raysgd.functions.fit_result import FitResult
    from raysgd.functions.predictor import Predictor
    from raysgd.functions.stored_arrays import StoredArray, open_safetensors
    from raysgd.functions.trainer import Trainer

_MODULE_OF = {
    "Deployer": "raysgd.functions.deployer",
    "FitResult": "raysgd.functions.fit_result",
    "Predictor": "raysgd.functions.predictor",
    "StoredArray": "raysgd.functions.stored_arrays",
    "Trainer": "raysgd.functions.trainer",
    "open_safetensors": "raysgd.functions.stored_arrays",
}

__all__ = ["Deployer", "FitResult", "Predictor", "StoredArray", "Trainer", "open_safetensors"]


def __getattr__(name: str) -> _typing.Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
