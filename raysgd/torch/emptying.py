"""`without_rows`: a batch that has no rows, made of one that has. Worker side."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from raysgd._util.text import with_article
from raysgd.errors import UsageError


def without_rows(batch: Any) -> Any:
    """Return a batch of the same structure and types without rows.

    Tensors, arrays and lists keep the dimensions after the first; what has no entry for each row stays as it is.

    Raises:
        UsageError: The batch holds no tensor that says how many rows there are, or an object that cannot be cut.
    """
    tensors = [each for each in _leaves(batch) if isinstance(each, (torch.Tensor, np.ndarray)) and each.ndim]
    if not tensors:
        raise _cannot_cut(batch)
    return _cut(batch, len(tensors[0]))


def _leaves(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [leaf for field in dataclasses.fields(value) for leaf in _leaves(getattr(value, field.name, None))]
    if isinstance(value, Mapping):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    return pytree.tree_leaves(value)


def _cut(value: Any, num_rows: int) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[:0] if value.ndim and len(value) == num_rows else value
    if isinstance(value, Mapping):
        changed = {key: _cut(each, num_rows) for key, each in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return changed
        clone = copy.copy(value)
        clone.update(changed)
        return clone
    if isinstance(value, (list, tuple)):
        return _cut_sequence(value, num_rows)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed_fields = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed_fields, field.name, _cut(getattr(value, field.name), num_rows))
        return changed_fields
    if value is None or isinstance(value, (str, bytes, int, float, complex)):
        return value
    raise _cannot_cut(value)


def _cut_sequence(values: Any, num_rows: int) -> Any:
    if any(isinstance(each, (torch.Tensor, np.ndarray, Mapping, list, tuple)) for each in values):
        changed = [_cut(each, num_rows) for each in values]
    else:
        changed = [] if len(values) == num_rows else list(values)
    return type(values)(*changed) if hasattr(values, "_fields") and changed else type(values)(changed)


def _cannot_cut(value: Any) -> UsageError:
    return UsageError(
        f"a rank has no row left in the last step of an evaluation, and {with_article(type(value).__name__)} cannot be made a "
        "batch without rows: give a batch_size of 2 or more and at least as many rows as workers, or drop_last=True."
    )
