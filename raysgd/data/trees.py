"""Batches of any make: dicts, lists and tuples of tensors, arrays and plain values. Worker side; imports no framework."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raysgd.data.names import column_of
from raysgd.errors import ConfigError

_PLAIN = (type(None), bool, int, float, str, bytes)
#: Where in a batch something is: the keys and indices that lead there.
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Origin:
    """Where the values of batches come from, for messages.

    Attributes:
        dataset: Its name.
        kind: From the columns of a table, the items of a map-style dataset, or what ``collate_fn`` made of either.
    """

    dataset: str
    kind: Literal["columns", "items", "collate_fn"]

    def at(self, path: Path) -> str:
        """What is at this place of a batch."""
        if self.kind == "columns" and path:
            return column_of(self.dataset, path[0])
        inside = "".join(f"[{key!r}]" for key in path)
        if self.kind == "items":
            return f"item{inside} of dataset {self.dataset!r}"
        return f"the batch{inside} that collate_fn makes of dataset {self.dataset!r}"

    @property
    def advice(self) -> str:
        """What can be done with what is of no use as it is."""
        if self.kind == "columns":
            return "Leave it out with columns=[...], make it numbers before the run, or give collate_fn, which gets NumPy arrays."
        if self.kind == "items":
            return "Give collate_fn, which gets a list of rows, and makes numbers of it or leaves it out."
        return "Make numbers of it there, or leave it out."


def to_device(batch: Any, device: Any) -> Any:
    """The batch with all that has a method ``to`` on ``device``; None leaves it where it is."""
    if device is None:
        return batch
    if hasattr(batch, "to"):  # also of a container that knows how
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return like(batch, [to_device(value, device) for value in batch])
    return batch


def map_leaves(change: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with all that is in its dicts, lists and tuples changed; what has a method ``to`` is not looked into."""
    if hasattr(batch, "to"):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_leaves(change, value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return like(batch, [map_leaves(change, value) for value in batch])
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
        return like(one, [without_rows(a, b, dataset) for a, b in zip(one, two, strict=True)])
    if hasattr(one, "shape"):
        grown = [a != b for a, b in zip(one.shape, two.shape, strict=True)]
        with contextlib.suppress(TypeError, KeyError, IndexError, ValueError):  # of what has a shape and no slices
            return one[tuple(slice(0, 0) if has_grown else slice(None) for has_grown in grown)]
    elif isinstance(one, _PLAIN):
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


def kept(batch: Any) -> Any:
    """What ``collate_fn`` made, with copies of all arrays that it may write to when it makes the next one."""

    def keep(value: Any) -> Any:
        return value.copy() if isinstance(value, np.ndarray) and value.flags.writeable else value

    return map_leaves(keep, batch)


def stack_items(items: list[Any], dataset: str) -> Any:
    """The items of a map-style dataset as one batch: what they hold in dicts, lists and tuples as NumPy arrays by row.

    Raises:
        ConfigError: They are not of one form, or of different shapes.
    """
    try:
        return _stacked(items)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:  # the last of a tensor with a gradient
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
        return like(first, [_stacked([item[index] for item in items]) for index in range(len(first))])
    if any(isinstance(item, (str, bytes)) for item in items):
        if not all(isinstance(item, (str, bytes)) for item in items):
            raise TypeError("strings and other values in one place")
        return np.array(items, object)
    arrays = [np.asarray(item) for item in items]
    kinds = {array.dtype.kind for array in arrays}
    if len(kinds) > 1 and kinds not in ({"i", "f"}, {"u", "f"}):  # NumPy would make other values of some
        raise TypeError("values of " + " and ".join(sorted({str(array.dtype) for array in arrays})) + " in one place")
    return np.stack(arrays)


def cast(values: NDArray[Any], dtype: Any, where: str) -> NDArray[Any]:
    """The values as another type.

    Args:
        values: Rows of a column.
        dtype: A NumPy dtype.
        where: Names them in messages.

    Raises:
        ConfigError: They cannot become that, or are integers that it has not.
    """
    dtype = np.dtype(dtype)
    if values.size and values.dtype.kind in "iu" and dtype.kind in "iu":
        check_range(values, dtype, where, "give a wider one, or make them smaller, as by an index")
    try:
        return values.astype(dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} holds {_kind_of(values)}, which cannot become {dtype}: {error}.") from error


def as_numpy_dtypes(dtypes: Any) -> Any:
    """What was given as ``dtypes``, a dtype or a dict of them by column, as `numpy.dtype`.

    Raises:
        ConfigError: That is none.
    """
    if isinstance(dtypes, Mapping):
        return {column: as_numpy_dtypes(dtype) for column, dtype in dtypes.items()}
    try:
        return None if dtypes is None else np.dtype(dtypes)
    except TypeError as error:
        raise ConfigError(
            f"dtypes={dtypes!r}: give what NumPy takes for a dtype, or a dict of such by column."
        ) from error


def check_range(values: NDArray[Any], dtype: Any, where: str, advice: str) -> None:
    """Raise a ConfigError where one of these integers is not one of the integer type ``dtype``."""
    limits = np.iinfo(dtype)
    if values.min() < limits.min or values.max() > limits.max:
        raise ConfigError(f"{where} holds integers beyond {dtype}, which would become others: {advice}.")


def no_type_for(values: NDArray[Any], origin: Origin, path: Path, framework: str) -> ConfigError:
    """What is raised for values that a framework has no type for."""
    return ConfigError(
        f"{origin.at(path)} holds {_kind_of(values)}, which {framework} has no type for. {origin.advice}"
    )


def _kind_of(values: NDArray[Any]) -> str:
    kind = str(values.dtype)
    if values.dtype == object:
        some = next((value for value in values.flat if value is not None), None)
        kind = f"{type(some).__name__} objects"
    return "strings" if values.dtype.kind in "SU" or kind in ("str objects", "bytes objects") else kind


def like(container: Any, values: list[Any]) -> Any:
    """Such a list, tuple or named tuple, of these values."""
    return type(container)(*values) if hasattr(container, "_fields") else type(container)(values)
