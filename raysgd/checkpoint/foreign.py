"""Finds the codecs of NumPy's, JAX's and torch's types without importing any of them.

A value of theirs can only exist where the library is loaded already, and a file asks for it by the first word of a
kind, ``np.array`` or ``torch.tensor``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.checkpoint.leaves import Leaf

_ARRAYS = "raysgd.checkpoint.arrays"
_JAX = "raysgd.checkpoint.jax_leaves"
_TORCH = "raysgd.checkpoint.torch_leaves"


def find_encoder(value: Any) -> Callable[[Any, Any], Any] | None:
    """The encoder of a value that belongs to a library, or None."""
    for library, module in (("torch", _TORCH), ("jax", _JAX), ("numpy", _ARRAYS)):
        if library in sys.modules:
            encoder: Callable[[Any, Any], Any] | None = _load(module).find_encoder(value)
            if encoder is not None:
                return encoder
    return None


def find_decoder(tag: Any) -> Callable[[Any, Any], Any] | None:
    """The decoder of a kind that belongs to a library, or None."""
    module = {"np": _ARRAYS, "torch": _TORCH}.get(str(tag).partition(".")[0])
    decoders: dict[str, Callable[[Any, Any], Any]] = _load(module).DECODERS if module else {}
    return decoders.get(tag)


def synchronize(leaves: Iterable[Leaf]) -> None:
    """Wait until the copies that these leaves' ``fill`` started are done."""
    devices = {leaf.device for leaf in leaves if leaf.device is not None}
    if devices:
        _load(_TORCH).synchronize(devices)


@functools.cache
def _load(module: str) -> Any:
    return importlib.import_module(module)
