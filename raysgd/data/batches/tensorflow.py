"""Batches as a `tf.data.Dataset`. Worker side; TensorFlow is imported when a dataset is made.

tf.data takes batches from a generator. By default it takes some ahead of the loop, and these would count as consumed in a
checkpoint. This module switches that off, and tf.data's sharding too, since a shard is already one worker's. Values that
TensorFlow would convert or refuse are refused here, before their batch counts as consumed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raysgd._util.imports import imported
from raysgd.data.batches.batches import Batches
from raysgd.data.batches.conversion import Conversion
from raysgd.data.batches.values import Origin, Path, cast, copy_writeable_arrays, map_leaves, unsupported_type
from raysgd.data.order.epoch_order import Indices
from raysgd.data.reading.readers import Arrays, TableReader
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import tensorflow as tf

_PLAIN = (bool, int, float, str, bytes)


def as_tf_dataset(batches: Batches[Any], origin: Origin, signature: Any) -> tf.data.Dataset:
    """Return the batches as a `tf.data.Dataset`; each of its iterators is one of the batches.

    Args:
        batches: Batches that `TFConversion` makes.
        origin: Where the values come from.
        signature: The `tf.TypeSpec` of a batch; None for that of the first batch, with any number of rows.

    Raises:
        ConfigError: There is no row to derive the signature from.
    """
    import tensorflow as tf

    if signature is None:
        with _random_state_kept():
            signature = map_leaves(_spec_of, batches.first_batch())
    checked = replace(batches, _read=_CheckedRead(batches._read, signature, origin))
    dataset = tf.data.Dataset.from_generator(lambda: iter(checked), output_signature=signature)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return dataset.with_options(options)


class TFConversion(Conversion):
    """Makes NumPy arrays of types that TensorFlow supports: numbers and strings."""

    def read(self, reader: TableReader, rows: Indices, columns: Sequence[str]) -> Arrays:
        arrays = reader.arrays(rows, columns)
        lists = [column for column, values in arrays.items() if values.dtype == object and not _is_text(values)]
        if lists:  # they may be equally long, and make one array
            arrays |= reader.arrays(rows, lists, dense=True)
        return arrays

    def as_dtype(self, dtype: Any) -> Any:
        import tensorflow as tf

        try:
            found = tf.as_dtype(dtype)
        except TypeError:
            found = tf.string
        if found == tf.string:
            raise ConfigError(
                f"to_tf(dtypes={dtype!r}) is not a type of numbers: give one such as tf.float32, or a dict of them by column."
            )
        return found

    def convert(self, values: NDArray[Any], dtype: Any, origin: Origin, path: Path) -> NDArray[Any]:
        if dtype is not None and not _is_text(values):
            values = cast(values, dtype.as_numpy_dtype, origin.describe(path))
        return _check_tf_type(values, origin, path)

    def collate(self, items: list[Any], origin: Origin) -> Any:
        return _as_tf_structure(super().collate(items, origin), origin, ())

    def finish(self, batch: Any, origin: Origin) -> Any:
        return _as_tf_structure(copy_writeable_arrays(batch), origin, ())


@dataclass(frozen=True)
class _CheckedRead:
    """Reads batches and refuses those that do not match the signature, because TensorFlow would convert their values."""

    read: Callable[[Indices], Any]
    signature: Any
    origin: Origin

    def __call__(self, rows: Indices) -> Any:
        batch = self.read(rows)
        self._check(batch, self.signature, ())
        return batch

    def _check(self, batch: Any, spec: Any, path: Path) -> None:
        if isinstance(spec, Mapping) and isinstance(batch, Mapping) and spec.keys() == batch.keys():
            for key in spec:
                self._check(batch[key], spec[key], (*path, key))
        elif isinstance(spec, (list, tuple)) and isinstance(batch, tuple) and len(spec) == len(batch):
            for index, (part, spec_of_part) in enumerate(zip(batch, spec, strict=True)):
                self._check(part, spec_of_part, (*path, index))
        elif not _is_of(batch, spec):
            held = f"{batch.dtype} of shape {batch.shape}" if hasattr(batch, "dtype") else f"a {type(batch).__name__}"
            raise ConfigError(
                f"{self.origin.describe(path)} holds {held}, but the first batch or output_signature has {spec}. Give all "
                "batches the same types by collate_fn or dtypes=, or give output_signature=."
            )


def _is_of(value: Any, spec: Any) -> bool:
    """Whether TensorFlow takes a value as ``spec`` without converting it."""
    import tensorflow as tf

    if isinstance(value, (dict, tuple)) or isinstance(spec, (dict, list, tuple)):
        return False
    if isinstance(value, np.ndarray):
        dtype = tf.string if value.dtype == object else tf.as_dtype(value.dtype)
        return isinstance(spec, tf.TensorSpec) and spec.dtype == dtype and spec.shape.is_compatible_with(value.shape)
    return bool(spec.is_compatible_with(value))


def _check_tf_type(values: NDArray[Any], origin: Origin, path: Path) -> NDArray[Any]:
    """Return the values, or raise a ConfigError if they are not numbers or strings."""
    import tensorflow as tf

    if values.dtype == object:
        if not _is_text(values):
            raise unsupported_type(values, origin, path, "TensorFlow")
        if any(value is None for value in values.flat):
            raise ConfigError(
                f"{origin.describe(path)} has nulls among its strings, for which TensorFlow has no value; fill them."
            )
    try:
        tf.as_dtype(values.dtype)
    except TypeError as error:
        raise unsupported_type(values, origin, path, "TensorFlow") from error
    return values


def _as_tf_structure(batch: Any, origin: Origin, path: Path) -> Any:
    """Convert a batch for tf.data, which takes a list of a generator as one tensor: lists become tuples or arrays."""
    if isinstance(batch, Mapping):
        return {key: _as_tf_structure(value, origin, (*path, key)) for key, value in batch.items()}
    if isinstance(batch, list) and batch and all(isinstance(value, _PLAIN) for value in batch):
        batch = np.array(batch, object if isinstance(batch[0], (str, bytes)) else None)
    if isinstance(batch, (list, tuple)):
        values = [_as_tf_structure(value, origin, (*path, index)) for index, value in enumerate(batch)]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    if isinstance(batch, (bool, int, float)):
        batch = np.asarray(batch)  # TensorFlow would convert a Python number to 32 bits
    return _check_tf_type(batch, origin, path) if isinstance(batch, np.ndarray) else batch


def _is_text(values: NDArray[Any]) -> bool:
    """Whether the values are strings, perhaps with nulls among them."""
    if values.dtype != object:
        return values.dtype.kind in "SU"
    texts = [value is None or isinstance(value, (str, bytes)) for value in values.flat]
    return all(texts) and any(value is not None for value in values.flat)


def _spec_of(leaf: Any) -> Any:
    """Return the `tf.TypeSpec` of values like this one, with any number of rows."""
    import tensorflow as tf

    spec = tf.type_spec_from_value(leaf)
    if not getattr(spec, "shape", None) or not spec.shape.rank:
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype) if isinstance(spec, tf.TensorSpec) else spec


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore the random generators at exit, so that reading the first batch early changes no later random number."""
    torch = imported("torch")
    states = random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(states[2])
