"""Batches of any make: dicts, lists and tuples of tensors, arrays and plain values. Worker side; imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def empty_batch(read: Callable[[Any], Any], row: int, dataset: str) -> Any:
    """A batch for a step in which this rank has no row; never made by giving user code nothing, but this row."""
    return without_rows(read(range(row, row + 1)), read(np.full(2, row, np.int64)), dataset)


def owned(array: NDArray[Any]) -> NDArray[Any]:
    """The array, or a copy where it is a view that cannot be written to."""
    return array if array.flags.writeable else array.copy()


def stack_items(items: list[Any], dataset: str) -> Any:
    """The items of a map-style dataset as one batch: what they hold in dicts, lists and tuples as NumPy arrays by row.

    Raises:
        ConfigError: They are not of one form, or of different shapes.
    """
    try:
        return _stacked(items)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"the rows of dataset {dataset!r} do not make a batch: {error}. Give collate_fn, which gets a list of rows."
        ) from error


def _stacked(items: list[Any]) -> Any:
    first = items[0]
    if isinstance(first, Mapping):
        return {key: _stacked([item[key] for item in items]) for key in first}
    if isinstance(first, (list, tuple)):
        if any(len(item) != len(first) for item in items):
            raise ValueError("lists of different lengths")
        return _like(first, [_stacked([item[index] for item in items]) for index in range(len(first))])
    if isinstance(first, (str, bytes)):
        return np.array(items, object)
    return np.stack([np.asarray(item) for item in items])


def no_type_for(held: NDArray[Any], column: str, framework: str, call: str) -> ConfigError:
    """What is raised for a column that a framework has no type for.

    Args:
        held: Some of its rows.
        column: As messages name it.
        framework: Its name.
        call: What makes the batches.
    """
    kind = str(held.dtype)
    if held.dtype == object:
        kind = f"{type(held.flat[0]).__name__} objects" if held.size else "objects"
    if held.dtype.kind in "SU" or kind in ("str objects", "bytes objects"):
        kind = "strings"
    return ConfigError(
        f"{column} holds {kind}, which {framework} has no type for. Leave it out with columns=[...], make it numbers before the "
        f"run, or give {call} a collate_fn, which gets NumPy arrays."
    )


def _like(container: Any, values: list[Any]) -> Any:
    return type(container)(*values) if hasattr(container, "_fields") else type(container)(values)
