"""Evaluation on all ranks: loaders that know which rows are repeated, and rows gathered in the order of the data.

`raysgd.torch.prepare_data_loader` gives all ranks equally many batches, which sharded models need, and repeats the first rows
for that. The repeated rows are the last ones in the order of the data, so they can be left out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.data import DistributedSampler

from raysgd.engine.engine import count_rows
from raysgd.errors import UsageError
from raysgd.session import api, context
from raysgd.torch.loader import PreparedLoader
from raysgd.torch.samplers import StridedSampler

T = TypeVar("T")
_MISSING: Any = object()


def interleave(of_ranks: Sequence[Sequence[T]], total: int) -> list[T]:
    """Return what all ranks have in the order of the data, of which rank r of N has items r, r + N, r + 2N, ...

    Args:
        of_ranks: Items by rank.
        total: Items without those that are repeated at the end.
    """
    return [one for step in zip_longest(*of_ranks, fillvalue=_MISSING) for one in step if one is not _MISSING][:total]


class EvaluationLoader:
    """A loader for evaluation that was prepared, and what of it was read since the last ``iter()``.

    Attributes:
        loader: The prepared loader.
    """

    def __init__(self, loader: PreparedLoader) -> None:
        self.loader = loader
        identity = context.current().identity
        self._rank, self._num_ranks = identity.data_parallel_rank, identity.data_parallel_size
        self._ranks_apart = identity.workers_per_replica
        batches = loader.loader.batch_sampler
        #: Ranks take turns by rows, or by whole batches.
        self._by_rows = batches is not None and not isinstance(batches, StridedSampler)
        self._rows: list[int] = []  # of the batches that were handed out

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        self._rows = []
        for batch in self.loader:
            self._rows.append(count_rows(batch))
            yield batch

    def num_own_rows(self) -> int:
        """Return how many of the newest batch's rows this rank counts; the first ones. The others are repeated."""
        rows = self._rows[-1]
        if not self._by_rows:
            return rows if (len(self._rows) - 1) * self._num_ranks + self._rank < self._total() else 0
        first = sum(self._rows) - rows
        is_counted = [(first + row) * self._num_ranks + self._rank < self._total() for row in range(rows)]
        return sum(is_counted)

    def gather(self, values: Any) -> Any:
        """Return the values of every row of the evaluation once, in the order of the data, on every rank.

        Args:
            values: Of the newest batch, or of all batches since ``iter()``: tensors or lists with an entry for each row, or a
                dict, list or tuple of these.

        Raises:
            UsageError: There are not as many entries as rows, or the entries of ranks have different shapes.
        """
        if isinstance(values, Mapping):
            return {name: self.gather(value) for name, value in values.items()}
        if isinstance(values, tuple):
            return tuple(self.gather(value) for value in values)
        if isinstance(values, DTensor):
            values = values.full_tensor()
        if not isinstance(values, torch.Tensor):
            return self._gather(list(values), _cut_list, lambda pieces: [row for piece in pieces for row in piece])
        gathered = self._gather(values.detach().cpu(), _cut, _join)
        return gathered.to(values.device)

    def _gather(self, values: Any, cut: Callable[[Any, list[int]], list[Any]], join: Callable[[list[Any]], Any]) -> Any:
        newest, seen = (self._rows[-1], sum(self._rows)) if self._rows else (0, 0)
        num = values.shape[0] if isinstance(values, torch.Tensor) and values.ndim else len(values)
        if num not in (newest, seen):
            raise UsageError(
                f"gather got {num} entries, and the newest batch has {newest} rows (all batches so far: {seen}): give one entry "
                "for each row of the batch, or of all batches."
            )
        is_newest = num != seen
        rows = self._rows[-1:] if is_newest else self._rows
        before = len(self._rows) - len(rows)
        if self._by_rows:
            before = seen - num
            rows = [1] * num
        own = (values, rows)
        of_ranks = [cut(*each) for each in api.gather(own)[:: self._ranks_apart]]
        return join(interleave(of_ranks, max(0, self._total() - before * self._num_ranks)))

    def _total(self) -> int:
        """Return how many rows, or whole batches, there are without those that are repeated."""
        loader = self.loader.loader
        sampler: Any = loader.batch_sampler
        if sampler is None:
            sampler = loader.sampler
        elif self._by_rows:
            sampler = sampler.sampler
        if isinstance(sampler, DistributedSampler):
            return len(sampler.dataset)  # type: ignore[arg-type]
        return len(sampler.sampler if isinstance(sampler, StridedSampler) else sampler)


def take_rows(batch: Any, num_rows: int) -> Any:
    """Return a batch with its first rows only."""
    rows = count_rows(batch)
    if num_rows >= rows:
        return batch

    def cut(value: Any) -> Any:
        return value[:num_rows] if isinstance(value, torch.Tensor) and value.ndim and len(value) == rows else value

    if isinstance(batch, Mapping) and not isinstance(batch, dict):  # such as a tokenizer's batch
        return {name: pytree.tree_map(cut, value) for name, value in batch.items()}
    return pytree.tree_map(cut, batch)


def _cut(values: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
    return list(torch.split(values, rows)) if rows else []


def _cut_list(values: list[Any], rows: list[int]) -> list[list[Any]]:
    ends = [sum(rows[: place + 1]) for place in range(len(rows))]
    return [values[end - size : end] for end, size in zip(ends, rows, strict=True)]


def _join(pieces: list[torch.Tensor]) -> torch.Tensor:
    if not pieces:
        return torch.empty(0)
    if len(shapes := {tuple(piece.shape[1:]) for piece in pieces}) > 1:
        raise UsageError(
            f"gather got rows of different shapes ({', '.join(map(str, sorted(shapes)))}): pad them to one shape before."
        )
    return torch.cat(pieces)
