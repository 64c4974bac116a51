"""Batches of examples: which rows a process collates, padding, and the random numbers of ``collate_fn``. Worker side.

Every rank reads the order of all rows, and its own position in it is part of the checkpoint. It loads and collates only those
rows of a batch that its own devices need.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysgd.data.batches.batches import Batches
from raysgd.data.dataset import WorkerDataset, WorkerDatasets
from raysgd.data.order.position import Position
from raysgd.data.plan import DatasetPlan, Source
from raysgd.functions.examples import ExampleRef, Examples, call_by_name, check_examples
from raysgd.functions.worker.steps import Steps
from raysgd.session import context


@dataclass(frozen=True)
class HostBatch:
    """One batch in the memory of the host.

    Attributes:
        refs: All its examples.
        num_rows: The number of rows with padding.
        arrays: What ``collate_fn`` made of the rows that this process needs.
    """

    refs: list[ExampleRef]
    num_rows: int
    arrays: Any


class ExampleBatches:
    """The batches of a dataset of examples, made ahead by a thread.

    Args:
        dataset: A dataset of `raysgd.functions.examples.Examples`.
        collate_fn: The user's function.
        steps: Says which rows this process needs.
        rows: Rows of a batch on all devices together.
        seed: For random numbers that ``collate_fn`` draws.
        shuffle: Whether each epoch has an order of its own.
        pads: Whether a short last batch is filled up with copies of its first example.
    """

    def __init__(
        self,
        dataset: WorkerDataset,
        collate_fn: Callable[[list[Any]], Any],
        steps: Steps,
        rows: int,
        *,
        seed: int,
        shuffle: bool = False,
        pads: bool = False,
    ) -> None:
        self._collate_fn = collate_fn
        self._steps = steps
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._pads = pads
        self._dataset = dataset
        self._shard = dataset.get_split(whole=True)
        self._batches: Batches[HostBatch] = self._shard.iter_batches(
            rows, collate_fn=self._collate, shuffle="full" if shuffle else False
        )

    def __iter__(self) -> Iterator[HostBatch]:
        return iter(self._batches)

    def first(self) -> HostBatch:
        """Return the first batch; consumes nothing."""
        return self._batches.first_batch()

    @property
    def epoch(self) -> int:
        """The epoch in progress, or else the one that the next iteration begins."""
        return self._shard.epoch

    @property
    def position(self) -> Position:
        """The position of training in the dataset."""
        return self._dataset.whole_position

    def _collate(self, refs: list[ExampleRef]) -> HostBatch:
        padded = refs + [refs[0]] * (self._rows - len(refs) if self._pads else 0)
        own = padded[self._steps.local_rows(len(padded))]
        self._seed_generators(own)
        return HostBatch(refs, len(padded), self._collate_fn([ref.load() for ref in own]))

    def _seed_generators(self, own: list[ExampleRef]) -> None:
        """Seed Python's and NumPy's generators by the batch: processes that hold the same rows must make the same arrays of them.

        A training that resumes here draws the same numbers again.
        """
        epoch = self._shard.epoch if self._shuffle else 0
        seed = zlib.crc32(repr((self._seed, epoch, own[0].row, len(own))).encode())
        random.seed(seed)
        np.random.seed(seed)


class BatchesByEpoch:
    """The batches of a training whose examples are a function of the epoch.

    Every rank calls the function when an epoch begins, and when it resumes within one; all must get the same examples.

    Args:
        name: The argument, for messages.
        make_examples: The user's function.
        open_batches: Returns the batches of a dataset.
        seed: For random numbers that the function draws from Python's and NumPy's generators.
    """

    def __init__(
        self,
        name: str,
        make_examples: Callable[..., Any],
        open_batches: Callable[[WorkerDataset], ExampleBatches],
        *,
        seed: int,
    ) -> None:
        self._name = name
        self._make_examples = make_examples
        self._open_batches = open_batches
        self._seed = seed
        self._start = Position()
        self._datasets: WorkerDatasets | None = None
        self._batches: ExampleBatches | None = None
        self._made_for = -1

    def restore(self, position: Position) -> None:
        """Continue at this position."""
        self.close()
        self._start = position

    @property
    def position(self) -> Position:
        """The position of training in the examples of the epoch."""
        return self._start if self._batches is None else self._batches.position

    @property
    def epoch(self) -> int:
        """The epoch in progress, or else the one that the next iteration begins."""
        return self._start.epoch if self._batches is None else self._batches.epoch

    def __iter__(self) -> Iterator[HostBatch]:
        if self._batches is None or self.epoch != self._made_for:
            self._open(self.epoch)
        assert self._batches is not None
        return iter(self._batches)

    def close(self) -> None:
        """Release the examples."""
        if self._datasets is not None:
            self._datasets.close()
        self._datasets, self._batches = None, None

    def _open(self, epoch: int) -> None:
        start = self.position if self.position.epoch == epoch else Position(epoch=epoch)
        self.close()
        examples = self._make(epoch)
        source = Source("items", (examples,), (len(examples),))
        self._start, self._made_for = start, epoch
        self._datasets = context.acting().open_datasets(DatasetPlan({self._name: source}), fetch=lambda block: block)
        dataset = self._datasets.get(self._name)
        dataset.check(start)
        dataset.restore(Position(), start)
        self._batches = self._open_batches(dataset)

    def _make(self, epoch: int) -> Examples:
        seed = zlib.crc32(repr((self._seed, epoch)).encode())
        random.seed(seed)
        np.random.seed(seed)
        return check_examples(f"{self._name}(epoch_idx={epoch})", call_by_name(self._make_examples, epoch_idx=epoch))
