"""Batches as a `tf.data.Dataset`. Worker side; TensorFlow is imported when one is made.

tf.data takes batches from a generator. By itself it takes some ahead of the loop, which would then count as consumed
though a checkpoint was taken before; that is switched off, as is its own sharding: a share is one already. What it would
convert, or refuse, is refused here before it counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raysgd._util.imported import imported
from raysgd.data.batches import Batches
from raysgd.data.ledger import Indices
from raysgd.data.reader import ItemReader, TableReader
from raysgd.data.trees import Origin, Path, cast, empty_batch, kept, no_type_for, owned, stack_items
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import tensorflow as tf

_PLAIN = (bool, int, float, str, bytes)


def as_tf_dataset(batches: Batches[Any], origin: Origin, signature: Any) -> tf.data.Dataset:
    """The batches as a dataset of TensorFlow, whose iterators are theirs.

    Args:
        batches: Read by `TableToTF` or `ItemsToTF`.
        origin: Where their values come from.
        signature: Their `tf.TypeSpec`; None: that of the first batch, with any number of rows.

    Raises:
        ConfigError: There are no rows to tell it from.
    """
    import tensorflow as tf

    if signature is None:
        with _undisturbed():
            signature = _signature_of(batches.first_batch())
    alike = replace(batches, _read=_Alike(batches._read, signature, origin))
    dataset = tf.data.Dataset.from_generator(lambda: iter(alike), output_signature=signature)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return dataset.with_options(options)


@dataclass(frozen=True)
class TableToTF:
    """Columns as a dict of arrays of types that TensorFlow has, or what ``collate_fn`` makes of a dict of NumPy arrays."""

    origin: Origin
    reader: TableReader
    columns: Sequence[str]
    dtypes: Any
    collate_fn: Callable[[Any], Any] | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.origin.dataset)
        arrays = self.reader.arrays(rows, self.columns)
        if self.collate_fn is not None:
            made = kept(self.collate_fn({column: owned(array) for column, array in arrays.items()}))
            return _fit(made, self.origin, ())
        lists = [column for column, values in arrays.items() if values.dtype == object and not _is_text(values)]
        if lists:  # that may make one array
            arrays |= self.reader.arrays(rows, lists, dense=True)
        return {column: self._array(column, values) for column, values in arrays.items()}

    def _array(self, column: str, values: NDArray[Any]) -> NDArray[Any]:
        dtype = self.dtypes.get(column) if isinstance(self.dtypes, Mapping) else self.dtypes
        if dtype is not None and not _is_text(values):
            values = cast(values, dtype.as_numpy_dtype, self.origin.at((column,)))
        return _as_tf_takes_it(values, self.origin, (column,))


@dataclass(frozen=True)
class ItemsToTF:
    """Items of a map-style dataset, stacked, or what ``collate_fn`` makes of a list of them."""

    origin: Origin
    reader: ItemReader
    collate_fn: Callable[[Any], Any] | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.origin.dataset)
        items = self.reader.items(rows)
        batch = stack_items(items, self.origin.dataset) if self.collate_fn is None else kept(self.collate_fn(items))
        return _fit(batch, self.origin, ())


def as_dtypes(dtypes: Any) -> Any:
    """What was given as ``dtypes``, a dtype or a dict of them by column, as `tf.DType`.

    Raises:
        ConfigError: That is no type of numbers.
    """
    import tensorflow as tf

    if isinstance(dtypes, Mapping):
        return {column: as_dtypes(dtype) for column, dtype in dtypes.items()}
    try:
        dtype = None if dtypes is None else tf.as_dtype(dtypes)
    except TypeError:
        dtype = tf.string
    if dtype == tf.string:
        raise ConfigError(
            f"to_tf(dtypes={dtypes!r}): give a type of numbers, as tf.float32, or a dict of them by column."
        )
    return dtype


@dataclass(frozen=True)
class _Alike:
    """Reads batches, and refuses those that are not of the signature: TensorFlow would convert what they hold."""

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
                f"{self.origin.at(path)} holds {held}, and is to be {spec}, as in the first batch or in output_signature. "
                "Make all batches alike, as by collate_fn or dtypes=, or give output_signature=."
            )


def _is_of(value: Any, spec: Any) -> bool:
    """Whether TensorFlow takes a value as what ``spec`` says, without making something else of it."""
    import tensorflow as tf

    if isinstance(value, (dict, tuple)) or isinstance(spec, (dict, list, tuple)):
        return False
    if isinstance(value, np.ndarray):
        dtype = tf.string if value.dtype == object else tf.as_dtype(value.dtype)
        return isinstance(spec, tf.TensorSpec) and spec.dtype == dtype and spec.shape.is_compatible_with(value.shape)
    return bool(spec.is_compatible_with(value))


def _as_tf_takes_it(values: NDArray[Any], origin: Origin, path: Path) -> NDArray[Any]:
    """The values, if they are numbers or strings."""
    import tensorflow as tf

    if values.dtype == object:
        if not _is_text(values):
            raise no_type_for(values, origin, path, "TensorFlow")
        if any(value is None for value in values.flat):
            raise ConfigError(
                f"{origin.at(path)} has nulls among its strings, which TensorFlow has no value for; fill them in."
            )
    try:
        tf.as_dtype(values.dtype)
    except TypeError as error:
        raise no_type_for(values, origin, path, "TensorFlow") from error
    return values


def _fit(batch: Any, origin: Origin, path: Path) -> Any:
    """A batch as a generator may give it to tf.data, which takes any list for one tensor."""
    if isinstance(batch, Mapping):
        return {key: _fit(value, origin, (*path, key)) for key, value in batch.items()}
    if isinstance(batch, list) and batch and all(isinstance(value, _PLAIN) for value in batch):
        batch = np.array(batch, object if isinstance(batch[0], (str, bytes)) else None)
    if isinstance(batch, (list, tuple)):
        values = [_fit(value, origin, (*path, index)) for index, value in enumerate(batch)]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    if isinstance(batch, (bool, int, float)):
        batch = np.asarray(batch)  # TensorFlow would make 32 bits of it
    return _as_tf_takes_it(batch, origin, path) if isinstance(batch, np.ndarray) else batch


def _is_text(values: NDArray[Any]) -> bool:
    """Whether these are strings, or nulls among them."""
    if values.dtype != object:
        return values.dtype.kind in "SU"
    texts = [value is None or isinstance(value, (str, bytes)) for value in values.flat]
    return all(texts) and any(value is not None for value in values.flat)


def _signature_of(batch: Any) -> Any:
    """The type of such batches, of any number of rows."""
    if isinstance(batch, Mapping):
        return {key: _signature_of(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        values = [_signature_of(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return _spec_of(batch)


def _spec_of(leaf: Any) -> Any:
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
def _undisturbed() -> Iterator[None]:
    """What is drawn at random in here is drawn again afterwards: a look must not change what comes."""
    torch = imported("torch")
    states = random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(states[2])
