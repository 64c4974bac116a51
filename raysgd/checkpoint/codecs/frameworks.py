"""Recognises the types of frameworks without importing any: codecs of arrays and tensors, and objects with a state_dict.

A value of NumPy, JAX or torch can only exist where that library is loaded already. A file asks for a library by the
first word of a tag: ``np.array`` or ``torch.tensor``. Wrappers of modules are recognised by the names of their classes.
"""

from __future__ import annotations

import collections
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from raysgd.checkpoint.codecs.leaves import Leaf

_NUMPY = "raysgd.checkpoint.codecs.numpy"
_JAX = "raysgd.checkpoint.codecs.jax"
_TORCH = "raysgd.checkpoint.codecs.torch"
_MAX_WRAPPERS = 16


def find_encoder(value: Any) -> Callable[[Any, Any], Any] | None:
    """Return the encoder of a value that belongs to a library, or None."""
    for library, module in (("torch", _TORCH), ("jax", _JAX), ("numpy", _NUMPY)):
        if library in sys.modules:
            encoder: Callable[[Any, Any], Any] | None = _load(module).find_encoder(value)
            if encoder is not None:
                return encoder
    return None


def find_decoder(tag: Any) -> Callable[[Any, Any], Any] | None:
    """Return the decoder of a tag that belongs to a library, or None."""
    module = {"np": _NUMPY, "torch": _TORCH}.get(str(tag).partition(".")[0])
    decoders: dict[str, Callable[[Any, Any], Any]] = _load(module).DECODERS if module else {}
    return decoders.get(tag)


def synchronize(leaves: Iterable[Leaf]) -> None:
    """Wait until the copies that the ``fill`` of these leaves started are done."""
    devices = {leaf.device for leaf in leaves if leaf.device is not None}
    if devices:
        _load(_TORCH).synchronize(devices)


@functools.cache
def _load(module: str) -> Any:
    return importlib.import_module(module)


def extract_state(value: Any) -> Any:
    """Return what is saved in place of an object: another object or plain state. None: the value itself is saved.

    ``__raysgd_unwrap__()`` of the value's class comes first, then its ``state_dict()`` without the prefixes of wrappers: a
    model wrapped for data parallelism or by ``torch.compile`` is saved as the bare model would be.
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


def extract_states(state: Any) -> Any:
    """Replace each object in ``state`` that has a ``state_dict()`` by that state, as a loaded checkpoint would hold it.

    Dicts, lists and tuples are searched. What holds no such object is returned itself, not a copy.
    """
    kind = type(state)
    if kind in (dict, collections.OrderedDict):
        values = [extract_states(value) for value in state.values()]
        return state if _are_same(values, state.values()) else kind(zip(state, values, strict=True))
    if kind is list or isinstance(state, tuple):
        values = [extract_states(value) for value in state]
        if _are_same(values, state):
            return state
        return kind(*values) if hasattr(state, "_fields") else kind(values)
    extracted = extract_state(state)
    return state if extracted is None else extracted


def _are_same(values: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(value is other for value, other in zip(values, others, strict=True))


def _without_prefixes(module: Any, state: Any) -> Any:
    for _ in range(_MAX_WRAPPERS):
        name = _wrapped_attribute(module)
        if name is None or not _all_start_with(state, f"{name}."):
            break
        state = _cut_prefix(state, f"{name}.")
        module = getattr(module, name)
    return state


def _wrapped_attribute(module: Any) -> str | None:
    """Return the attribute in which a wrapper holds the wrapped module; None if ``module`` is not a wrapper.

    An attribute ``module`` alone does not make a wrapper: a user's model may have a layer of that name.
    """
    names = [kind.__name__ for kind in type(module).__mro__]
    if any(name.endswith("DataParallel") for name in names) and hasattr(module, "module"):
        return "module"  # torch's DataParallel, DistributedDataParallel and FullyShardedDataParallel, and similar ones
    if "OptimizedModule" in names and hasattr(module, "_orig_mod"):
        return "_orig_mod"  # torch.compile
    return None


def _all_start_with(state: Any, prefix: str) -> bool:
    return (
        isinstance(state, dict)
        and bool(state)
        and all(isinstance(key, str) and key.startswith(prefix) for key in state)
    )


def _cut_prefix(state: Any, prefix: str) -> Any:
    cut: Any = collections.OrderedDict((key.removeprefix(prefix), value) for key, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:  # keyed by module, where "module" without a dot is the wrapped module
        inner = {f"{key}.": value for key, value in metadata.items()}
        cut._metadata = collections.OrderedDict(
            (key.removeprefix(prefix).removesuffix("."), value)
            for key, value in inner.items()
            if key.startswith(prefix)
        )
    return cut
