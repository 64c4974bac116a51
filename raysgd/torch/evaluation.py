"""Evaluation on all ranks: a loader that says which rows it repeats, and rows gathered in the order of the data. Worker side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, zip_longest
from typing import Any, TypeVar

import torch

from raysgd._util.text import with_article
from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.errors import ConfigError, UsageError
from raysgd.session import api, context
from raysgd.torch.batches import count_rows
from raysgd.torch.loader import PreparedLoader, newest
from raysgd.torch.rows import RowPlaces

T = TypeVar("T")
_MISSING: Any = object()


def interleave(of_ranks: Sequence[Sequence[T]]) -> list[T]:
    """Return items by rank in the order of the data, of which rank r of N has items r, r + N, r + 2N, ..."""
    return [one for step in zip_longest(*of_ranks, fillvalue=_MISSING) for one in step if one is not _MISSING]


class EvaluationLoader:
    """A loader for evaluation that was prepared, and what of it was read since the last ``iter()``.

    Attributes:
        loader: The prepared loader.

    Raises:
        ConfigError: It is not known which rows of the data each rank reads.
    """

    def __init__(self, loader: PreparedLoader) -> None:
        self.loader = loader
        self._places = RowPlaces(loader)
        if not self._places.is_even:
            raise ConfigError(
                f"an evaluation on {self._places.num_ranks} replicas of the model needs to know which rows each of them reads, "
                f"and {type(loader.loader.batch_sampler).__name__} does not say so: give a dataset, or a DataLoader with "
                "batch_size=... or with a batch sampler that yields the same batches on all ranks."
            )
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
        return self._places.num_own(len(self._rows) - 1, sum(self._rows) - rows, rows)

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
        if is_dtensor(values):
            values = values.full_tensor()
        if not isinstance(values, torch.Tensor) and isinstance(values, Iterable):
            values = list(values)
        _check_entries("gather", values)
        return _gather_entries(values, self._batches_of(len(values)), self._places)

    def _batches_of(self, num: int) -> list[tuple[int, int]]:
        """Return the rows of the batches that so many entries belong to, and how many of each this rank counts."""
        newest, seen = (self._rows[-1], sum(self._rows)) if self._rows else (0, 0)
        if num not in (newest, seen):
            raise UsageError(
                f"gather got {num} entries, and the newest batch has {newest} rows (all batches so far: {seen}): give one entry "
                "for each row of the batch, or of all batches."
            )
        befores = accumulate(self._rows, initial=0)
        batches = [
            (rows, self._places.num_own(number, before, rows))
            for number, (rows, before) in enumerate(zip(self._rows, befores, strict=False))
        ]
        return batches if num == seen else batches[-1:]


def gather_for_metrics(values: Any) -> Any:
    """Return what all ranks have for the newest batch of a prepared loader; see `raysgd.Engine.gather_for_metrics`."""
    loader = newest.loader()
    if loader is None:
        raise UsageError(
            "gather_for_metrics drops the rows that a loader has repeated, and no prepared loader has handed out a batch: give "
            "the loader to engine.compose(eval_dataloader=...) or raysgd.torch.prepare_data_loader(loader, train=False)."
        )
    return _gather_own(values, RowPlaces(loader), newest.number)


def _gather_own(values: Any, places: RowPlaces, number: int) -> Any:
    if isinstance(values, Mapping):
        return {name: _gather_own(value, places, number) for name, value in values.items()}
    has_tensors = isinstance(values, list) and any(isinstance(each, torch.Tensor) for each in values)
    if isinstance(values, tuple) or has_tensors:
        gathered = [_gather_own(value, places, number) for value in values]
        return type(values)(*gathered) if hasattr(values, "_fields") else type(values)(gathered)
    if is_dtensor(values):
        values = values.full_tensor()
    _check_entries("gather_for_metrics", values)
    return _gather_entries(values, [(len(values), _num_own(len(values), places, number))], places)


def _check_entries(name: str, values: Any) -> None:
    if isinstance(values, list) or (isinstance(values, torch.Tensor) and values.ndim):
        return
    given = "a tensor without dimensions" if isinstance(values, torch.Tensor) else with_article(type(values).__name__)
    raise UsageError(
        f"{name} got {given}; give tensors or lists with one entry for each row of the batch, or a dict, tuple or list of such "
        "tensors. A mean over a batch is spread over its rows by loss.expand(num_rows)."
    )


def _num_own(num: int, places: RowPlaces, number: int) -> int:
    """Return how many of the newest batch's entries belong to rows that no other rank counts; the first ones."""
    if not places.repeats or (places.is_even and places.total() is None):
        return num
    if not (places.is_even and places.by_rows) or num > places.batch_size:
        raise UsageError(
            f"gather_for_metrics got {num} entries for a batch of a loader that repeats rows, and does not know which: call it "
            "for each batch, of a loader from engine.compose(eval_dataloader=...) or prepare_data_loader(loader, train=False)."
        )
    return places.num_own(number, number * places.batch_size, num)


def _gather_entries(values: Any, batches: Sequence[tuple[int, int]], places: RowPlaces) -> Any:
    """Return the entries that the ranks count, in the order of the data.

    Args:
        values: A list, or a tensor, with an entry for each row of some batches.
        batches: The rows of each batch, and how many of them this rank counts: the first ones.
        places: Of the loader of these batches.

    Raises:
        UsageError: The entries of ranks have different shapes.
    """
    device = values.device if isinstance(values, torch.Tensor) else None
    values = values if device is None else values.detach().cpu()
    ends = accumulate(rows for rows, _ in batches)
    own = [values[end - rows : end - rows + count] for end, (rows, count) in zip(ends, batches, strict=True)]
    of_ranks = api.gather(own)[:: context.current().identity.workers_per_replica]
    if places.by_rows:
        of_ranks = [[part[at : at + 1] for part in parts for at in range(len(part))] for parts in of_ranks]
    parts = [part for part in interleave(of_ranks) if len(part)]
    if device is None:
        return list(chain.from_iterable(parts))
    if len(shapes := {tuple(part.shape[1:]) for part in parts}) > 1:
        raise UsageError(
            f"gather got rows of different shapes ({', '.join(map(str, sorted(shapes)))}): pad them to one shape before."
        )
    return torch.cat(parts or [values[:0]]).to(device)
