"""Evaluation on all ranks: a loader that says which rows it repeats, and rows gathered in the order of the data. Worker side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, zip_longest
from typing import Any, TypeVar

import torch

from raysgd._util.text import with_article
from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.errors import ConfigError, UsageError
from raysgd.session import api, context
from raysgd.torch.loader import BatchRows, PreparedLoader

T = TypeVar("T")
_MISSING: Any = object()


def interleave(of_ranks: Sequence[Sequence[T]]) -> list[T]:
    """Return items by rank in the order of the data, of which rank r of N has items r, r + N, r + 2N, ..."""
    return [one for step in zip_longest(*of_ranks, fillvalue=_MISSING) for one in step if one is not _MISSING]


class EvaluationLoader(PreparedLoader):
    """A prepared loader for an evaluation, which knows the rows that it has handed out since the last ``iter()``.

    Raises:
        ConfigError: It is not known which rows of the data each rank reads.
    """

    def __init__(self, loader: PreparedLoader) -> None:
        vars(self).update(vars(loader))
        if not loader.knows_own_rows:
            num_replicas = context.current().identity.data_parallel_size
            raise ConfigError(
                f"an evaluation on {num_replicas} replicas of the model needs to know which rows each of them reads, "
                f"and {type(loader.loader.batch_sampler).__name__} does not say so: give a dataset, or a DataLoader with "
                "batch_size=... or with a batch sampler that yields the same batches on all ranks."
            )
        self._handed: list[BatchRows] = []

    def _hand_out(self, batches: Iterator[tuple[Any, BatchRows]], number: int) -> Iterator[Any]:
        self._handed = []
        for batch in super()._hand_out(batches, number):
            self._handed.append(self.rows)
            yield batch

    def num_own_rows(self) -> int:
        """Return how many of the newest batch's rows this rank counts; the first ones. The others are repeated."""
        return self.rows.own

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
        return _gather_entries(values, self._batches_of(len(values)))

    def _batches_of(self, num: int) -> list[BatchRows]:
        """Return the batches that so many entries belong to."""
        newest, seen = (self._handed[-1].num, sum(each.num for each in self._handed)) if self._handed else (0, 0)
        if num not in (newest, seen):
            raise UsageError(
                f"gather got {num} entries, and the newest batch has {newest} rows (all batches so far: {seen}): give one entry "
                "for each row of the batch, or of all batches."
            )
        return self._handed if num == seen else self._handed[-1:]


def gather_for_metrics(values: Any) -> Any:
    """Return what all ranks have for the newest batch of a prepared loader; see `raysgd.Engine.gather_for_metrics`."""
    loader = PreparedLoader.newest()
    if loader is None:
        raise UsageError(
            "gather_for_metrics drops the rows that a loader has repeated, and no prepared loader has handed out a batch: give "
            "the loader to engine.compose(eval_dataloader=...) or raysgd.torch.prepare_data_loader(loader, train=False)."
        )
    return _gather_own(values, loader)


def _gather_own(values: Any, loader: PreparedLoader) -> Any:
    if isinstance(values, Mapping):
        return {name: _gather_own(value, loader) for name, value in values.items()}
    has_tensors = isinstance(values, list) and any(isinstance(each, torch.Tensor) for each in values)
    if isinstance(values, tuple) or has_tensors:
        gathered = [_gather_own(value, loader) for value in values]
        return type(values)(*gathered) if hasattr(values, "_fields") else type(values)(gathered)
    if is_dtensor(values):
        values = values.full_tensor()
    _check_entries("gather_for_metrics", values)
    num, rows = len(values), loader.rows
    repeats = loader.train and context.current().identity.data_parallel_size > 1
    if repeats and (not loader.knows_own_rows or num > rows.num):
        raise UsageError(
            f"gather_for_metrics got {num} entries for a batch of a loader that repeats rows, and does not know which: call it "
            "for each batch, of a loader from engine.compose(eval_dataloader=...) or prepare_data_loader(loader, train=False)."
        )
    own = min(num, rows.own) if repeats else num
    return _gather_entries(values, [replace(rows, num=num, own=own)])


def _check_entries(name: str, values: Any) -> None:
    if isinstance(values, list) or (isinstance(values, torch.Tensor) and values.ndim):
        return
    given = "a tensor without dimensions" if isinstance(values, torch.Tensor) else with_article(type(values).__name__)
    raise UsageError(
        f"{name} got {given}; give tensors or lists with one entry for each row of the batch, or a dict, tuple or list of such "
        "tensors. A mean over a batch is spread over its rows by loss.expand(num_rows)."
    )


def _gather_entries(values: Any, batches: Sequence[BatchRows]) -> Any:
    """Return the entries that the ranks count, in the order of the data.

    Args:
        values: A list, or a tensor, with an entry for each row of some batches.
        batches: These batches.

    Raises:
        UsageError: The entries of ranks have different shapes.
    """
    device = values.device if isinstance(values, torch.Tensor) else None
    values = values if device is None else values.detach().cpu()
    ends = accumulate(batch.num for batch in batches)
    own = [
        (values[end - rows.num : end - rows.num + rows.own], rows.together)
        for end, rows in zip(ends, batches, strict=True)
    ]
    of_ranks = api.gather(own)[:: context.current().identity.workers_per_replica]
    parts = [part for step in zip_longest(*of_ranks, fillvalue=(values[:0], 1)) for part in _in_turns(step)]
    if device is None:
        return list(chain.from_iterable(parts))
    if len(shapes := {tuple(part.shape[1:]) for part in parts}) > 1:
        raise UsageError(
            f"gather got rows of different shapes ({', '.join(map(str, sorted(shapes)))}): pad them to one shape before."
        )
    return torch.cat(parts or [values[:0]]).to(device)


def _in_turns(step: Iterable[tuple[Any, int]]) -> list[Any]:
    """Return the entries of all ranks for a step, where each rank in turn has so many that follow each other."""
    of_ranks = [[part[at : at + num] for at in range(0, len(part), num)] for part, num in step]
    return interleave(of_ranks)
