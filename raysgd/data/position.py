"""Where a dataset stands, as a checkpoint carries it. Plain data: no NumPy, so that the TrainerActor can compare.

The ranks of a group step together, so all of them are at the same position, and any number of workers can go on there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raysgd.data.plan import UNKNOWN_ROWS
from raysgd.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Position:
    """So many rows of the order of an epoch are consumed, by all ranks together.

    Attributes:
        epoch: From 0.
        consumed: Rows handed to loop bodies in this epoch.
        num_rows, seed, shuffle, layout, lanes: The order they are counted in; of no meaning while ``consumed`` is 0. Of a
            stream ``num_rows`` is `UNKNOWN_ROWS`, and ``layout`` the rows of a stretch.
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
        """What `to_json` gave, for the dataset ``name``.

        Raises:
            CheckpointError: It is something else.
        """
        if not _is_position(value):
            raise CheckpointError(f"the checkpoint's position in dataset {name!r} is {value!r}, which is no position.")
        return cls(**value)

    def __str__(self) -> str:
        return f"epoch {self.epoch}, {self.consumed} rows consumed"

    def told(self) -> str:
        """All that the ranks of a group must agree on."""
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
    """That all ranks stood at the same place when they saved.

    Args:
        positions: What `DataContext.positions` gave, by rank.

    Raises:
        CheckpointError: They did not; it names the dataset and where each rank stood.
    """
    for name in sorted({name for of_rank in positions.values() for name in of_rank}):
        at = {
            rank: Position.from_json(of_rank[name], name) if name in of_rank else None
            for rank, of_rank in sorted(positions.items())
        }
        is_same_place = len({str(position) for position in at.values()}) == 1
        ranks_at: dict[str, list[int]] = {}
        for rank, position in at.items():
            where = "without it" if position is None else position.told() if is_same_place else str(position)
            ranks_at.setdefault(where, []).append(rank)
        if len(ranks_at) > 1:
            stood = "; ".join(f"{where} on {_listed(ranks)}" for where, ranks in ranks_at.items())
            raise CheckpointError(
                f"save_checkpoint found the ranks at different places of dataset {name!r}: {stood}. Let every rank take "
                "equally many batches of it between two saves; a share that is empty comes as a batch of 0 rows."
            )


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
