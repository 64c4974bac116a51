"""Settings of frameworks that decide on the numbers that a program computes: read and written where a framework is loaded.

The driver reads what its script has changed, which travels with a run. A worker writes it before train_func, and writes its
own values again before the next run. Neither imports a framework for it, except for a setting that was changed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any

from raysgd._util.imports import imported

#: The values of each framework by the names of its settings.
Settings = dict[str, dict[str, Any]]

#: What a fresh process has, in the order to write it: later flags of torch set some of the earlier ones, or raise for a mixture.
_FRESH: Settings = {
    "torch": {
        "default_dtype": "float32",
        "deterministic_algorithms": "off",
        "float32_matmul_precision": "highest",
        "cudnn.deterministic": False,
        "cudnn.benchmark": False,
        "cuda.matmul.allow_tf32": False,
        "cudnn.allow_tf32": True,
        "fp32_precision": "none",
        "cudnn.fp32_precision": "none",
        "mkldnn.fp32_precision": "none",
        "cuda.matmul.fp32_precision": "none",
        "cudnn.conv.fp32_precision": "tf32",
        "cudnn.rnn.fp32_precision": "tf32",
        "mkldnn.matmul.fp32_precision": "none",
        "mkldnn.conv.fp32_precision": "none",
        "mkldnn.rnn.fp32_precision": "none",
    },
    "jax": {
        "jax_enable_x64": False,
        "jax_default_matmul_precision": None,
        "jax_default_prng_impl": "threefry2x32",
        "jax_threefry_partitionable": True,
        "jax_random_seed_offset": 0,
        "jax_numpy_dtype_promotion": "standard",
        "jax_numpy_rank_promotion": "allow",
        "jax_debug_nans": False,
        "jax_debug_infs": False,
        "jax_disable_jit": False,
    },
    "keras": {"floatx": "float32", "epsilon": 1e-7, "image_data_format": "channels_last", "dtype_policy": "float32"},
}

_UNREADABLE = object()


def read() -> Settings:
    """Return the settings of the frameworks that are loaded in this process."""
    found: Settings = {}
    for name, fresh in _FRESH.items():
        if (framework := imported(name)) is not None:
            values = {setting: _try_read(framework, setting) for setting in fresh}
            found[name] = {setting: value for setting, value in values.items() if value is not _UNREADABLE}
    return found


def read_changed(variables: Collection[str] = ()) -> Settings:
    """Return the settings of those loaded frameworks of which this process has changed one.

    Args:
        variables: Environment variables that workers get; a setting of JAX for which there is one is left to it.
    """
    found = {}
    for name, values in read().items():
        given = {key: value for key, value in values.items() if key.upper() not in variables}
        if any(value != _FRESH[name][key] for key, value in given.items()):
            found[name] = given
    return found


def write(settings: Settings) -> None:
    """Write what `read` or `read_changed` returned, here or in another process; imports frameworks that are installed."""
    for name, values in settings.items():
        if importlib.util.find_spec(name) is None:  # what runs here cannot use it
            continue
        framework = importlib.import_module(name)
        for setting in _FRESH[name]:
            # Those that are equal are left: torch refuses to read a setting by its older name once its newer one was written.
            if setting in values and _try_read(framework, setting) != values[setting]:
                _write(framework, setting, values[setting])


def fresh(names: Collection[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of a fresh process; without those of JAX that an environment variable decides on."""
    return {name: {key: value for key, value in _FRESH[name].items() if key.upper() not in environ} for name in names}


def _try_read(framework: Any, setting: str) -> Any:
    """Read a setting; other versions do not have all of them, and torch refuses to read one that was set by another name."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return _read(framework, setting)
    return _UNREADABLE


def _read(framework: Any, setting: str) -> Any:
    if framework.__name__ == "jax":
        value = getattr(framework.config, setting)
        return getattr(value, "value", value)  # some are members of an enumeration
    if framework.__name__ == "keras":
        policy = framework.config.dtype_policy().name
        return policy if setting == "dtype_policy" else getattr(framework.config, setting)()
    if setting == "default_dtype":
        return str(framework.get_default_dtype()).removeprefix("torch.")
    if setting == "deterministic_algorithms":
        if not framework.are_deterministic_algorithms_enabled():
            return "off"
        return "warn" if framework.is_deterministic_algorithms_warn_only_enabled() else "on"
    if setting == "float32_matmul_precision":
        return framework.get_float32_matmul_precision()
    return attrgetter(setting)(framework.backends)


def _write(framework: Any, setting: str, value: Any) -> None:
    if framework.__name__ == "jax":
        framework.config.update(setting, value)
    elif framework.__name__ == "keras":
        getattr(framework.config, f"set_{setting}")(value)
    elif setting == "default_dtype":
        framework.set_default_dtype(getattr(framework, value))
    elif setting == "deterministic_algorithms":
        framework.use_deterministic_algorithms(value != "off", warn_only=value == "warn")  # imports the compiler: 1.5 s
    elif setting == "float32_matmul_precision":
        framework.set_float32_matmul_precision(value)
    else:
        owner, _, name = setting.rpartition(".")
        setattr(attrgetter(owner)(framework.backends) if owner else framework.backends, name, value)
