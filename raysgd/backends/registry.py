"""From what the user gave as ``backend`` and ``backend_args`` to a `BackendConfig`. Driver side."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from raysgd.backends.base import BackendConfig
from raysgd.backends.none import NoneConfig
from raysgd.backends.torch import TorchConfig
from raysgd.config import from_mapping
from raysgd.errors import ConfigError

_CONFIGS: dict[str, type[BackendConfig]] = {"torch": TorchConfig, "none": NoneConfig}
_LATER = ("horovod", "tensorflow", "jax")


def resolve_backend(
    backend: str | BackendConfig, backend_args: BackendConfig | Mapping[str, Any] | None
) -> BackendConfig:
    """The config that ``backend`` and ``backend_args`` mean together.

    Raises:
        ConfigError: An unknown name, a config of another backend, an unknown field.
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
    if isinstance(name, str) and name in _CONFIGS:
        return _CONFIGS[name]
    if name in _LATER:
        raise ConfigError(f"backend={name!r} is not in this version; it has {', '.join(map(repr, _CONFIGS))}.")
    close = difflib.get_close_matches(str(name), list(_CONFIGS), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ConfigError(
        f"backend={name!r} is not known{hint}; give one of {', '.join(map(repr, _CONFIGS))} or a BackendConfig."
    )
