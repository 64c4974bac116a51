"""The position of training in a dataset, as a checkpoint carries it.

Plain data without NumPy, so that the TrainerActor can compare positions. All ranks step together, so all are at the same
position, and any number of workers can resume there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raysgd.data.plan import UNKNOWN_ROWS
from raysgd.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in an epoch's order: the number of rows that all ranks together have consumed.

    Attributes:
        epoch: From 0.
        consumed: Rows handed to loop bodies in this epoch.
        num_rows, seed, shuffle, layout, lanes: The order in which rows are counted; without meaning while ``consumed`` is 0.
            For a lazy dataset ``num_rows`` is `UNKNOWN_ROWS`, and ``layout`` is the number of rows in a stretch.
    """

    epoch: int = 0
    consumed: int = 0
    num_rows: int = 0
    seed: int = 0
    shuffle: Any = False
    layout: int = 0
    lanes: int = 1

    def to_json(self) -> dict[str, Any]:
        if not self.consumed:
            return {"epoch": self.epoch, "consumed": 0}
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, name: str) -> Position:
        """Return the position that `to_json` wrote for the dataset ``name``.

        Raises:
            CheckpointError: The value is not a position.
        """
        if not _is_position(value):
            raise CheckpointError(
                f"the checkpoint's position in dataset {name!r} is {value!r}, which is not a position that raysgd wrote."
            )
        return cls(**value)

    def __str__(self) -> str:
        return f"epoch {self.epoch}, {self.consumed} rows consumed"

    def describe_order(self) -> str:
        """Describe the position and its order; texts differ if the orders do."""
        return f"{self} of an order of {self.lanes} lanes ({self.layout})" if self.consumed else str(self)


_NUMBERS = ("epoch", "consumed", "num_rows", "seed", "layout", "lanes")


def _is_position(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {"epoch", "consumed"} <= set(value) <= {*_NUMBERS, "shuffle"}:
        return False
    numbers = [value[key] for key in _NUMBERS if key in value]
    if (
        any(type(number) is not int for number in numbers)
        or min(value["epoch"], value["consumed"], value.get("lanes", 1) - 1) < 0
    ):
        return False
    num_rows = value.get("num_rows", 0)
    return bool(value["consumed"] <= num_rows or (num_rows == UNKNOWN_ROWS and value.get("layout", 0) > 0))


def check_agreement(positions: Mapping[int, Mapping[str, Any]]) -> None:
    """Check that all ranks were at the same position when they saved.

    Args:
        positions: By rank, what `WorkerDatasets.positions` returned there.

    Raises:
        CheckpointError: They are at different positions. The message has the dataset and the position of each rank.
    """
    for name in sorted({name for of_rank in positions.values() for name in of_rank}):
        by_rank = {
            rank: Position.from_json(of_rank[name], name) if name in of_rank else None
            for rank, of_rank in sorted(positions.items())
        }
        is_same_count = len({str(position) for position in by_rank.values()}) == 1
        ranks_at: dict[str, list[int]] = {}
        for rank, position in by_rank.items():
            if position is None:
                text = "no position"
            else:
                text = position.describe_order() if is_same_count else str(position)
            ranks_at.setdefault(text, []).append(rank)
        if len(ranks_at) > 1:
            listed = "; ".join(f"{text} on {_list_ranks(ranks)}" for text, ranks in ranks_at.items())
            raise CheckpointError(
                f"save_checkpoint found the ranks at different positions in dataset {name!r}: {listed}. Take equally many "
                "batches of it on every rank between two saves; a rank without rows gets a batch of 0 rows."
            )


def _list_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
