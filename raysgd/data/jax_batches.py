"""Batches as JAX takes them. Worker side; JAX is imported when the first batch is made.

JAX arrays cannot be written to: on the CPU they may be the dataset's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.ledger import Indices
from raysgd.data.names import column_of
from raysgd.data.reader import ItemReader, TableReader
from raysgd.data.trees import empty_batch, map_leaves, no_type_for, owned, stack_items
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class ToJax:
    """Puts what a batch holds on ``device``, a `jax.Device` or a `jax.sharding.Sharding`; None: where JAX does by itself."""

    device: jax.Device | jax.sharding.Sharding | None

    def array(self, values: NDArray[Any], column: str, dtype: Any = None) -> jax.Array:
        """These values.

        Args:
            values: Rows of a column.
            column: As messages name it.
            dtype: What they become before; None keeps theirs, of which JAX makes 32 bits unless ``jax_enable_x64`` is set.

        Raises:
            ConfigError: They are no numbers, or are integers that would lose bits.
        """
        import jax

        if dtype is not None:
            values = values.astype(dtype, copy=False)
        _check_bits(values, jax.dtypes.canonicalize_dtype, column)
        try:
            put: jax.Array = jax.device_put(values, self.device)
        except TypeError as error:
            raise no_type_for(values, column, "JAX", "to_jax") from error
        return put

    def batch(self, batch: Any, dataset: str) -> Any:
        """All NumPy arrays in it, at any depth; what else ``collate_fn`` gives is left as it is."""
        where = f"what collate_fn gives for dataset {dataset!r}"
        return map_leaves(lambda leaf: self.array(leaf, where) if isinstance(leaf, np.ndarray) else leaf, batch)


@dataclass(frozen=True)
class TableToJax:
    """Columns as a dict of arrays, or what ``collate_fn`` makes of a dict of NumPy arrays."""

    name: str
    reader: TableReader
    columns: Sequence[str]
    dtypes: Any
    put: ToJax
    collate_fn: Callable[[Any], Any] | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.name)
        if self.collate_fn is None:
            arrays = self.reader.arrays(rows, self.columns, dense=True)
            return {
                column: self.put.array(array, column_of(self.name, column), self._dtype(column))
                for column, array in arrays.items()
            }
        arrays = self.reader.arrays(rows, self.columns)
        return self.put.batch(self.collate_fn({column: owned(array) for column, array in arrays.items()}), self.name)

    def _dtype(self, column: str) -> Any:
        return self.dtypes.get(column) if isinstance(self.dtypes, Mapping) else self.dtypes


@dataclass(frozen=True)
class ItemsToJax:
    """Items of a map-style dataset, stacked, or what ``collate_fn`` makes of a list of them."""

    name: str
    reader: ItemReader
    put: ToJax
    collate_fn: Callable[[Any], Any] | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.name)
        items = self.reader.items(rows)
        return self.put.batch(
            stack_items(items, self.name) if self.collate_fn is None else self.collate_fn(items), self.name
        )


def _check_bits(values: NDArray[Any], becomes: Callable[[Any], Any], column: str) -> None:
    """That integers which JAX cuts to 32 bits do not become others."""
    if values.dtype.kind not in "iu" or not values.size:
        return
    narrow = np.iinfo(becomes(values.dtype))
    if narrow.bits < values.dtype.itemsize * 8 and (values.min() < narrow.min or values.max() > narrow.max):
        raise ConfigError(
            f"{column} holds integers beyond {narrow.bits} bits, which JAX would cut off. Set jax_enable_x64, or give dtypes=."
        )
