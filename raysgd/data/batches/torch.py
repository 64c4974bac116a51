"""Batches as torch takes them. Worker side; torch is imported when the first batch is made.

A loop may write to the tensors it gets: read-only views of the dataset are copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from raysgd.data.batches.values import Origin, empty_batch, map_leaves, to_device, unsupported_type, writeable
from raysgd.data.order.epoch_order import Indices
from raysgd.data.reading.readers import ItemReader, TableReader
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import torch

Collate = Callable[[Any], Any]


@dataclass(frozen=True)
class TableToTorch:
    """Makes dicts of tensors by column, tuples ``(features, label)``, or what ``collate_fn`` returns for NumPy arrays."""

    origin: Origin
    reader: TableReader
    columns: Sequence[str]
    dtypes: torch.dtype | Mapping[str, torch.dtype] | None
    device: torch.device | str | None
    collate_fn: Collate | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.origin.dataset)
        if self.collate_fn is not None:
            arrays = self.reader.arrays(rows, self.columns)
            return to_device(
                self.collate_fn({column: writeable(array) for column, array in arrays.items()}), self.device
            )
        arrays = self.reader.arrays(rows, self.columns, dense=True)
        tensors = {column: self._tensor(column, array) for column, array in arrays.items()}
        return tensors if self.origin.label_split is None else self.origin.label_split.split(tensors, _stack_columns)

    def _tensor(self, column: str, array: NDArray[Any]) -> torch.Tensor:
        import torch

        try:
            tensor = torch.from_numpy(writeable(array))
        except TypeError as error:
            raise unsupported_type(array, self.origin, (column,), "torch") from error
        dtype = self.dtypes.get(column) if isinstance(self.dtypes, Mapping) else self.dtypes
        if dtype is None and self.device is None:
            return tensor
        return tensor.to(device=self.device, dtype=dtype, non_blocking=True)


@dataclass(frozen=True)
class ItemsToTorch:
    """Makes batches of a map-style dataset's items: collated as torch's DataLoader does, or by ``collate_fn``."""

    origin: Origin
    reader: ItemReader
    device: torch.device | str | None
    collate_fn: Collate | None

    def __call__(self, rows: Indices) -> Any:
        if not len(rows):
            return empty_batch(self, self.reader.sample_row(), self.origin.dataset)
        items = self.reader.items(rows)
        batch = self._collate(items) if self.collate_fn is None else self.collate_fn(items)
        return to_device(batch, self.device)

    def _collate(self, items: list[Any]) -> Any:
        from torch.utils.data import default_collate

        try:
            return default_collate(items)
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"the rows of dataset {self.origin.dataset!r} cannot be collated: {error}. Give collate_fn, which gets a list "
                "of rows."
            ) from error


def _stack_columns(tensors: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.stack(tensors, dim=1)  # converts to the common type, as torch.promote_types


def check_torch_dtypes(dtypes: Any) -> None:
    """Check that ``dtypes`` is a torch dtype, or a dict of them by column.

    Raises:
        ConfigError: It is something else.
    """
    if dtypes is None:
        return
    import torch

    for dtype in dtypes.values() if isinstance(dtypes, Mapping) else [dtypes]:
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(
                f"dtypes={dtypes!r} is not a torch dtype: give one such as torch.float32, or a dict of them by column."
            )


class _PendingCopy(NamedTuple):
    """A batch whose tensors are being copied, and the CUDA event at the end of the copies."""

    batch: Any
    copied: Any


class CudaCopies:
    """Copies batches to one CUDA device while the loop computes, through pinned memory. A `Transfer`.

    Args:
        device: As torch takes it.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream: Any = None

    def prepare(self) -> None:
        """Choose the current device of the loop's thread, if ``device`` has no index."""
        import torch

        index: int | None = torch.device(self._device).index
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def begin(self, batch: Any) -> _PendingCopy:
        """Start to copy a batch's tensors. Objects with a ``to`` of their own are moved by `finish`, in the loop's stream."""
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

        def copy(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
                return value
            return value.pin_memory().to(self._device, non_blocking=True)

        with torch.cuda.stream(self._stream):
            moved = map_leaves(copy, batch)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return _PendingCopy(moved, copied)

    def finish(self, begun: _PendingCopy) -> Any:
        """Return the batch for the loop's stream, which waits for the copies; the host does not wait."""
        import torch

        current = torch.cuda.current_stream(self._device)
        current.wait_event(begun.copied)

        def record(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device.type == "cuda":
                value.record_stream(current)
            return value

        return to_device(map_leaves(record, begun.batch), self._device)
