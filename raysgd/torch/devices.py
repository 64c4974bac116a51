"""`device`, on which this process trains, and `to_device`, which moves batches there. Worker side."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from raysgd.errors import ConfigError
from raysgd.session import context

DEVICE_INDEX = "RAYSGD_DEVICE_INDEX"
"""Environment variable that the worker sets before train_func: the index of its GPU in CUDA_VISIBLE_DEVICES."""
DRIVER_FILE = "/dev/nvidiactl"
"""A file of NVIDIA's driver: where it exists, a GPU that CUDA does not see is hidden, not missing."""


def device() -> torch.device:
    """Return the device on which this process trains.

    Use it instead of the local rank: all workers of a node may see the same GPUs, and a process keeps its device when its
    rank changes after a failure.

    Returns:
        The worker's own GPU, with its index; the CPU if the worker has no GPU. Outside a worker the current GPU if there is
        one, else the CPU.

    Raises:
        ConfigError: CUDA does not see the worker's GPU.
    """
    in_worker = context.current().in_worker
    given = os.environ.get(DEVICE_INDEX) if in_worker else None  # a worker without it has no GPU, even if it sees some
    if not torch.cuda.is_available():
        if given and torch.version.cuda is not None and os.path.exists(DRIVER_FILE):
            raise ConfigError(
                f"this worker was given a GPU, but CUDA sees none of CUDA_VISIBLE_DEVICES={_visible()!r}: start Ray with the "
                "GPUs' numbers, or with their full names as `nvidia-smi -L` lists them. A wrong name hides all after it."
            )
        return torch.device("cpu")
    if not in_worker:
        is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # does not initialize CUDA
        return torch.device("cuda", torch.cuda.current_device() if is_initialized else 0)
    return torch.device("cuda", _checked(given)) if given else torch.device("cpu")


def _checked(given: str) -> int:
    count = torch.cuda.device_count()
    if not given.isdecimal() or int(given) >= count:
        raise ConfigError(
            f"{DEVICE_INDEX}={given!r} is not one of the {count} GPUs that this process sees "
            f"(CUDA_VISIBLE_DEVICES={_visible()!r}); expected an int from 0 to {count - 1}."
        )
    return int(given)


def _visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def to_device(value: Any, device: torch.device) -> Any:
    """Return the same structure with all tensors on a device.

    Searches dicts and other mappings, lists, tuples, named tuples and dataclasses, and keeps their types. An object with a
    method ``to`` (a packed sequence, a graph, a tokenizer's batch) is moved by it. Everything else, such as strings,
    numbers and NumPy arrays, stays as it is. Containers are copied, never changed in place.
    """
    if isinstance(value, torch.Tensor):
        # From pinned memory the copy runs asynchronously; from other memory torch waits where it must.
        return value.to(device, non_blocking=device.type == "cuda")
    if isinstance(value, type):
        return value
    if callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, Mapping):
        return _mapping_to(value, device)
    if isinstance(value, tuple):
        return _tuple_to(value, device)
    if isinstance(value, list):
        return _list_to(value, device)
    if dataclasses.is_dataclass(value):
        return _dataclass_to(value, device)
    return value


def _mapping_to(mapping: Mapping[Any, Any], device: torch.device) -> Any:
    moved = {key: to_device(value, device) for key, value in mapping.items()}
    if type(mapping) is dict:
        return moved
    if isinstance(mapping, MutableMapping):  # a copy keeps constructor arguments, such as a defaultdict's factory
        clone = copy.copy(mapping)
        clone.update(moved)
        return clone
    return type(mapping)(moved)  # type: ignore[call-arg]


def _tuple_to(values: tuple[Any, ...], device: torch.device) -> Any:
    moved = [to_device(value, device) for value in values]
    return type(values)(*moved) if hasattr(values, "_fields") else type(values)(moved)


def _list_to(values: list[Any], device: torch.device) -> Any:
    moved = [to_device(value, device) for value in values]
    if type(values) is list:
        return moved
    clone = copy.copy(values)
    clone[:] = moved
    return clone


def _dataclass_to(value: Any, device: torch.device) -> Any:
    clone = copy.copy(value)  # not replace(), since the constructor may need arguments that are not fields
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(clone, field.name, to_device(getattr(value, field.name), device))  # also if frozen
    return clone
