"""Batches as a `tf.data.Dataset`. Worker side; TensorFlow is imported when one is made.

tf.data takes batches from a generator. By itself it takes some ahead of the loop, which would then count as consumed
though a checkpoint was taken before; that is switched off, as is its own sharding: a share is one already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.batches import Batches
from raysgd.data.ledger import Indices
from raysgd.data.names import column_of
from raysgd.data.reader import ItemReader, TableReader
from raysgd.data.trees import empty_batch, map_leaves, no_type_for, owned, stack_items
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import tensorflow as tf


def as_tf_dataset(batches: Batches[Any], signature: Any) -> tf.data.Dataset:
    """The batches as a dataset of TensorFlow, whose iterators are theirs.

    Args:
        batches: Dicts, lists and tuples of NumPy arrays.
        signature: Their `tf.TypeSpec`; None: that of the first batch, with any number of rows.

    Raises:
        ConfigError: There are no rows to tell it from.
    """
    import tensorflow as tf

    signature = map_leaves(_spec_of, batches.first_batch()) if signature is None else signature
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return dataset.with_options(options)


@dataclass(frozen=True)
class TableToTF:
    """Columns as a dict of arrays of types that TensorFlow has, or what ``collate_fn`` makes of a dict of NumPy arrays."""

    name: str
    reader: TableReader
    columns: Sequence[str]
    dtypes: Any
    collate_fn: Callable[[Any], Any] | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.name)
        if self.collate_fn is not None:
            arrays = self.reader.arrays(rows, self.columns)
            return _fit(self.collate_fn({column: owned(array) for column, array in arrays.items()}), self.name)
        arrays = self.reader.arrays(rows, self.columns)
        lists = [column for column, values in arrays.items() if values.dtype == object and not _is_text(values)]
        if lists:  # that may make one array
            arrays |= self.reader.arrays(rows, lists, dense=True)
        return {
            column: as_tf_takes_it(values, column_of(self.name, column), self._dtype(column))
            for column, values in arrays.items()
        }

    def _dtype(self, column: str) -> Any:
        return self.dtypes.get(column) if isinstance(self.dtypes, Mapping) else self.dtypes


@dataclass(frozen=True)
class ItemsToTF:
    """Items of a map-style dataset, stacked, or what ``collate_fn`` makes of a list of them."""

    name: str
    reader: ItemReader
    collate_fn: Callable[[Any], Any] | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.name)
        items = self.reader.items(rows)
        return _fit(stack_items(items, self.name) if self.collate_fn is None else self.collate_fn(items), self.name)


def as_tf_takes_it(values: NDArray[Any], column: str, dtype: Any = None) -> NDArray[Any]:
    """These values, as an array of numbers or of strings.

    Args:
        values: Rows of a column.
        column: As messages name it.
        dtype: A `tf.DType`, or what NumPy takes for one; None keeps theirs.

    Raises:
        ConfigError: TensorFlow has no type for them.
    """
    import tensorflow as tf

    if values.dtype == object:
        if not _is_text(values):
            raise no_type_for(values, column, "TensorFlow", "to_tf")
        if any(value is None for value in values.flat):
            raise ConfigError(f"{column} has nulls among its strings, which TensorFlow has no value for; fill them in.")
    elif dtype is not None:
        values = values.astype(tf.as_dtype(dtype).as_numpy_dtype, copy=False)
    try:
        tf.as_dtype(values.dtype)
    except TypeError as error:
        raise no_type_for(values, column, "TensorFlow", "to_tf") from error
    return values


def _fit(batch: Any, dataset: str) -> Any:
    """A batch as a generator may give it to tf.data, which takes a list for one tensor."""
    if isinstance(batch, Mapping):
        return {key: _fit(value, dataset) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [_fit(value, dataset) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return (
        as_tf_takes_it(batch, f"what collate_fn gives for dataset {dataset!r}")
        if isinstance(batch, np.ndarray)
        else batch
    )


def _is_text(values: NDArray[Any]) -> bool:
    """Whether objects are strings, or nulls among them."""
    return all(value is None or isinstance(value, (str, bytes)) for value in values.flat)


def _spec_of(leaf: Any) -> Any:
    """The type of such leaves, of any number of rows."""
    import tensorflow as tf

    spec = tf.type_spec_from_value(leaf)
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec
