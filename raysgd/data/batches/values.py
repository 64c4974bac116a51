"""The values of batches, in dicts, lists and tuples at any depth: tensors, arrays, plain values.

Worker side; imports no framework.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raysgd.data.plan import describe_column
from raysgd.errors import ConfigError

_PLAIN = (type(None), bool, int, float, str, bytes)
#: Kinds of NumPy dtypes that are not numbers: strings, objects, times.
_NOT_NUMBERS = frozenset("SUOmM")
#: Up to this number, a floating-point type holds all integers.
_LARGEST_EXACT = {"float64": 2**53, "float32": 2**24, "float16": 2**11, "bfloat16": 2**8}
#: The keys and indices that lead to a value of a batch.
Path = tuple[Any, ...]


@dataclass(frozen=True)
class LabelSplit:
    """Splits a batch of columns into ``(features, label)``.

    Attributes:
        features: Feature columns. One column is taken as it is; several are stacked to (batch, num_features).
        label: The label column.
    """

    dataset: str
    features: tuple[str, ...]
    label: str

    def split(self, batch: Mapping[str, Any], stack: Callable[[list[Any]], Any]) -> tuple[Any, Any]:
        """Return features and label of a batch by column. ``stack`` makes one tensor of several columns.

        Raises:
            ConfigError: One of several feature columns does not have one number per row.
        """
        if len(self.features) == 1:
            return batch[self.features[0]], batch[self.label]
        for column in self.features:
            values = batch[column]
            if len(values.shape) != 1 or getattr(values.dtype, "kind", None) in _NOT_NUMBERS:
                held = f"rows of shape {tuple(values.shape[1:])}" if len(values.shape) != 1 else _kind_of(values)
                raise ConfigError(
                    f"{describe_column(self.dataset, column)} holds {held} and cannot be stacked with other feature columns, "
                    "which need one number per row. Give it as the only feature column, leave it out with "
                    "feature_columns=[...], or combine columns in collate_fn."
                )
        return stack([batch[column] for column in self.features]), batch[self.label]

    def describe(self, index: int) -> str:
        """Describe the features (0) or the label (1)."""
        if index == 1 or len(self.features) == 1:
            return describe_column(self.dataset, self.label if index == 1 else self.features[0])
        return f"feature columns {', '.join(map(repr, self.features))} of dataset {self.dataset!r}"


@dataclass(frozen=True)
class Origin:
    """The source of the values of batches, for messages.

    Attributes:
        kind: The columns of a table, the items of a map-style dataset, or what ``collate_fn`` returned.
        label_split: If batches are ``(features, label)``.
    """

    dataset: str
    kind: Literal["columns", "items", "collate_fn"]
    label_split: LabelSplit | None = None

    def describe(self, path: Path) -> str:
        """Describe the value at this path of a batch."""
        if self.kind == "columns" and path:
            if self.label_split is not None and isinstance(path[0], int):
                return self.label_split.describe(path[0])
            return describe_column(self.dataset, path[0])
        inside = "".join(f"[{key!r}]" for key in path)
        if self.kind == "items":
            return f"item{inside} of dataset {self.dataset!r}"
        return f"the batch{inside} that collate_fn returns for dataset {self.dataset!r}"

    @property
    def advice(self) -> str:
        """Say what to do about values that a framework has no type for."""
        if self.kind == "columns":
            return (
                "Leave it out with columns=[...] (with label_column: feature_columns=[...]), convert it to numbers before the "
                "run, or convert it in collate_fn, which gets NumPy arrays."
            )
        if self.kind == "items":
            return "Convert it to numbers, or leave it out, in collate_fn, which gets a list of rows."
        return "Convert it to numbers there, or leave it out."


def check_exact(origin: Origin, arrays: Mapping[str, NDArray[Any]], dtype: Any) -> None:
    """Check that the common type of stacked columns holds their integers.

    Raises:
        ConfigError: It would round one.
    """
    largest = _LARGEST_EXACT.get(getattr(dtype, "name", str(dtype).rpartition(".")[2]))
    if largest is None:
        return
    for column, values in arrays.items():
        if values.dtype.kind in "iu" and values.size and max(abs(int(values.min())), abs(int(values.max()))) > largest:
            raise ConfigError(
                f"{origin.describe((column,))} has integers above {largest}, which {dtype}, the common type of the features, "
                "would round: give dtypes=..., or leave the column out with feature_columns=[...]."
            )


def to_device(batch: Any, device: Any) -> Any:
    """Move every value that has a method ``to`` to ``device``; None leaves the batch as it is."""
    if device is None:
        return batch
    return map_leaves(lambda value: value.to(device, non_blocking=True) if hasattr(value, "to") else value, batch)


def map_leaves(change: Callable[[Any], Any], batch: Any) -> Any:
    """Apply ``change`` to every value in the batch's dicts, lists and tuples. A value with a method ``to`` counts as one."""
    if hasattr(batch, "to"):  # also a container that moves itself, such as a Hugging Face BatchEncoding
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_leaves(change, value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return rebuild(batch, [map_leaves(change, value) for value in batch])
    return change(batch)


def is_host(device: Any) -> bool:
    """Whether batches stay in the host's memory."""
    return device is None or _kind(device) == "cpu"


def is_cuda(device: Any) -> bool:
    """Whether this is a CUDA device in a form that torch takes: a `torch.device`, a name, or a number."""
    return isinstance(device, int) or _kind(device) == "cuda"


def _kind(device: Any) -> str:
    return str(getattr(device, "type", device)).partition(":")[0]


def remove_rows(one: Any, two: Any, dataset: str) -> Any:
    """Return a batch of 0 rows, given a batch of one row and a batch that has this row twice.

    A list or an axis of an array that is longer in ``two`` belongs to the rows and is emptied; all else is kept.

    Raises:
        ConfigError: The batch holds an object whose structure is unknown.
    """
    if isinstance(one, Mapping):
        return {key: remove_rows(value, two[key], dataset) for key, value in one.items()}
    if isinstance(one, (list, tuple)):
        if len(one) != len(two):
            return type(one)()
        return rebuild(one, [remove_rows(a, b, dataset) for a, b in zip(one, two, strict=True)])
    if hasattr(one, "shape"):
        grown = [a != b for a, b in zip(one.shape, two.shape, strict=True)]
        with contextlib.suppress(TypeError, KeyError, IndexError, ValueError):  # it has a shape but cannot be sliced
            return one[tuple(slice(0, 0) if has_grown else slice(None) for has_grown in grown)]
    elif isinstance(one, _PLAIN):
        return one
    raise ConfigError(
        f"this rank has no rows of dataset {dataset!r} in the last step, and raysgd cannot make an empty batch of the "
        f"{type(one).__name__} that collate_fn returns. Return tensors in dicts, lists or tuples, or give drop_last=True."
    )


def empty_batch(read: Callable[[Any], Any], row: int, dataset: str) -> Any:
    """Return a batch of 0 rows, made from batches of a sample row: ``collate_fn`` need not handle an empty input."""
    return remove_rows(read(range(row, row + 1)), read(np.full(2, row, np.int64)), dataset)


def writeable(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array, or a copy if it is a read-only view."""
    return array if array.flags.writeable else array.copy()


def copy_writeable_arrays(batch: Any) -> Any:
    """Copy all arrays that ``collate_fn`` could overwrite when it makes the next batch."""

    def copy(value: Any) -> Any:
        return value.copy() if isinstance(value, np.ndarray) and value.flags.writeable else value

    return map_leaves(copy, batch)


def stack_items(items: list[Any], dataset: str) -> Any:
    """Stack the items of a map-style dataset into one batch: the values in their dicts, lists and tuples, as NumPy arrays.

    Raises:
        ConfigError: The items differ in structure, shape or type.
    """
    try:
        return _stacked(items)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        # NumPy raises a RuntimeError for a tensor with a gradient.
        raise ConfigError(
            f"the rows of dataset {dataset!r} cannot be stacked: {error}. Give collate_fn, which gets a list of rows."
        ) from error


def _stacked(items: list[Any]) -> Any:
    first = items[0]
    if isinstance(first, Mapping):
        return {key: _stacked([item[key] for item in items]) for key in first}
    if isinstance(first, (list, tuple)):
        if any(len(item) != len(first) for item in items):
            raise ValueError("lists of different lengths")
        return rebuild(first, [_stacked([item[index] for item in items]) for index in range(len(first))])
    if any(isinstance(item, (str, bytes)) for item in items):
        if not all(isinstance(item, (str, bytes)) for item in items):
            raise TypeError("strings and other values in one place")
        return np.array(items, object)
    arrays = [np.asarray(item) for item in items]
    kinds = {array.dtype.kind for array in arrays}
    if len(kinds) > 1 and kinds not in ({"i", "f"}, {"u", "f"}):  # NumPy would change values, such as True to 1
        raise TypeError("values of " + " and ".join(sorted({str(array.dtype) for array in arrays})) + " in one place")
    return np.stack(arrays)


def cast(values: NDArray[Any], dtype: Any, where: str) -> NDArray[Any]:
    """Convert values to another NumPy type. ``where`` describes them in messages.

    Raises:
        ConfigError: The values cannot be converted, or are integers out of the type's range.
    """
    dtype = np.dtype(dtype)
    if values.size and values.dtype.kind in "iu" and dtype.kind in "iu":
        check_range(values, dtype, where, "give a wider type, or map the values to smaller ones")
    try:
        return values.astype(dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} holds {_kind_of(values)}, which cannot be converted to {dtype}: {error}."
        ) from error


def check_range(values: NDArray[Any], dtype: Any, where: str, advice: str) -> None:
    """Raise a ConfigError if one of these integers is out of the range of the integer type ``dtype``."""
    limits = np.iinfo(dtype)
    if values.min() < limits.min or values.max() > limits.max:
        raise ConfigError(f"{where} holds integers out of the range of {dtype}: {advice}.")


def unsupported_type(values: NDArray[Any], origin: Origin, path: Path, framework: str) -> ConfigError:
    """Return the error for values that a framework has no type for."""
    return ConfigError(
        f"{origin.describe(path)} holds {_kind_of(values)}, for which {framework} has no type. {origin.advice}"
    )


def _kind_of(values: NDArray[Any]) -> str:
    kind = str(values.dtype)
    if values.dtype == object:
        some = next((value for value in values.flat if value is not None), None)
        kind = f"{type(some).__name__} objects"
    return "strings" if values.dtype.kind in "SU" or kind in ("str objects", "bytes objects") else kind


def rebuild(container: Any, values: list[Any]) -> Any:
    """Return these values as a list, tuple or named tuple of the same type as ``container``."""
    return type(container)(*values) if hasattr(container, "_fields") else type(container)(values)
