"""Batches on their way to a GPU: pinned, and copied on a stream of their own beside what the loop computes. Worker side.

A tensor that is made on one stream and used on another must be waited for, and must not be given to somebody else before
the other stream is done with it (`torch.Tensor.record_stream`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from raysgd._util.imported import imported
from raysgd.data.trees import map_leaves, to_device


class OnItsWay(NamedTuple):
    """A batch whose tensors are being copied, and the event of the copies' end."""

    batch: Any
    copied: Any


def cuda_device() -> int | None:
    """The CUDA device of this thread, where it uses one: torch keeps one for each thread."""
    torch = imported("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None


def use_cuda_device(device: int | None) -> None:
    """Have this thread use what `cuda_device` gave in another."""
    if device is not None:
        imported("torch").cuda.set_device(device)


class CudaCopies:
    """Copies to one CUDA device.

    Args:
        device: As torch takes it.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream: Any = None

    def choose(self) -> None:
        """Which of several devices it is, where that was not said: that of this thread, the loop's."""
        import torch

        index: int | None = torch.device(self._device).index
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def begin(self, batch: Any) -> OnItsWay:
        """Begin to copy a batch's tensors; what has no known make is left where it is. In the thread that makes batches."""
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

        def copy(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
                return value  # what knows how to move itself does so in the loop's stream
            return value.pin_memory().to(self._device, non_blocking=True)

        with torch.cuda.stream(self._stream):
            moved = map_leaves(copy, batch)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return OnItsWay(moved, copied)

    def finish(self, coming: OnItsWay) -> Any:
        """The batch, for the loop's stream, which waits for the copies; the host does not. In the loop's thread."""
        import torch

        current = torch.cuda.current_stream(self._device)
        current.wait_event(coming.copied)

        def record(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device.type == "cuda":
                value.record_stream(current)
            return value

        return to_device(map_leaves(record, coming.batch), self._device)
