"""Batches as torch takes them. Worker side; torch is imported when the first batch is made.

A loop may write to the tensors it gets: read-only views of the dataset are copied once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from raysgd.data.batches.conversion import Conversion
from raysgd.data.batches.values import Origin, Path, map_leaves, to_device, unsupported_type, writeable
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TorchConversion(Conversion):
    """Makes tensors. Items are collated as by torch's DataLoader.

    Attributes:
        device: Where tensors go; None leaves them in host memory.
    """

    device: torch.device | str | None

    def as_dtype(self, dtype: Any) -> Any:
        import torch

        if not isinstance(dtype, torch.dtype):
            raise ConfigError(
                f"dtypes={dtype!r} is not a torch dtype: give one such as torch.float32, or a dict of them by column."
            )
        return dtype

    def convert(self, values: NDArray[Any], dtype: Any, origin: Origin, path: Path) -> torch.Tensor:
        import torch

        try:
            tensor = torch.from_numpy(writeable(values))
        except TypeError as error:
            raise unsupported_type(values, origin, path, "torch") from error
        if dtype is None and self.device is None:
            return tensor
        return tensor.to(device=self.device, dtype=dtype, non_blocking=True)

    def stack_columns(self, columns: list[torch.Tensor]) -> torch.Tensor:
        import torch

        return torch.stack(columns, dim=1)  # converts to the common type, as torch.promote_types

    def collate(self, items: list[Any], origin: Origin) -> Any:
        from torch.utils.data import default_collate

        try:
            batch = default_collate(items)
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"the rows of dataset {origin.dataset!r} cannot be collated: {error}. Give collate_fn, which gets a list "
                "of rows."
            ) from error
        return to_device(batch, self.device)

    def finish(self, batch: Any, origin: Origin) -> Any:
        return to_device(batch, self.device)


class _PendingCopy(NamedTuple):
    """A batch whose tensors are being copied, and the CUDA event at the end of the copies."""

    batch: Any
    copied: Any


class CudaCopies:
    """Copies batches to one CUDA device while the loop computes, through pinned memory. A `Transfer`."""

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
