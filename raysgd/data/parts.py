"""Parts of a dataset: some of its rows, without a copy of them. What `raysgd.data.to_cv` gives; resolved on the driver."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raysgd.data.plan import Choice, Source


class Resolver(Protocol):
    """Stores datasets for one run."""

    session: Any

    def source(self, name: str, given: Any) -> Source: ...

    def store(self, value: Any) -> Any: ...


@dataclass
class Whole:
    """A dataset that parts are of. What it was resolved to is kept, so that a loop of runs stores it once.

    Attributes:
        given: The dataset.
        folds: The fold of each of its rows, uint16.
    """

    given: Any
    folds: NDArray[np.uint16]
    _resolved: tuple[Any, Source, Any] | None = None

    def resolve(self, name: str, resolver: Resolver) -> tuple[Source, Any]:
        """The source of all of it, and what the folds are fetched by."""
        if self._resolved is None or self._resolved[0] != resolver.session:
            self._resolved = resolver.session, resolver.source(name, self.given), resolver.store(self.folds)
        return self._resolved[1], self._resolved[2]


@dataclass(frozen=True, repr=False)
class Part:
    """Rows of a dataset, to be given to ``run(dataset=...)``: those of one fold, or all but those. ``len()`` counts them."""

    _whole: Whole
    _fold: int
    _is_rest: bool
    _num_rows: int = field(default=0)

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        return f"Part({self._num_rows} of {len(self._whole.folds)} rows)"

    def source(self, name: str, resolver: Resolver) -> Source:
        """What a run is told of it."""
        whole, folds = self._whole.resolve(name, resolver)
        before = np.concatenate([[0], np.cumsum(is_chosen(self._whole.folds, self._fold, self._is_rest))])
        ends = np.cumsum(whole.block_rows, dtype=np.int64)
        counts = before[ends] - before[ends - np.asarray(whole.block_rows, np.int64)]
        choice = Choice(folds, self._fold, self._is_rest, whole.block_rows)
        return replace(whole, block_rows=tuple(counts.tolist()), choice=choice)


def is_chosen(folds: NDArray[np.uint16], fold: int, is_rest: bool) -> NDArray[np.bool_]:
    """Whether each row is one of a part."""
    found: NDArray[np.bool_] = folds != fold if is_rest else folds == fold
    return found
