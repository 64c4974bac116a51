"""What is saved in place of an object that knows its own state: modules, optimizers, schedulers, and their wrappers.

Runs in workers. Wrappers are known by the names of their classes, so that nothing is imported to recognise them.
"""

from __future__ import annotations

import collections
from typing import Any

_MAX_WRAPPERS = 16


def stand_in(value: Any) -> Any:
    """The object or plain state to save in place of ``value``, or None where it has none.

    ``__raysgd_unwrap__()`` of its class comes first, then ``state_dict()``, without the prefixes of the wrappers around
    a module: a model wrapped for data parallelism or by ``torch.compile`` is saved as the bare model would be.
    """
    if isinstance(value, type):
        return None
    unwrap = getattr(type(value), "__raysgd_unwrap__", None)
    if callable(unwrap):
        return unwrap(value)
    state_dict = getattr(value, "state_dict", None)
    if not callable(state_dict):
        return None
    return _without_prefixes(value, state_dict())


def _without_prefixes(module: Any, state: Any) -> Any:
    for _ in range(_MAX_WRAPPERS):
        name = _wrapped_attribute(module)
        if name is None or not _all_below(state, f"{name}."):
            break
        state = _cut_prefix(state, f"{name}.")
        module = getattr(module, name)
    return state


def _wrapped_attribute(module: Any) -> str | None:
    """Where a wrapper holds what it wraps.

    An attribute ``module`` alone does not make a wrapper: a user's model may have a layer of that name, and its keys
    are then its own.
    """
    names = [kind.__name__ for kind in type(module).__mro__]
    if any(name.endswith("DataParallel") for name in names) and hasattr(module, "module"):
        return "module"  # torch's DataParallel, DistributedDataParallel and FullyShardedDataParallel, and their likes
    if "OptimizedModule" in names and hasattr(module, "_orig_mod"):
        return "_orig_mod"  # torch.compile
    return None


def _all_below(state: Any, prefix: str) -> bool:
    return (
        isinstance(state, dict)
        and bool(state)
        and all(isinstance(key, str) and key.startswith(prefix) for key in state)
    )


def _cut_prefix(state: Any, prefix: str) -> Any:
    cut: Any = collections.OrderedDict((key.removeprefix(prefix), value) for key, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:  # has entries for the modules themselves: "module" stands for the wrapped one
        inner = {f"{key}.": value for key, value in metadata.items()}
        cut._metadata = collections.OrderedDict(
            (key.removeprefix(prefix).removesuffix("."), value)
            for key, value in inner.items()
            if key.startswith(prefix)
        )
    return cut
