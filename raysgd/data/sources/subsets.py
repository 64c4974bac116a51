"""Subsets of a dataset, as `raysgd.data.to_cv` makes them: some of its rows, without a copy of them. Driver side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.plan import FoldSelection, Source, select_rows


@dataclass
class FoldedDataset:
    """A dataset and the fold of each row.

    Attributes:
        given: The dataset.
        folds: The fold of each of its rows, uint16.
        resolved: The session of the last run with it, the source of all its rows, and what ``put`` returned for the folds.
            Kept so that several runs of a session store the rows once.
    """

    given: Any
    folds: NDArray[np.uint16]
    resolved: tuple[Any, Source, Any] | None = None

    def subset(self, fold: int, *, is_complement: bool = False) -> DatasetSubset:
        """Return the rows of a fold, or all other rows."""
        return DatasetSubset(self, fold, is_complement, int(select_rows(self.folds, fold, is_complement).sum()))


@dataclass(frozen=True, repr=False)
class DatasetSubset:
    """Rows of a dataset for ``run(dataset=...)``: those of one fold, or all but those. ``len()`` counts them."""

    whole: FoldedDataset
    _fold: int
    _is_complement: bool
    _num_rows: int

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        return f"DatasetSubset({self._num_rows} of {len(self.whole.folds)} rows)"

    def source(self, whole: Source, folds: Any) -> Source:
        """Describe the subset, by the source of all rows and what ``put`` returned for the folds."""
        is_selected = select_rows(self.whole.folds, self._fold, self._is_complement)
        selected_before = np.concatenate([[0], np.cumsum(is_selected)])
        ends = np.cumsum(whole.block_rows, dtype=np.int64)
        counts = selected_before[ends] - selected_before[ends - np.asarray(whole.block_rows, np.int64)]
        selection = FoldSelection(folds, self._fold, self._is_complement, whole.block_rows)
        nulls = None if whole.nulls is None else dict.fromkeys(whole.nulls)  # the subset may be without them
        return replace(whole, block_rows=tuple(counts.tolist()), selection=selection, nulls=nulls)
