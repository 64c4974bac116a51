"""`resolve_datasets`: turns what was given to ``run(dataset=...)`` into a plan, and stores its rows. Driver side.

Types of Ray, pandas and torch are recognized by the names of their classes, so that none of them is imported for a dataset
that does not need it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from raysgd._util.text import with_article
from raysgd.data.plan import UNNAMED, DatasetPlan, Source
from raysgd.data.sources.column_types import common_schema_of_blocks, nulls_of_table
from raysgd.data.sources.memory import (
    arrow_blocks,
    blocks_of_arrays,
    blocks_of_rows,
    schema_of_hugging_face,
    table_of_frame,
    table_of_hugging_face,
)
from raysgd.data.sources.subsets import DatasetSubset, FoldedDataset
from raysgd.data.streams.stream import Stream, inline_stream
from raysgd.errors import ConfigError, SerializationError

Put = Callable[[Any], Any]
#: Returns the stream that executes a lazy `ray.data.Dataset` while it is read.
StartStream = Callable[[Any], Stream]

_ALLOWED = (
    "a path or URI or a list of them, a pyarrow Dataset, Table or RecordBatch, a pandas DataFrame, a dict of equally long "
    "NumPy arrays or torch tensors (also nested in dicts, lists and tuples), a list of dicts, a Hugging Face Dataset, "
    "a map-style torch Dataset or anything else with __len__ and __getitem__, a ray.data.Dataset; a dict of these by name; or "
    "for cross-validation a tuple of these or of (train, validation) pairs, as raysgd.data.to_cv makes them"
)

_COLUMN = "a column without a name; give {'x': array}"
_UNNAMED_COLUMN = "one column; give a table, such as series.to_frame()"
#: Classes that are not datasets, although some have __len__ and __getitem__: their package, their name, what to give.
_NOT_ROWS = (
    ("numpy", "ndarray", _COLUMN),
    ("torch", "Tensor", _COLUMN),
    ("pyarrow", "Array", _COLUMN),
    ("pyarrow", "ChunkedArray", _COLUMN),
    ("pyarrow", "Schema", "which has no rows; give a Table"),
    ("pandas", "Series", _UNNAMED_COLUMN),
    ("pandas", "Index", _UNNAMED_COLUMN),
    ("pandas", "GroupBy", "whose items are groups; give the DataFrame"),
    ("polars", "Series", _UNNAMED_COLUMN),
    ("polars", "DataFrame", "which raysgd cannot read; give frame.to_arrow()"),
    ("polars", "LazyFrame", "which raysgd cannot read; give frame.collect().to_arrow()"),
    ("scipy", "sparray", "a sparse matrix; give {'x': matrix.toarray()}"),
    ("scipy", "spmatrix", "a sparse matrix; give {'x': matrix.toarray()}"),
    ("datasets", "IterableDataset", "which cannot be split among workers; give a Dataset, or the paths of its files"),
    (
        "torch",
        "IterableDataset",
        "an iterable torch Dataset, which cannot be split among workers; give a map-style one",
    ),
    ("torch", "DataLoader", "which makes batches; give what it reads, loader.dataset"),
    ("torch", "Module", "a model; make models in train_func"),
    ("tensorflow", "DatasetV2", "which cannot be split among workers; give arrays, or the paths of its files"),
)


def resolve_datasets(given: Any, put: Put, start: StartStream = inline_stream, session: Any = None) -> DatasetPlan:
    """Describe the datasets of a run, and store their rows.

    The index of a DataFrame is left out: only its columns are data. A lazy `ray.data.Dataset` is executed again in each
    epoch, with the order of its rows preserved; the blocks of a materialized one are used as they are. An object that is
    given in several places is stored once.

    Args:
        given: One dataset, a dict of datasets by name, a tuple for cross-validation, or None.
        put: Stores an object for the workers and returns what they fetch it by: `ray.put`; the identity in a world of
            one.
        start: Returns the stream of a lazy `ray.data.Dataset`; by default the reader's process executes it.
        session: Identifies the store behind ``put``: subsets of a dataset that this store holds are not stored again.

    Raises:
        ConfigError: The argument is not a dataset; the message says what was given and what is allowed.
        SerializationError: A map-style dataset cannot be pickled.
    """
    resolver = _Resolver(put, start, session)
    if given is None:
        return DatasetPlan()
    if isinstance(given, tuple):
        return resolver.folds(given)
    if isinstance(given, Mapping) and not _is_columns(given):
        return resolver.named(given)
    return DatasetPlan({UNNAMED: resolver.source(UNNAMED, given)})


@dataclass
class _Resolver:
    put: Put
    start: StartStream
    session: Any
    # By id. The object itself is kept, so that its id is not reused.
    done: dict[int, tuple[Any, Source]] = field(default_factory=dict)

    def named(self, given: Mapping[Any, Any]) -> DatasetPlan:
        if not given:
            raise ConfigError(f"dataset={{}} is empty; give {_ALLOWED}.")
        for name in given:
            if not isinstance(name, str) or not name:
                raise ConfigError(f"dataset has the name {name!r}; give a string that is not empty.")
        return DatasetPlan({name: self.source(name, one) for name, one in given.items()})

    def folds(self, given: tuple[Any, ...]) -> DatasetPlan:
        if not given:
            raise ConfigError("dataset=() is empty; give a tuple of datasets or of (train, validation) pairs.")
        sources: dict[str, Source] = {}
        folds: list[str | tuple[str, str]] = []
        for number, fold in enumerate(given):
            if not isinstance(fold, tuple):
                sources[str(number)] = self.source(str(number), fold)
                folds.append(str(number))
                continue
            if len(fold) != 2:
                raise ConfigError(f"dataset[{number}] is a tuple of {len(fold)}; give a (train, validation) pair.")
            pair = (f"{number}/train", f"{number}/validation")
            sources |= {name: self.source(name, one) for name, one in zip(pair, fold, strict=True)}
            folds.append(pair)
        return DatasetPlan(sources, tuple(folds))

    def source(self, name: str, given: Any) -> Source:
        if id(given) not in self.done:
            self.done[id(given)] = given, self._resolve(name, given)
        return self.done[id(given)][1]

    def _resolve(self, name: str, given: Any) -> Source:
        if isinstance(given, DatasetSubset):
            return given.source(*self._resolve_whole(name, given.whole))
        if (files := _files(name, given)) is not None:
            return files
        if _is(given, "ray.data", "MaterializedDataset"):
            return _from_ray(name, given)
        if is_lazy(given):
            return Source("stream", (self.start(given),), ())
        if (table := _table(name, given)) is not None:
            schema = schema_of_hugging_face(name, given, table.schema) if _is(given, "datasets", "Dataset") else None
            return replace(self._store("arrow", arrow_blocks(name, table, schema)), nulls=nulls_of_table(table))
        if isinstance(given, Mapping) and _is_columns(given):
            return self._store("arrays", blocks_of_arrays(name, dict(_leaves(given))))
        if isinstance(given, list) and given and all(isinstance(row, Mapping) for row in given):
            return self._store("arrays", blocks_of_rows(name, given))
        _check_items(name, given)
        return self._items(name, given)

    def _resolve_whole(self, name: str, whole: FoldedDataset) -> tuple[Source, Any]:
        """Return the source of all rows, and what ``put`` returned for the folds."""
        if whole.resolved is None or whole.resolved[0] != self.session:
            whole.resolved = self.session, self.source(name, whole.given), self.put(whole.folds)
        return whole.resolved[1], whole.resolved[2]

    def _store(self, kind: Any, blocks: Iterable[tuple[Any, int]]) -> Source:
        stored = [(self.put(block), rows) for block, rows in blocks]
        return Source(kind, tuple(ref for ref, _ in stored), tuple(rows for _, rows in stored))

    def _items(self, name: str, given: Any) -> Source:
        try:
            return self._store("items", [(given, len(given))])
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise SerializationError(
                f"dataset {name!r}, {with_article(type(given).__name__)}, cannot be sent to the workers: {error}. A map-style "
                "dataset is pickled: open files and connections in its __getitem__, at first use.",
                path=f"dataset[{name!r}]",
            ) from error


def is_lazy(given: Any) -> bool:
    """Return whether the dataset is a `ray.data.Dataset` that is not executed yet."""
    return _is(given, "ray.data", "Dataset") and not _is(given, "ray.data", "MaterializedDataset")


def _files(name: str, given: Any) -> Source | None:
    """Return the source of paths or of a pyarrow Dataset; None for anything else."""
    from raysgd.data.sources.files import source_of_dataset, source_of_paths

    if _is_paths(given):
        return source_of_paths(name, given)
    if _is(given, "pyarrow", "FileSystemDataset") or _is(given, "pyarrow", "UnionDataset"):
        return source_of_dataset(name, given)
    return None


def _table(name: str, given: Any) -> Any:
    """Return a columnar dataset in memory, or in a cache on disk, as a Table or RecordBatch; None for anything else."""
    if _is(given, "pyarrow", "Table") or _is(given, "pyarrow", "RecordBatch"):
        return given
    if _is(given, "pyarrow", "InMemoryDataset"):
        return given.to_table()
    if _is(given, "pandas", "DataFrame"):
        return table_of_frame(name, given)
    if _is(given, "datasets", "Dataset") and not _makes_rows(given):
        return table_of_hugging_face(given)
    return None


def _makes_rows(dataset: Any) -> bool:
    """Whether a Hugging Face dataset computes rows on access: by a transform, or by decoding images or audio."""
    return dataset.format["type"] == "custom" or any(map(_is_decoded, dataset.features.values()))


def _is_decoded(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return any(map(_is_decoded, feature.values()))
    if isinstance(feature, (list, tuple)):
        return any(map(_is_decoded, feature))
    element = getattr(feature, "feature", None)  # of a list
    return hasattr(feature, "decode_example") or (element is not None and _is_decoded(element))


def _from_ray(name: str, dataset: Any) -> Source:
    bundles = list(dataset.iter_internal_ref_bundles())
    rows = [entry.metadata.num_rows for bundle in bundles for entry in bundle.blocks]
    schema = common_schema_of_blocks(name, [getattr(bundle, "schema", None) for bundle in bundles if bundle.num_rows()])
    refs = dataset.to_arrow_refs()
    if len(refs) != len(rows):
        raise ConfigError(
            f"dataset {name!r}: Ray Data returned {len(refs)} blocks but {len(rows)} row counts, so rows cannot be located."
        )
    full = [(ref, count) for ref, count in zip(refs, rows, strict=True) if count]
    return Source(
        "arrow",
        tuple(ref for ref, _ in full),
        tuple(count for _, count in full),
        schema=None if schema is None else pickle.dumps(schema),
    )


def _check_items(name: str, given: Any) -> None:
    """Check that a map-style dataset is one. Some objects have its methods, and their items are not rows."""
    what = f"dataset {name!r} is of type {type(given).__name__}"
    for package, kind, advice in _NOT_ROWS:
        if _is(given, package, kind):
            raise ConfigError(f"{what}, {advice}.")
    is_readable = all(hasattr(type(given), method) for method in ("__len__", "__getitem__"))
    if not is_readable or isinstance(given, (Mapping, tuple, bytes, bytearray, memoryview)):
        raise ConfigError(f"{what}, which raysgd cannot read. Give {_ALLOWED}.")
    if isinstance(given, list):
        _check_rows(name, given)


def _check_rows(name: str, rows: list[Any]) -> None:
    """Check that the rows of a list are of one kind, and are rows rather than tables."""
    for number, row in enumerate(rows):
        kind = with_article(type(row).__name__)
        if row is None or _is_table(row):
            raise ConfigError(
                f"dataset {name!r} is a list, and its item {number} is {kind}, not a row; give one table of all rows, such as "
                "pandas.concat makes, or a dict of tables by name."
            )
        for row_type in (Mapping, str, PathLike):
            if isinstance(row, row_type) != isinstance(rows[0], row_type):
                first = with_article(type(rows[0]).__name__)
                raise ConfigError(
                    f"dataset {name!r} is a list, and its item {number} is {kind}, but item 0 is {first}; give items of one kind."
                )


def _is_table(value: Any) -> bool:
    classes = [("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table"), ("pyarrow", "RecordBatch")]
    return any(_is(value, package, name) for package, name in classes)


def _is_columns(given: Mapping[Any, Any]) -> bool:
    """Whether a dict is one dataset with an array per column, rather than several datasets by name."""
    arrays = [key for key, value in given.items() if _is_array(value)]
    others = [key for key, value in given.items() if not _is_tree(value)]
    if arrays and others:
        other = others[0]
        kind = with_article(type(given[other]).__name__)
        raise ConfigError(
            f"dataset has an array under {arrays[0]!r} and {kind} under {other!r}; give either arrays, "
            "the columns of one dataset, or several datasets by name."
        )
    return bool(arrays)


def _is_tree(value: Any) -> bool:
    """Whether the value is an array, or a dict, list or tuple of arrays at any depth."""
    if isinstance(value, Mapping):
        return bool(value) and all(_is_tree(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_is_tree(each) for each in value)
    return _is_array(value)


def _leaves(given: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the arrays of a tree with their column names: ``boxes.xy`` for ``{"boxes": {"xy": array}}``."""
    for key, value in given.items():
        if _is_array(value):
            yield key, value
        else:
            children = value if isinstance(value, Mapping) else dict(enumerate(value))
            yield from ((f"{key}.{name}", array) for name, array in _leaves(children))


def _is_paths(given: Any) -> bool:
    paths = given if isinstance(given, list) and given else [given]
    return all(isinstance(path, (str, PathLike)) for path in paths)


def _is_array(value: Any) -> bool:
    return _is(value, "numpy", "ndarray") or _is(value, "torch", "Tensor")


def _is(value: Any, package: str, name: str) -> bool:
    """Whether ``value`` is an instance of the class ``name`` of ``package``, or of a subclass."""
    return any(cls.__name__ == name and f"{cls.__module__}.".startswith(f"{package}.") for cls in type(value).__mro__)
