"""Subsets of a dataset, as `raysgd.data.to_cv` makes them: some of its rows, without a copy of them. Driver side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raysgd.data.plan import FoldSelection, Source, select_rows


class Resolver(Protocol):
    """Stores datasets for one run; see `raysgd.data.sources.resolve`."""

    session: Any

    def source(self, name: str, given: Any) -> Source: ...

    def store(self, value: Any) -> Any: ...


@dataclass
class FoldedDataset:
    """A dataset and the fold of each row. Keeps what it was resolved to, so that several runs store it once.

    Attributes:
        given: The dataset.
        folds: The fold of each of its rows, uint16.
    """

    given: Any
    folds: NDArray[np.uint16]
    _resolved: tuple[Any, Source, Any] | None = None

    def resolve(self, name: str, resolver: Resolver) -> tuple[Source, Any]:
        """Return the source of all rows, and what ``put`` returned for the folds."""
        if self._resolved is None or self._resolved[0] != resolver.session:
            self._resolved = resolver.session, resolver.source(name, self.given), resolver.store(self.folds)
        return self._resolved[1], self._resolved[2]

    def subset(self, fold: int, *, is_complement: bool = False) -> DatasetSubset:
        """Return the rows of a fold, or all other rows."""
        return DatasetSubset(self, fold, is_complement, int(select_rows(self.folds, fold, is_complement).sum()))


@dataclass(frozen=True, repr=False)
class DatasetSubset:
    """Rows of a dataset for ``run(dataset=...)``: those of one fold, or all but those. ``len()`` counts them."""

    _whole: FoldedDataset
    _fold: int
    _is_complement: bool
    _num_rows: int

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        return f"DatasetSubset({self._num_rows} of {len(self._whole.folds)} rows)"

    def source(self, name: str, resolver: Resolver) -> Source:
        """Describe the subset for a run."""
        whole, folds = self._whole.resolve(name, resolver)
        is_selected = select_rows(self._whole.folds, self._fold, self._is_complement)
        selected_before = np.concatenate([[0], np.cumsum(is_selected)])
        ends = np.cumsum(whole.block_rows, dtype=np.int64)
        counts = selected_before[ends] - selected_before[ends - np.asarray(whole.block_rows, np.int64)]
        selection = FoldSelection(folds, self._fold, self._is_complement, whole.block_rows)
        return replace(whole, block_rows=tuple(counts.tolist()), selection=selection)
