"""Reads batches in the types of a framework: what `to_torch`, `to_jax` and `to_tf` have in common. Worker side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.batches.collating import Collator
from raysgd.data.batches.values import LabelSplit, Origin, Path, check_exact, empty_batch, stack_items
from raysgd.data.order.epoch_order import Indices
from raysgd.data.plan import check_columns
from raysgd.data.reading.readers import Arrays, ItemReader, TableReader
from raysgd.errors import ConfigError


class Conversion(ABC):
    """Makes a framework's batches of NumPy arrays. `BatchReader` calls it in the thread that makes batches."""

    def as_dtypes(self, dtypes: Any) -> Any:
        """Return the argument ``dtypes``, a dtype or a dict of them by column, in the framework's types.

        Raises:
            ConfigError: The framework does not take it as a dtype.
        """
        if isinstance(dtypes, Mapping):
            return {column: None if each is None else self.as_dtype(each) for column, each in dtypes.items()}
        return None if dtypes is None else self.as_dtype(dtypes)

    @abstractmethod
    def as_dtype(self, dtype: Any) -> Any:
        """Return one dtype; see `as_dtypes`."""

    def read(self, reader: TableReader, rows: Indices, columns: Sequence[str]) -> Arrays:
        """Return NumPy arrays by column."""
        return reader.arrays(rows, columns, dense=True)

    @abstractmethod
    def convert(self, values: NDArray[Any], dtype: Any, origin: Origin, path: Path) -> Any:
        """Convert a column to a type; None keeps the type of the values.

        Raises:
            ConfigError: The framework has no type for the values.
        """

    def stack_columns(self, columns: list[Any]) -> Any:
        """Stack converted columns of numbers to (batch, num_columns), in their common type."""
        return np.stack(columns, axis=1)

    def collate(self, items: list[Any], origin: Origin) -> Any:
        """Make a batch of the items of a map-style dataset."""
        return stack_items(items, origin.dataset)

    @abstractmethod
    def finish(self, batch: Any, origin: Origin) -> Any:
        """Return a batch that ``collate_fn`` has made in the framework's types. Later calls may overwrite its arrays."""


class PlainConversion(Conversion):
    """Leaves everything as it is: for batches that ``collate_fn`` makes for no framework."""

    def as_dtype(self, dtype: Any) -> Any:
        return dtype

    def convert(self, values: NDArray[Any], dtype: Any, origin: Origin, path: Path) -> NDArray[Any]:
        return values

    def finish(self, batch: Any, origin: Origin) -> Any:
        return batch


@dataclass(frozen=True)
class BatchReader:
    """Reads dicts by column, tuples ``(features, label)``, collated items, or what ``collate_fn`` makes of the rows.

    Attributes:
        origin: Where the values come from.
        reader: Reads the rows.
        columns: The columns to read; none for a map-style dataset.
        dtypes: A type for all columns, or a dict of types by column; None for those of the data.
        collate_fn: As in `DatasetShard.to_torch`; of a table, a `Collator`.
        conversion: Makes the framework's values.
    """

    origin: Origin
    reader: TableReader | ItemReader
    columns: list[str]
    dtypes: Any
    collate_fn: Callable[[Any], Any] | None
    conversion: Conversion

    def __call__(self, rows: Indices) -> Any:
        reader, conversion, origin = self.reader, self.conversion, self.origin
        if not len(rows):
            return empty_batch(self, reader.sample_row(), origin.dataset)
        if isinstance(reader, ItemReader):
            items = reader.items(rows)
            if self.collate_fn is None:
                return conversion.collate(items, origin)
            return conversion.finish(self.collate_fn(items), origin)
        if self.collate_fn is not None:
            return conversion.finish(self.collate_fn(reader.arrays(rows, self.columns)), origin)
        arrays = conversion.read(reader, rows, self.columns)
        batch = {
            column: conversion.convert(array, self._dtype_of(column), origin, (column,))
            for column, array in arrays.items()
        }
        if origin.label_split is None:
            return batch
        features, label = origin.label_split.split(batch, conversion.stack_columns)
        if self.dtypes is None and len(origin.label_split.features) > 1:
            check_exact(origin, {column: arrays[column] for column in origin.label_split.features}, features.dtype)
        return features, label

    def _dtype_of(self, column: str) -> Any:
        return self.dtypes.get(column) if isinstance(self.dtypes, Mapping) else self.dtypes


@dataclass(frozen=True)
class BatchContents:
    """The arguments of `to_torch`, `to_jax` or `to_tf`, the ``method``, that choose what batches hold."""

    method: str
    columns: Sequence[str] | None
    label_column: str | None
    feature_columns: Sequence[str] | None
    dtypes: Any
    collate_fn: Callable[[Any], Any] | None

    def read_from(self, dataset: str, reader: TableReader | ItemReader, conversion: Conversion) -> BatchReader:
        """Return what reads such batches.

        Raises:
            ConfigError: Arguments exclude each other, or do not fit the dataset.
        """
        self._check_compatible(dataset, reader)
        if isinstance(reader, ItemReader):
            origin = Origin(dataset, "items" if self.collate_fn is None else "collate_fn")
            return BatchReader(origin, reader, [], None, self.collate_fn, conversion)
        split = self._label_split(dataset, reader.columns) if self.label_column is not None else None
        if split is not None:
            names = [*split.features, split.label]
        else:
            names = reader.columns if self.columns is None else check_columns(dataset, self.columns, reader.columns)
        if isinstance(self.dtypes, Mapping):
            check_columns(dataset, self.dtypes, names, "dtypes")
        reader.check_numbers(names)
        origin = Origin(dataset, "columns" if self.collate_fn is None else "collate_fn", split)
        dtypes = conversion.as_dtypes(self.dtypes)
        collate = None if self.collate_fn is None else Collator(self.collate_fn, dataset)
        return BatchReader(origin, reader.select(names), names, dtypes, collate, conversion)

    def _check_compatible(self, dataset: str, reader: TableReader | ItemReader) -> None:
        method = self.method
        for argument in ("columns", "label_column", "feature_columns", "dtypes"):
            if getattr(self, argument) is None:
                continue
            if isinstance(reader, ItemReader):
                raise ConfigError(
                    f"{method}({argument}=...): the rows of dataset {dataset!r}, a map-style dataset, have no columns; "
                    "make the batch in collate_fn, which gets a list of rows."
                )
            if self.collate_fn is not None and argument != "columns":
                raise ConfigError(
                    f"{method}({argument}=..., collate_fn=...) exclude each other: collate_fn makes the batch; set "
                    + ("its types there." if argument == "dtypes" else "features and label there.")
                )
        if self.label_column is None and self.feature_columns is not None:
            raise ConfigError(
                f"{method}(feature_columns=...) needs label_column=... for batches (features, label). For dicts by column "
                "give columns=[...]."
            )
        if self.label_column is not None and self.columns is not None:
            raise ConfigError(
                f"{method}(columns=..., label_column=...) exclude each other: batches are (features, label); choose the "
                "features by feature_columns=[...]."
            )

    def _label_split(self, dataset: str, known: list[str]) -> LabelSplit:
        label = self.label_column
        given = f"{self.method}(label_column={label!r})"
        if not isinstance(label, str):
            raise ConfigError(f"{given} is not the name of a column; give one string.")
        check_columns(dataset, [label], known, "label_column")
        if self.feature_columns is None:
            features = [column for column in known if column != label]
        else:
            features = check_columns(dataset, self.feature_columns, known, "feature_columns")
        if not features:
            raise ConfigError(f"{given} has no feature column; give at least one.")
        if label in features:
            raise ConfigError(
                f"{given} is also in feature_columns: the model would be given the label. Leave it out of feature_columns."
            )
        if len(set(features)) < len(features):
            raise ConfigError(f"{self.method}(feature_columns={features}) has a column twice; give each column once.")
        return LabelSplit(dataset, tuple(features), label)
