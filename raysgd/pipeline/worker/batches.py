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
from raysgd.data.dataset import WorkerDataset
from raysgd.pipeline.examples import ExampleRef
from raysgd.pipeline.worker.steps import Steps


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
        dataset: A dataset of `raysgd.pipeline.examples.Examples`.
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
