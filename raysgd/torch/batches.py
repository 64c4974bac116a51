"""The rows of a batch: how many there are, and a batch of the first of them or of none. Worker side."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from raysgd._util.text import with_article
from raysgd.errors import UsageError


def count_rows(batch: Any) -> int:
    """Return the size of the first dimension of a batch's first tensor or array; 1 if there is none."""
    sizes = (
        each.size(0) if isinstance(each, torch.Tensor) else len(each) for each in leaves_of(batch) if _has_rows(each)
    )
    return next(sizes, 1)  # a nested tensor has no len()


def take_rows(batch: Any, num_rows: int, of: int | None = None) -> Any:
    """Return a batch of the same structure and types with its first rows only.

    What has no entry for each row stays as it is, as do objects that cannot be cut.

    Args:
        batch: The batch.
        num_rows: Rows to keep.
        of: Rows that it has, where they may be in the second dimension. None: the size of the first one.
    """
    first = count_rows(batch)
    rows = first if of is None else of
    return batch if num_rows >= rows else _Cut(rows, num_rows, is_second=rows != first)(batch)


def count_samples(batch: Any, items: int | None) -> tuple[int, int]:
    """Return the rows of a batch, and how many rows of the dataset they are.

    A collate function may put the rows into the second dimension, make several rows of one, as of its tokens, or drop some.

    Args:
        batch: The batch.
        items: Rows of the dataset that were read for it; None: as many as its own.
    """
    num = count_rows(batch)
    if items is None or num == items or num == 0:
        return num, num
    first = next((each for each in leaves_of(batch) if _has_rows(each)), None)
    if first is not None and first.ndim > 1 and first.shape[1] == items:
        return items, items
    return num, min(num, items)


def digest(batch: Any) -> bytes:
    """Return a hash of what a batch consists of."""
    found = hashlib.blake2b(digest_size=16)
    for leaf in leaves_of(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
            leaf = leaf.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
        found.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode())
    return found.digest()


def without_rows(batch: Any) -> Any:
    """Return a batch of the same structure and types without rows.

    Tensors, arrays and lists keep the dimensions after the first; what has no entry for each row stays as it is.

    Raises:
        UsageError: The batch holds no tensor that says how many rows there are, or an object that cannot be cut.
    """
    if not any(map(_has_rows, leaves_of(batch))):
        raise _cannot_cut(batch)
    return _Cut(count_rows(batch), 0, is_strict=True)(batch)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > 0


def leaves_of(value: Any) -> list[Any]:
    """Return what a batch consists of: the leaves of dataclasses, mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [leaf for field in dataclasses.fields(value) for leaf in leaves_of(getattr(value, field.name, None))]
    if isinstance(value, Mapping):
        return [leaf for each in value.values() for leaf in leaves_of(each)]
    return pytree.tree_leaves(value)


def are_same_batches(of_ranks: Sequence[Sequence[bytes]]) -> bool:
    """Return whether all ranks have the same first two batches, by their digests; equal ones may be those of equal rows."""
    return len({*map(tuple, of_ranks)}) == 1 and len({*of_ranks[0]}) == 2


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Keeps the first of a batch's rows.

    Attributes:
        num_rows: Rows of the batch.
        kept: Rows that are kept.
        is_strict: Whether objects of unknown kinds are refused.
        is_second: Whether the rows are in the second dimension, of what has one.
    """

    num_rows: int
    kept: int
    is_strict: bool = False
    is_second: bool = False

    def __call__(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            if self.is_second and value.ndim > 1 and value.shape[1] == self.num_rows:
                return value[:, : self.kept]
            return value[: self.kept] if value.ndim and len(value) == self.num_rows else value
        if isinstance(value, Mapping):
            changed = {key: self(each) for key, each in value.items()}
            if type(value) is dict or not isinstance(value, MutableMapping):
                return changed
            clone = copy.copy(value)
            clone.update(changed)
            return clone
        if isinstance(value, (list, tuple)):
            return self._cut_sequence(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed_fields = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(changed_fields, field.name, self(getattr(value, field.name)))
            return changed_fields
        if self.is_strict and not (value is None or isinstance(value, (str, bytes, int, float, complex))):
            raise _cannot_cut(value)
        return value

    def _cut_sequence(self, values: Any) -> Any:
        if any(isinstance(each, (torch.Tensor, np.ndarray, Mapping, list, tuple)) for each in values):
            changed = [self(each) for each in values]
        else:
            changed = list(values[: self.kept]) if len(values) == self.num_rows else list(values)
        return type(values)(*changed) if hasattr(values, "_fields") and changed else type(values)(changed)


def _cannot_cut(value: Any) -> UsageError:
    return UsageError(
        f"a rank has no row left in the last step of an evaluation, and {with_article(type(value).__name__)} cannot be made a "
        "batch without rows: give a batch_size of 2 or more and at least as many rows as workers, or drop_last=True."
    )
