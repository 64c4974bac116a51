"""Batches, and other nested things that hold tensors, to a device. Worker side."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def to_device(value: Any, device: torch.device) -> Any:
    """The same structure with all tensors on a device.

    Goes into dicts and other mappings, lists, tuples, named tuples and dataclasses, keeping their types. An object with
    a method ``to`` (a packed sequence, a graph, a tokenizer's batch) is moved by it. All else, such as strings, numbers
    and arrays of NumPy, is left as it is. Containers are new, never changed in place.
    """
    if isinstance(value, torch.Tensor):
        # From pinned memory the copy goes on beside the host; from other memory torch waits where it has to.
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
    if isinstance(mapping, MutableMapping):  # a copy keeps what its constructor needs, as a defaultdict's factory
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
    clone = copy.copy(value)  # not replace(): the constructor may want what is no field, and has run already
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(clone, field.name, to_device(getattr(value, field.name), device))  # frozen ones too
    return clone
