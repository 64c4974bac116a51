"""What the driver tells the workers of the datasets of a run. Plain data without NumPy: it passes through the TrainerActor.

Rows travel beside it, in the object store: a plan only refers to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

#: Name of a dataset that was given without one.
LONE = "dataset"

#: Rows that are mixed with each other under ``shuffle="window"``, unless they are large.
WINDOW_ROWS = 65_536

#: The number of rows of a dataset that is executed while it is read.
UNKNOWN_ROWS = -1

Kind = Literal["arrow", "arrays", "items", "files", "stream"]


class FilePart(NamedTuple):
    """What of a file makes a block: row groups of a Parquet file by their numbers, or all of it."""

    file: int
    row_groups: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Files:
    """The files of a dataset, which workers read themselves.

    Attributes:
        paths: As their filesystem names them.
        sizes: Bytes of each; None where its storage does not tell. Not when it was written: nodes may have copies.
        opening: How they are read: a pickled `raysgd.data.file_blocks.Opening`, which only workers look into.
    """

    paths: tuple[str, ...] = field(repr=False)
    sizes: tuple[int | None, ...] = field(repr=False)
    opening: bytes = field(repr=False)


@dataclass(frozen=True)
class Choice:
    """Some rows of a dataset, for cross-validation: those of one fold, or all but those.

    Attributes:
        folds: What ``put`` returned for the fold of each row of the whole dataset, uint16.
        fold: Which one.
        is_rest: All rows but those of the fold.
        block_rows: Rows in each block, chosen or not.
    """

    folds: Any = field(repr=False)
    fold: int
    is_rest: bool
    block_rows: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class Source:
    """One dataset.

    Attributes:
        kind: What a block is: ``arrow``, a pyarrow Table; ``arrays``, a dict of equally long NumPy arrays; ``items``, an
            object with ``__len__`` and ``__getitem__``, which is always one block; ``files``, a part of a file; ``stream``,
            what is executed while it is read.
        blocks: What ``put`` returned for each block, or each block's `FilePart`; of a stream the
            `raysgd.data.stream.Stream`.
        block_rows: Rows in each block; where there is a choice, of those that are chosen.
        files: Of a dataset that is made of files.
        window_rows: Rows that are mixed with each other under ``shuffle="window"``.
        choice: Which rows it has, where it is a part of a dataset.
    """

    kind: Kind
    blocks: tuple[Any, ...] = field(repr=False)
    block_rows: tuple[int, ...] = field(repr=False)
    files: Files | None = None
    window_rows: int = WINDOW_ROWS
    choice: Choice | None = None

    @property
    def stored_rows(self) -> tuple[int, ...]:
        """Rows that each block holds."""
        return self.block_rows if self.choice is None else self.choice.block_rows

    @property
    def num_rows(self) -> int:
        """Rows in all; `UNKNOWN_ROWS` where that shows when it is read."""
        return UNKNOWN_ROWS if self.kind == "stream" else sum(self.block_rows)


@dataclass(frozen=True)
class DatasetPlan:
    """The datasets of a run. Pickle it with what knows the references in it: as an argument of a Ray call.

    Attributes:
        sources: By name.
        folds: Where a tuple was given for cross-validation: for each fold the name of its dataset, or those of its
            training and its validation dataset.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    folds: tuple[str | tuple[str, str], ...] | None = None


#: Of a run that was given no dataset.
NO_DATASETS = DatasetPlan()
