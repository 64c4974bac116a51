"""Which device this process trains on. Worker side."""

from __future__ import annotations

import os

import torch

from raysgd.errors import ConfigError
from raysgd.session import context

DEVICE_INDEX = "RAYSGD_DEVICE_INDEX"
"""Environment variable, set by the worker before train_func: where its own GPU stands in CUDA_VISIBLE_DEVICES."""


def device() -> torch.device:
    """The device this process trains on.

    Use it rather than the local rank: all workers of a node may see the same GPUs, and a process keeps its device when
    ranks are dealt anew after a failure.

    Returns:
        The worker's own GPU, with its index; the CPU where the worker was given none. Outside a worker the current
        GPU if there is any, else the CPU.

    Raises:
        ConfigError: The index the worker was given is not one of the GPUs that CUDA sees.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if not context.current().in_worker:
        return torch.device("cuda", torch.cuda.current_device() if uses_cuda() else 0)
    given = os.environ.get(DEVICE_INDEX)  # without it this worker was given none, though it may see some
    return torch.device("cuda", _checked(given)) if given else torch.device("cpu")


def uses_cuda() -> bool:
    """Whether this process has used CUDA. Asking does not make it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _checked(given: str) -> int:
    count = torch.cuda.device_count()
    if not given.isdecimal() or int(given) >= count:
        raise ConfigError(
            f"{DEVICE_INDEX}={given!r} names none of the {count} GPUs this process sees "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}); give an int from 0 to {count - 1}."
        )
    return int(given)
