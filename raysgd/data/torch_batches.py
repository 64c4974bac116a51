"""Batches as torch takes them. Worker side; torch is imported when the first batch is made.

A tensor a loop gets may be written to: where NumPy has a read-only view of the dataset it is copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from raysgd.data.ledger import Indices
from raysgd.data.names import check_columns
from raysgd.data.reader import ItemReader, TableReader
from raysgd.data.trees import Origin, empty_batch, no_type_for, owned, to_device
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import torch

Collate = Callable[[Any], Any]


@dataclass(frozen=True)
class TableToTorch:
    """Columns as a dict of tensors, or what ``collate_fn`` makes of a dict of NumPy arrays."""

    name: str
    reader: TableReader
    columns: Sequence[str]
    dtypes: torch.dtype | Mapping[str, torch.dtype] | None
    device: torch.device | str | None
    collate_fn: Collate | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.name)
        if self.collate_fn is None:
            arrays = self.reader.arrays(rows, self.columns, dense=True)
            return {column: self._tensor(column, array) for column, array in arrays.items()}
        arrays = self.reader.arrays(rows, self.columns)
        return to_device(self.collate_fn({column: owned(array) for column, array in arrays.items()}), self.device)

    def _tensor(self, column: str, array: NDArray[Any]) -> torch.Tensor:
        import torch

        try:
            tensor = torch.from_numpy(owned(array))
        except TypeError as error:
            raise no_type_for(array, Origin(self.name, "columns"), (column,), "torch") from error
        dtype = self._dtype(column)
        if dtype is None and self.device is None:
            return tensor
        return tensor.to(device=self.device, dtype=dtype, non_blocking=True)

    def _dtype(self, column: str) -> torch.dtype | None:
        return self.dtypes.get(column) if isinstance(self.dtypes, Mapping) else self.dtypes


@dataclass(frozen=True)
class ItemsToTorch:
    """Items of a map-style dataset, collated as torch's DataLoader does."""

    name: str
    reader: ItemReader
    device: torch.device | str | None
    collate_fn: Collate | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.name)
        items = self.reader.items(rows)
        batch = self._default(items) if self.collate_fn is None else self.collate_fn(items)
        return to_device(batch, self.device)

    def _default(self, items: list[Any]) -> Any:
        from torch.utils.data import default_collate

        try:
            return default_collate(items)
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"the rows of dataset {self.name!r} do not make a batch: {error}. Give collate_fn, which gets a list of rows."
            ) from error


def check_dtypes(name: str, dtypes: Any, columns: list[str], collate_fn: Collate | None) -> None:
    """That ``dtypes`` is a dtype or a dict of them by column, and can have an effect.

    Raises:
        ConfigError: It is not.
    """
    if dtypes is None:
        return
    import torch

    if collate_fn is not None:
        raise ConfigError(
            "to_torch(dtypes=..., collate_fn=...): tensors are made by collate_fn; set their types there."
        )
    if isinstance(dtypes, Mapping):
        check_columns(name, dtypes, columns, "dtypes")
    for dtype in dtypes.values() if isinstance(dtypes, Mapping) else [dtypes]:
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtypes={dtypes!r}: give a torch dtype as torch.float32, or a dict of them by column.")
