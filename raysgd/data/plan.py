"""What the driver sends the workers about the datasets of a run. Plain data without NumPy: it passes through the TrainerActor.

A plan only refers to rows; the rows themselves are in the object store or in files.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from raysgd.errors import ConfigError

#: Name of a dataset that was given without one.
UNNAMED = "dataset"

#: Rows of a window under ``shuffle="window"``; fewer where rows are large.
WINDOW_ROWS = 65_536

#: The number of rows of a lazy dataset.
UNKNOWN_ROWS = -1

SourceKind = Literal["arrow", "arrays", "items", "files", "stream"]


class FilePart(NamedTuple):
    """The part of a file that makes a block: row groups of a Parquet file by number, bytes of a text file, or the whole file."""

    file: int
    row_groups: tuple[int, ...] | None = None
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Files:
    """The files of a dataset, which workers read themselves.

    Attributes:
        paths: As their filesystem names them.
        sizes: Bytes of each, or None if the storage does not say. Modification times are not kept: nodes may have copies.
        read_options: A pickled `raysgd.data.reading.files.FileReadOptions`, which only workers unpickle.
    """

    paths: tuple[str, ...] = field(repr=False)
    sizes: tuple[int | None, ...] = field(repr=False)
    read_options: bytes = field(repr=False)


@dataclass(frozen=True)
class FoldSelection:
    """The rows of a subset for cross-validation: those of one fold, or all but those.

    Attributes:
        folds: What ``put`` returned for the fold of each row of the whole dataset, uint16.
        fold: Number of the fold.
        is_complement: Select all rows except those of the fold.
        block_rows: Rows in each block, selected or not.
    """

    folds: Any = field(repr=False)
    fold: int
    is_complement: bool
    block_rows: tuple[int, ...] = field(repr=False)


def select_rows(folds: Any, fold: int, is_complement: bool) -> Any:
    """Return for each row, by an array of the rows' folds, whether it belongs to the subset."""
    return folds != fold if is_complement else folds == fold


@dataclass(frozen=True)
class Source:
    """Describes one dataset.

    Attributes:
        kind: What a block is: ``arrow``, a pyarrow Table; ``arrays``, a dict of equally long NumPy arrays; ``items``, an
            object with ``__len__`` and ``__getitem__``, which is always the only block; ``files``, a part of a file;
            ``stream``, a lazy dataset that is executed while it is read.
        blocks: What ``put`` returned for each block, or each block's `FilePart`; of a lazy dataset its
            `raysgd.data.streams.stream.Stream`.
        block_rows: Rows in each block; with a ``selection`` only the selected ones.
        files: Where rows are read from files.
        window_rows: Rows of a window under ``shuffle="window"``.
        selection: Which rows belong to it, if it is a subset of a dataset.
        nulls: Columns of numbers that have nulls, or may have some, with their number; None if it is unknown. None: unknown
            of all columns.
        schema: The pickled `pyarrow.Schema` that stored blocks are converted to, if they differ.
    """

    kind: SourceKind
    blocks: tuple[Any, ...] = field(repr=False)
    block_rows: tuple[int, ...] = field(repr=False)
    files: Files | None = None
    window_rows: int = WINDOW_ROWS
    selection: FoldSelection | None = None
    nulls: dict[str, int | None] | None = field(default=None, repr=False)
    schema: bytes | None = field(default=None, repr=False)

    @property
    def stored_rows(self) -> tuple[int, ...]:
        """Rows that each block holds, selected or not."""
        return self.block_rows if self.selection is None else self.selection.block_rows

    @property
    def num_rows(self) -> int:
        """Rows in all; `UNKNOWN_ROWS` of a lazy dataset."""
        return UNKNOWN_ROWS if self.kind == "stream" else sum(self.block_rows)


@dataclass(frozen=True)
class DatasetPlan:
    """The datasets of a run. It holds object references: pickle it only as an argument of a Ray call.

    Attributes:
        sources: By name.
        folds: If a tuple was given for cross-validation: for each fold the name of its dataset, or the names of its
            training and its validation dataset.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    folds: tuple[str | tuple[str, str], ...] | None = None


#: The plan of a run without datasets.
NO_DATASETS = DatasetPlan()


def describe_column(dataset: str, column: str) -> str:
    return f"column {column!r} of dataset {dataset!r}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_columns(dataset: str, wanted: Iterable[str], known: list[str], argument: str = "columns") -> list[str]:
    """Return the wanted columns as a list.

    Raises:
        ConfigError: The dataset has no such column, or columns were given as one string.
    """
    if isinstance(wanted, str):
        raise ConfigError(f"{argument}={wanted!r} is one string; give a list: {argument}=[{wanted!r}].")
    names = list(wanted)
    for name in names:
        if name not in known:
            listed = ", ".join(map(repr, known)) or "none"
            raise ConfigError(
                f"{argument}: dataset {dataset!r} has no column {name!r}{did_you_mean(str(name), known)}; it has {listed}."
            )
    return names
