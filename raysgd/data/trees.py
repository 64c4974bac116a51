"""Batches of any make: dicts, lists and tuples of tensors, arrays and plain values. Worker side; imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raysgd.errors import ConfigError

_PLAIN = (type(None), bool, int, float, str, bytes)


def to_device(batch: Any, device: Any) -> Any:
    """The batch with all that has a method ``to`` on ``device``; None leaves it where it is."""
    if device is None:
        return batch
    if hasattr(batch, "to"):  # also of a container that knows how
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return _like(batch, [to_device(value, device) for value in batch])
    return batch


def map_leaves(change: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with all that is in its dicts, lists and tuples changed; what has a method ``to`` is not looked into."""
    if hasattr(batch, "to"):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_leaves(change, value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return _like(batch, [map_leaves(change, value) for value in batch])
    return change(batch)


def is_host(device: Any) -> bool:
    """Whether batches stay in the host's memory."""
    return device is None or _kind(device) == "cpu"


def is_cuda(device: Any) -> bool:
    """Whether it is a CUDA device, as torch takes it: a `torch.device`, a name, or a number."""
    return isinstance(device, int) or _kind(device) == "cuda"


def _kind(device: Any) -> str:
    return str(getattr(device, "type", device)).partition(":")[0]


def without_rows(one: Any, two: Any, dataset: str) -> Any:
    """A batch of 0 rows, found by comparing a batch of one row with one that has this row twice.

    What grew from one to the other, a list or an axis of an array, belongs to the rows and is emptied; the rest is kept.

    Raises:
        ConfigError: The batch holds an object that cannot be looked into.
    """
    if isinstance(one, Mapping):
        return {key: without_rows(value, two[key], dataset) for key, value in one.items()}
    if isinstance(one, (list, tuple)):
        if len(one) != len(two):
            return type(one)()
        return _like(one, [without_rows(a, b, dataset) for a, b in zip(one, two, strict=True)])
    if hasattr(one, "shape"):
        grown = [a != b for a, b in zip(one.shape, two.shape, strict=True)]
        return one[tuple(slice(0, 0) if has_grown else slice(None) for has_grown in grown)]
    if isinstance(one, _PLAIN):
        return one
    raise ConfigError(
        f"this rank has no rows of dataset {dataset!r} in the last step, and the {type(one).__name__} that collate_fn "
        "gives cannot be emptied. Let it give tensors in dicts, lists or tuples, or read with drop_last=True."
    )


def _like(container: Any, values: list[Any]) -> Any:
    return type(container)(*values) if hasattr(container, "_fields") else type(container)(values)
