"""What the driver tells the workers of the datasets of a run. Plain data without NumPy: it passes through the TrainerActor.

Rows travel beside it, in the object store: a plan only refers to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

#: Name of a dataset that was given without one.
LONE = "dataset"

Kind = Literal["arrow", "arrays", "items"]


@dataclass(frozen=True)
class Source:
    """One dataset.

    Attributes:
        kind: What a block is: ``arrow``, a pyarrow Table; ``arrays``, a dict of equally long NumPy arrays; ``items``, an
            object with ``__len__`` and ``__getitem__``, which is always one block.
        blocks: What ``put`` returned for each block.
        block_rows: Rows in each block.
    """

    kind: Kind
    blocks: tuple[Any, ...] = field(repr=False)
    block_rows: tuple[int, ...] = field(repr=False)

    @property
    def num_rows(self) -> int:
        return sum(self.block_rows)


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
