"""Resolves the Trainer's ``backend`` and ``backend_args`` to a `BackendConfig`. Runs in the driver.

Other distributions add backends by an entry point of the group ``raysgd.backends``: its name is the backend's name, its
object is the class of the backend's config. The entry point is imported when a Trainer asks for that name.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from raysgd.backends.base import BackendConfig
from raysgd.backends.env import EnvConfig
from raysgd.backends.horovod import HorovodConfig
from raysgd.backends.jax import JaxConfig
from raysgd.backends.none import NoneConfig
from raysgd.backends.tensorflow import TensorflowConfig
from raysgd.backends.torch import TorchConfig
from raysgd.config import from_mapping
from raysgd.errors import ConfigError

ENTRY_POINTS = "raysgd.backends"
_CONFIGS: dict[str, type[BackendConfig]] = {
    config.name: config for config in (TorchConfig, HorovodConfig, TensorflowConfig, JaxConfig, EnvConfig, NoneConfig)
}
_ALIASES = {"pytorch": "torch"}
_WRAPPED = "give backend='torch' and call raysgd.torch.prepare_model in train_func, which wraps the model for all ranks"
#: What to give for the names that other libraries use.
_HINTS = {
    **{
        name: f"{name} is a library of torch's process groups; give backend='torch', backend_args={{'backend': {name!r}}}. "
        "Without backend_args it is nccl with GPUs and gloo without"
        for name in ("nccl", "gloo")
    },
    **dict.fromkeys(("ddp", "fsdp"), _WRAPPED),
    **dict.fromkeys(("tf", "keras"), "give backend='tensorflow'"),
    "torchrun": "give backend='env', which sets the variables that torchrun sets and forms no group",
}


def resolve_backend(
    backend: str | BackendConfig, backend_args: BackendConfig | Mapping[str, Any] | None
) -> BackendConfig:
    """Return the config that ``backend`` and ``backend_args`` mean together.

    Raises:
        ConfigError: The name is unknown, the config is another backend's, a field is unknown, or an entry point does not
            give a `BackendConfig`.
    """
    if isinstance(backend, BackendConfig):
        if backend_args is None:
            return backend
        raise ConfigError(f"backend={backend!r} is a config already; leave out backend_args={backend_args!r}.")
    config_type = _config_type(backend)
    if backend_args is None:
        return config_type()
    if isinstance(backend_args, Mapping):
        return from_mapping(config_type, backend_args, config_type.__name__)
    if isinstance(backend_args, config_type):
        return backend_args
    raise ConfigError(
        f"backend_args={backend_args!r} does not fit backend={backend!r}; give a {config_type.__name__} or a dict of its "
        f"fields ({', '.join(field.name for field in dataclasses.fields(config_type))})."
    )


def _config_type(name: Any) -> type[BackendConfig]:
    known_name = _ALIASES.get(name, name) if isinstance(name, str) else None
    if known_name in _CONFIGS:
        return _CONFIGS[known_name]
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in _CONFIGS}
    if known_name in points:
        return _load(points[known_name])
    known = [*_CONFIGS, *sorted(points)]
    close = difflib.get_close_matches(str(name).lower(), known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    if isinstance(name, str) and name.lower() in _HINTS:
        raise ConfigError(f"backend={name!r} is not known: {_HINTS[name.lower()]}.")
    raise ConfigError(
        f"backend={name!r} is not known{hint}; give one of {', '.join(map(repr, known))} or a BackendConfig."
    )


def _load(point: EntryPoint) -> type[BackendConfig]:
    try:
        found = point.load()
    except Exception as error:  # importing another distribution's code may raise anything
        raise ConfigError(
            f"backend={point.name!r} is the entry point {point.value}, which cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, BackendConfig)):
        raise ConfigError(
            f"backend={point.name!r} is the entry point {point.value}, which is not a subclass of raysgd.BackendConfig."
        )
    return found
