"""Samplers that split what a DataLoader's own sampler yields over the ranks, and seeds for its processes. Worker side.

The order is a function of (seed, epoch) that is equal on all ranks; rank r of N takes items r, r + N, r + 2N, ...
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

_END = object()


@dataclass(frozen=True)
class Shard:
    """The shard of an order that a rank takes.

    Attributes:
        seed: Equal on all ranks.
    """

    rank: int
    num_ranks: int
    seed: int

    @property
    def whole(self) -> Shard:
        """All of the order, as the only shard."""
        return Shard(0, 1, self.seed)

    def split(self, sampler: Any, drop_last: bool) -> Any:
        """Return a sampler that yields this rank's shard of what ``sampler`` yields.

        torch's sequential and shuffling samplers become a `DistributedSampler`. All others are wrapped in a `StridedSampler`.

        Args:
            sampler: Yields items, or whole batches; those of all ranks.
            drop_last: Drop the remainder that does not divide by the number of ranks, instead of repeating the first items.
        """
        if type(sampler) is SequentialSampler or is_plain_shuffle(sampler):
            return DistributedSampler(
                sampler.data_source,
                num_replicas=self.num_ranks,
                rank=self.rank,
                shuffle=type(sampler) is RandomSampler,
                seed=self.seed,
                drop_last=drop_last,
            )
        return StridedSampler(sampler, self, drop_last=drop_last)


class UnevenBatchSampler(Sampler[list[Any]]):
    """This rank's slice of each global batch, whose size does not divide by the number of ranks.

    The slices of the ranks follow each other in the batch and differ by one item at most. If the last batch has fewer items
    than there are ranks, the first items of the epoch are repeated, so that each rank has one.

    Args:
        sampler: Yields items; must not be split already.
        shard: This rank's shard.
        size: Items of a global batch.
        drop_last: Drop a last batch that is smaller.
    """

    def __init__(self, sampler: Any, shard: Shard, size: int, *, drop_last: bool) -> None:
        self.sampler = shard.whole.split(sampler, drop_last=False)
        self.shard = shard
        self.size = size
        self.drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        full, remainder = divmod(len(self.sampler), self.size)
        return full + (remainder > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        rank, num_ranks = self.shard.rank, self.shard.num_ranks
        items: Iterator[Any] = iter(self.sampler)
        head: list[Any] = []
        while batch := list(islice(items, self.size)):
            head = head or batch[:num_ranks]
            if len(batch) < self.size and self.drop_last:
                return
            batch += islice(cycle(head), max(0, num_ranks - len(batch)))
            yield batch[len(batch) * rank // num_ranks : len(batch) * (rank + 1) // num_ranks]


class StridedSampler(Sampler[Any]):
    """Every N-th item, or batch, of what another sampler yields.

    All ranks must see the same order. If the sampler has a length, its whole order is drawn at the start of an epoch, while
    the global generators and the sampler's own ``generator`` are seeded with seed + epoch: samplers that draw from them yield
    the same order on all ranks. A sampler without a length may be endless: it is read on demand, must yield the same order
    on all ranks by itself, and ends with the last item that all ranks have.
    """

    repeats = True  # the first items, so that all ranks have equally many

    def __init__(self, sampler: Any, shard: Shard, *, drop_last: bool) -> None:
        self.sampler = sampler
        self.shard = shard
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if callable(inner := getattr(self.sampler, "set_epoch", None)):
            inner(epoch)

    def __len__(self) -> int:
        return self._num_items(len(self.sampler))

    def __iter__(self) -> Iterator[Any]:
        if not hasattr(self.sampler, "__len__"):
            return self._read_on_demand()
        order = draw_order(self.sampler, self.shard.seed + self.epoch)
        if not self.repeats:
            return self._every_nth(order)
        total = self._num_items(len(order)) * self.shard.num_ranks
        return self._every_nth(islice(chain(order, cycle(order)), total))

    def _num_items(self, total: int) -> int:
        return total // self.shard.num_ranks if self.drop_last else math.ceil(total / self.shard.num_ranks)

    def _every_nth(self, items: Iterable[Any]) -> Iterator[Any]:
        return islice(items, self.shard.rank, None, self.shard.num_ranks)

    def _read_on_demand(self) -> Iterator[Any]:
        items = iter(self.sampler)
        while len(one_each := list(islice(items, self.shard.num_ranks))) == self.shard.num_ranks:
            yield one_each[self.shard.rank]


class EvaluationItems(StridedSampler):
    """Every N-th item, none twice: the last ranks may have one item fewer."""

    repeats = False

    def __len__(self) -> int:
        return len(range(self.shard.rank, len(self.sampler), self.shard.num_ranks))


class EvaluationTurns(StridedSampler):
    """Every N-th batch of another sampler. All ranks have equally many: where there are none left, a batch stands in."""

    def is_stand_in(self, number: int) -> bool:
        """Whether this rank's batch of this number is another rank's too, so that its rows do not count."""
        if not hasattr(self.sampler, "__len__"):
            return False
        return number * self.shard.num_ranks + self.shard.rank >= len(self.sampler)


class EvaluationBatches(Sampler[list[Any]]):
    """This rank's part of each step of an evaluation, which reads each item on one rank.

    All ranks have equally many batches, as sharded models need all ranks for each. For that the last full step gives items to
    the last one, if it had fewer than there are ranks. Where items do not suffice, with steps of one item for each rank, an
    item stands in for the batch.

    Args:
        sampler: Yields items; must not be split already.
        shard: This rank's shard.
        size: Items of a step, on all ranks together.
        drop_last: Drop a last step that is smaller.
    """

    def __init__(self, sampler: Any, shard: Shard, size: int, *, drop_last: bool) -> None:
        self.sampler = shard.whole.split(sampler, drop_last=False)
        self.shard = shard
        self.size = size
        self.drop_last = drop_last
        self.batch_size = -(-size // shard.num_ranks)
        self._ends: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._ends_of_steps(len(self.sampler)))

    def __iter__(self) -> Iterator[list[Any]]:
        order = list(self.sampler)
        self._ends = self._ends_of_steps(len(order))
        for start, end in zip([0, *self._ends], self._ends, strict=False):
            yield order[start:end][self.shard.rank :: self.shard.num_ranks] or order[:1]

    def is_stand_in(self, number: int) -> bool:
        """Whether this rank's batch of this number, in the epoch that was begun last, has no items of its own."""
        start = self._ends[number - 1] if number else 0
        return self._ends[number] - start <= self.shard.rank

    def _ends_of_steps(self, num_items: int) -> list[int]:
        num_steps = num_items // self.size if self.drop_last else -(-num_items // self.size)
        ends = [min((step + 1) * self.size, num_items) for step in range(num_steps)]
        if num_steps > 1 and (missing := self.shard.num_ranks - (ends[-1] - ends[-2])) > 0:
            has_enough = self.size - missing >= self.shard.num_ranks
            ends[-2] -= missing if has_enough else 0
        return ends


def draw_order(sampler: Any, seed: int) -> list[Any]:
    """Return all that a sampler yields, while the generators that it may draw from are seeded."""
    with seeded(seed, *_generators(sampler)):
        return list(sampler)


def is_plain_shuffle(sampler: Any) -> bool:
    """Whether the sampler shuffles all items: no replacement, and no limited number of samples."""
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


def _generators(sampler: Any) -> list[torch.Generator]:
    """Return the sampler's own generator, and that of the sampler inside a batch sampler."""
    found = [getattr(each, "generator", None) for each in (sampler, getattr(sampler, "sampler", None))]
    unique = {id(one): one for one in found if isinstance(one, torch.Generator) and one.device.type == "cpu"}
    return list(unique.values())


@contextmanager
def seeded(seed: int, *generators: torch.Generator) -> Iterator[None]:
    """Seed Python, NumPy, torch's CPU generator and the given ones inside the block; restore their states after it."""
    generators = (torch.default_generator, *generators)
    before = random.getstate(), np.random.get_state(), [generator.get_state() for generator in generators]
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        for generator, state in zip(generators, before[2], strict=True):
            generator.set_state(state)


class LoaderSeeds:
    """Seeds for a DataLoader's processes, different on every rank, in every epoch and process.

    It is a ``worker_init_fn``, because the seeds that torch derives are equal on ranks that were seeded equally. It also
    holds a generator for the DataLoader, which otherwise draws from torch's global one at each ``iter()``. A loop that was
    resumed within an epoch calls ``iter()`` once more than an uninterrupted one, and would continue with other numbers.

    Args:
        seed: None: torch's initial seed in this process.
        rank: World rank.
        then: The user's own ``worker_init_fn``, called afterwards.
    """

    def __init__(self, seed: int | None, rank: int, then: Callable[[int], Any] | None) -> None:
        self.generator = torch.Generator()
        self._seed = seed
        self._rank = rank
        self._then = then
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the processes load. Processes of ``persistent_workers=True`` start once and do not see it."""
        base = torch.initial_seed() if self._seed is None else self._seed
        self._epoch_seed = _mix(base, self._rank, epoch)
        self.generator.manual_seed(self._epoch_seed)

    def __call__(self, worker_id: int) -> None:
        seed = _mix(self._epoch_seed, worker_id)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # NumPy takes 32 bits
        torch.manual_seed(seed)
        if self._then is not None:
            self._then(worker_id)

    def __getstate__(self) -> dict[str, Any]:
        # The DataLoader's processes do not use the generator, which does not pickle.
        return {name: value for name, value in self.__dict__.items() if name != "generator"}


@dataclass(frozen=True)
class BatchSeeds:
    """Seeds with which batches are read, for ranks that hold one replica of a model between them.

    These ranks read the same rows. Rows, and functions that collate them, may draw from global generators, which differ between
    ranks. While a batch is read, they are seeded by its number, so all ranks of the replica draw the same, also after a resume.

    Attributes:
        seed: Equal on all ranks.
        replica: The data-parallel rank.
    """

    seed: int
    replica: int

    def read(self, batches: Iterator[Any], epoch: int, number: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch; ``number`` is that of the first one."""
        while True:
            with seeded(_mix(self.seed, self.replica, epoch, number)):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
            number += 1


def _mix(*numbers: int) -> int:
    """Hash several numbers to one seed, so that similar numbers give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest(), "big")
