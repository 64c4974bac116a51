"""Evaluation on all ranks: a loader that says which rows it repeats, and rows gathered in the order of the data. Worker side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
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


def interleave(of_ranks: Sequence[Sequence[T]], total: int | None) -> list[T]:
    """Return what all ranks have in the order of the data, of which rank r of N has items r, r + N, r + 2N, ...

    Args:
        of_ranks: Items by rank.
        total: Items without those that are repeated at the end. None: none are repeated.
    """
    return [one for step in zip_longest(*of_ranks, fillvalue=_MISSING) for one in step if one is not _MISSING][:total]


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
        self._ranks_apart = context.current().identity.workers_per_replica
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
        if self._places.by_rows:
            before = seen - num
            rows = [1] * num
        own = (values, rows)
        of_ranks = [cut(*each) for each in api.gather(own)[:: self._ranks_apart]]
        total = self._places.total()
        return join(interleave(of_ranks, None if total is None else max(0, total - before * self._places.num_ranks)))


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
    ranks_apart = context.current().identity.workers_per_replica
    if isinstance(values, list):
        lists: list[list[Any]] = api.gather(values[: _num_own(len(values), places, number)])[::ranks_apart]
        return interleave(lists, None) if places.by_rows else list(chain.from_iterable(lists))
    if is_dtensor(values):
        values = values.full_tensor()
    if not isinstance(values, torch.Tensor) or not values.ndim:
        given = (
            "a tensor without dimensions" if isinstance(values, torch.Tensor) else with_article(type(values).__name__)
        )
        raise UsageError(
            f"gather_for_metrics got {given}; give tensors or lists with one entry for each row of the batch, or a dict, tuple "
            "or list of such tensors. A mean over a batch is spread over its rows by loss.expand(num_rows)."
        )
    own = values[: _num_own(len(values), places, number)].detach().cpu()
    pieces: list[torch.Tensor] = [each for each in api.gather(own)[::ranks_apart] if len(each)]
    if places.by_rows:
        pieces = interleave([torch.split(each, 1) for each in pieces], None)
    return _join(pieces or [own]).to(values.device)


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
