"""Settings that are there for things which are not: refused rather than ignored. Each leaves this page when it works."""

from __future__ import annotations

import dataclasses
from typing import Any

from raysgd.config.run import CheckpointConfig, FailureConfig, RunConfig
from raysgd.config.scaling import ScalingConfig
from raysgd.errors import ConfigError

_PLANNED: dict[type, dict[str, str]] = {
    RunConfig: {"detached": "runs that outlive their driver"},
}


def check_planned(scaling: ScalingConfig, *configs: RunConfig | FailureConfig | CheckpointConfig) -> None:
    """Refuse what would have no effect yet.

    Raises:
        ConfigError: A setting that belongs to something planned, with a value other than its default.
    """
    for config in configs:
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        for name, what in _PLANNED.get(type(config), {}).items():
            value: Any = getattr(config, name)
            if value != defaults[name]:
                raise ConfigError(
                    f"{type(config).__name__}({name}={value!r}) is for {what}, not implemented yet; leave it at its "
                    f"default, {defaults[name]!r}."
                )
