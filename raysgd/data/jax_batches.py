"""Batches as JAX takes them. Worker side; JAX is imported when the first batch is handed over.

Batches are made of NumPy arrays, perhaps in another thread, and put on a device in the loop's: JAX's settings belong to
threads. JAX and TensorFlow share the memory of arrays, or copy it some time later: arrays that collate_fn may write to
again are copied when it gives them. JAX arrays cannot be written to: on the CPU those of a table may be the dataset's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.ledger import Indices
from raysgd.data.reader import ItemReader, TableReader
from raysgd.data.trees import Origin, Path, cast, check_range, empty_batch, kept, like, no_type_for, owned, stack_items
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class TableToArrays:
    """Columns as a dict of NumPy arrays, or what ``collate_fn`` makes of such a dict."""

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
            return kept(self.collate_fn({column: owned(array) for column, array in arrays.items()}))
        arrays = self.reader.arrays(rows, self.columns, dense=True)
        return {column: self._cast(column, array) for column, array in arrays.items()}

    def _cast(self, column: str, array: NDArray[Any]) -> NDArray[Any]:
        dtype = self.dtypes.get(column) if isinstance(self.dtypes, Mapping) else self.dtypes
        return array if dtype is None else cast(array, dtype, self.origin.at((column,)))


@dataclass(frozen=True)
class ItemsToArrays:
    """Items of a map-style dataset, stacked, or what ``collate_fn`` makes of a list of them."""

    origin: Origin
    reader: ItemReader
    collate_fn: Callable[[Any], Any] | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.origin.dataset)
        items = self.reader.items(rows)
        return stack_items(items, self.origin.dataset) if self.collate_fn is None else kept(self.collate_fn(items))


@dataclass(frozen=True)
class JaxPut:
    """Makes JAX arrays of all NumPy arrays in a batch, at any depth; what else is in it is left as it is.

    Attributes:
        origin: Where the values come from.
        device: A `jax.Device` or a `jax.sharding.Sharding`; None: where JAX puts them by itself.
    """

    origin: Origin
    device: jax.Device | jax.sharding.Sharding | None

    def choose(self) -> None:
        """As `raysgd.data.batches.Copies`."""

    def begin(self, batch: Any) -> Any:
        """As `raysgd.data.batches.Copies`."""
        return batch

    def finish(self, begun: Any) -> Any:
        """The batch.

        Raises:
            ConfigError: What JAX has no type for, integers that would lose bits, or rows that do not fit the sharding.
        """
        return self._put(begun, ())

    def _put(self, value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            return {key: self._put(part, (*path, key)) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return like(value, [self._put(part, (*path, index)) for index, part in enumerate(value)])
        return self._array(value, path) if isinstance(value, np.ndarray) else value

    def _array(self, values: NDArray[Any], path: Path) -> jax.Array:
        import jax

        if values.size and values.dtype.kind in "iu":
            becomes = jax.dtypes.canonicalize_dtype(values.dtype)
            check_range(
                values, becomes, self.origin.at(path), "set jax_enable_x64, or make them smaller, as by an index"
            )
        try:
            put: jax.Array = self._on_device(values)
        except TypeError as error:
            raise no_type_for(values, self.origin, path, "JAX") from error
        except ValueError as error:
            raise ConfigError(
                f"{self.origin.at(path)}, of shape {values.shape}, cannot be put on {self.device}: "
                f"{str(error).splitlines()[0]} A last, short step has fewer rows: drop_last=True leaves it out."
            ) from error
        return put

    def _on_device(self, values: NDArray[Any]) -> Any:
        import jax

        if spans_workers(self.device):  # these are this worker's part of an array that all of them have together
            of_all: Any = jax.make_array_from_process_local_data
            return of_all(self.device, values)
        return jax.device_put(values, self.device)


def spans_workers(device: Any) -> bool:
    """Whether it is a sharding over devices of other processes too."""
    return device is not None and not getattr(device, "is_fully_addressable", True)


def check_sharding(device: Any, drop_last: bool) -> None:
    """Raises a ConfigError where ranks could bring parts of different lengths, of which JAX would make a different array each."""
    if spans_workers(device) and not drop_last:
        raise ConfigError(
            "to_jax(device=...) is a sharding over the devices of several workers, whose parts must be equally long: "
            "give drop_last=True."
        )
