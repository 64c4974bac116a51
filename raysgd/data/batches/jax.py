"""Batches as JAX takes them. Worker side; JAX is imported when the first batch is handed over.

Batches are made as NumPy arrays, perhaps in another thread, and put on a device in the loop's thread, since JAX's settings
are per thread. JAX and TensorFlow share the memory of arrays or copy it later, so arrays that ``collate_fn`` could overwrite
are copied at once. JAX arrays are read-only: on the CPU they may share the dataset's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.batches.values import (
    Origin,
    Path,
    cast,
    check_range,
    copy_writeable_arrays,
    empty_batch,
    rebuild,
    stack_columns,
    stack_items,
    unsupported_type,
    writeable,
)
from raysgd.data.order.epoch_order import Indices
from raysgd.data.reading.readers import ItemReader, TableReader
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class TableToArrays:
    """Makes dicts of NumPy arrays by column, tuples ``(features, label)``, or what ``collate_fn`` returns for such a dict."""

    origin: Origin
    reader: TableReader
    columns: Sequence[str]
    dtypes: Any
    collate_fn: Callable[[Any], Any] | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.origin.dataset)
        if self.collate_fn is not None:
            arrays = self.reader.arrays(rows, self.columns)
            return copy_writeable_arrays(
                self.collate_fn({column: writeable(array) for column, array in arrays.items()})
            )
        arrays = self.reader.arrays(rows, self.columns, dense=True)
        batch = {column: self._cast(column, array) for column, array in arrays.items()}
        return batch if self.origin.label_split is None else self.origin.label_split.split(batch, stack_columns)

    def _cast(self, column: str, array: NDArray[Any]) -> NDArray[Any]:
        dtype = self.dtypes.get(column) if isinstance(self.dtypes, Mapping) else self.dtypes
        return array if dtype is None else cast(array, dtype, self.origin.describe((column,)))


@dataclass(frozen=True)
class ItemsToArrays:
    """Makes batches of a map-style dataset's items: stacked, or by ``collate_fn``."""

    origin: Origin
    reader: ItemReader
    collate_fn: Callable[[Any], Any] | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.origin.dataset)
        items = self.reader.items(rows)
        if self.collate_fn is None:
            return stack_items(items, self.origin.dataset)
        return copy_writeable_arrays(self.collate_fn(items))


@dataclass(frozen=True)
class JaxPut:
    """Turns all NumPy arrays of a batch into JAX arrays; other values stay as they are. A `Transfer`.

    Attributes:
        origin: Where the values come from.
        device: A `jax.Device` or a `jax.sharding.Sharding`; None for JAX's default device.
    """

    origin: Origin
    device: jax.Device | jax.sharding.Sharding | None

    def prepare(self) -> None:
        """Nothing to prepare."""

    def begin(self, batch: Any) -> Any:
        """Return the batch: JAX's settings are those of the loop's thread, so `finish` does the work."""
        return batch

    def finish(self, begun: Any) -> Any:
        """Return the batch as JAX arrays.

        Raises:
            ConfigError: JAX has no type for a value, integers are out of range, or rows do not fit the sharding.
        """
        return self._put(begun, ())

    def _put(self, value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            return {key: self._put(part, (*path, key)) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return rebuild(value, [self._put(part, (*path, index)) for index, part in enumerate(value)])
        return self._array(value, path) if isinstance(value, np.ndarray) else value

    def _array(self, values: NDArray[Any], path: Path) -> jax.Array:
        import jax

        if values.size and values.dtype.kind in "iu":
            becomes = jax.dtypes.canonicalize_dtype(values.dtype)
            check_range(
                values, becomes, self.origin.describe(path), "set jax_enable_x64, or map the values to smaller ones"
            )
        try:
            put: jax.Array = self._on_device(values)
        except TypeError as error:
            raise unsupported_type(values, self.origin, path, "JAX") from error
        except ValueError as error:
            raise ConfigError(
                f"{self.origin.describe(path)}, of shape {values.shape}, cannot be put on {self.device}: "
                f"{str(error).splitlines()[0]} If this is the short last step, leave it out with drop_last=True."
            ) from error
        return put

    def _on_device(self, values: NDArray[Any]) -> Any:
        import jax

        if spans_workers(self.device):  # all workers' batches together are one global array
            make_global_array: Any = jax.make_array_from_process_local_data
            return make_global_array(self.device, values)
        return jax.device_put(values, self.device)


def spans_workers(device: Any) -> bool:
    """Whether the device is a sharding that includes devices of other processes."""
    return device is not None and not getattr(device, "is_fully_addressable", True)


def check_sharding(device: Any, drop_last: bool) -> None:
    """Raise a ConfigError if ranks could have batches of different lengths, from which JAX makes a different array on each."""
    if spans_workers(device) and not drop_last:
        raise ConfigError(
            "to_jax(device=...) is a sharding over the devices of several workers, which needs equally long batches on all "
            "ranks: give drop_last=True."
        )
