"""What a rank reads of the order of all ranks, and seeds for a DataLoader's processes. Worker side.

The order is a function of (seed, epoch) that is equal on all ranks; `RankSampler` alone decides which items a rank reads in each
step, and how many of them are its own. The others are repeated, or stand in where a rank has none.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler

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


class Order(Sampler[Any]):
    """A sampler that yields all that another one yields, equally on all ranks: a function of seed and epoch.

    The order of a sampler with a length is drawn at the start of an epoch, while the global generators and the sampler's own
    ``generator`` are seeded with seed + epoch. A sampler without a length may be endless: it is read on demand, and must yield
    the same on all ranks by itself. A DistributedSampler stands for the rows of all its ranks.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler: Any = sampler
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        forward_epoch(epoch, with_inner(self.sampler))

    def __len__(self) -> int:
        items: Any = self.sampler.dataset if type(self.sampler) is DistributedSampler else self.sampler
        return len(items)

    def __iter__(self) -> Iterator[Any]:
        if not hasattr(self.sampler, "__len__"):
            return iter(self.sampler)
        whole = self.sampler
        if type(whole) is DistributedSampler:
            whole = copy.copy(whole)
            whole.num_replicas, whole.rank, whole.num_samples, whole.total_size = 1, 0, len(self), len(self)
        return iter(draw_order(whole, self.seed + self.epoch))


class RankSampler(Sampler[Any]):
    """A sampler that yields what this rank reads of an order: items, or batches of a batch sampler, one by one.

    The order is read in steps, of which rank r of N takes places r, r + N, r + 2N, ... In training the last step is filled up
    with the first items of the epoch, so that each rank reads equally many. An evaluation reads each item once: for all ranks
    to have one, the step before gives items to the last one. Where that does not suffice, an item of another rank stands in.

    Args:
        sampler: Yields all items, equally on all ranks.
        shard: This rank's shard.
        size: Items of a step, on all ranks together; one for each rank by default.
        drop_last: Drop a last step that is smaller.
        stands_in: False: an evaluation leaves out a step without an item for this rank.

    Attributes:
        reads: What iterations that begin now note of each step: how many items this rank takes, and how many of these are its
            own. The others, which follow, count on other ranks.
    """

    def __init__(
        self,
        sampler: Order,
        shard: Shard,
        *,
        train: bool,
        size: int | None = None,
        drop_last: bool = False,
        stands_in: bool = True,
    ) -> None:
        self.order = self.sampler = sampler
        self.rank, self.num_replicas = shard.rank, shard.num_ranks
        self.train = train
        self.size = size or shard.num_ranks
        self.drop_last = drop_last
        self.stands_in = stands_in
        self.reads: dict[int, tuple[int, int]] = {}

    @property
    def epoch(self) -> int:
        return self.order.epoch

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        before = max(0, len(self.order) // self.size - 1)
        return before + len(self._places(len(self.order) - before * self.size))

    def __iter__(self) -> Iterator[Any]:
        return (items[0] for items in self.read())

    def read(self) -> Iterator[list[Any]]:
        """Start an epoch; yields what this rank reads in each step."""
        return self._read(iter(self.order), self.reads)

    def _read(self, items: Iterator[Any], reads: dict[int, tuple[int, int]]) -> Iterator[list[Any]]:
        ahead = self.size if self.train else 2 * self.size  # the step before the last one of an evaluation may differ
        held = list(islice(items, ahead))
        first, number = held[: self.num_replicas], 0
        while len(held) == ahead:
            taken = held[self.rank : self.size : self.num_replicas]
            reads[number] = len(taken), len(taken)
            number += 1
            yield taken
            held = held[self.size :] + list(islice(items, self.size))
        for step, places in enumerate(self._places(len(held)), start=number):
            own = [held[place] for place in places if place < len(held)]
            others = [first[(place - len(held)) % len(first)] for place in places if place >= len(held)]
            reads[step] = len(places), len(own)
            yield own + others

    def _places(self, num: int) -> list[range]:
        """Return the places of the last steps, of ``num`` items, that this rank reads; places from ``num`` on are not its own."""
        full, left = divmod(num, self.size)
        ends = [self.size * (step + 1) for step in range(full)]
        missing = self.num_replicas - left
        if left and not self.drop_last:
            filled = min(self.size, -(-left // self.num_replicas) * self.num_replicas)
            ends.append(full * self.size + (filled if self.train else left))
            if full and not self.train and 0 < missing <= self.size - self.num_replicas:
                ends[-2] -= missing
        steps = [range(start + self.rank, end, self.num_replicas) for start, end in zip([0, *ends], ends, strict=False)]
        return [step or range(num, num + 1) for step in steps if step or self.stands_in]


class RankBatches(RankSampler, BatchSampler):  # type: ignore[misc]
    """This rank's batches, each of what it reads in a step.

    Args:
        order: All items.
        shard: This rank's shard.
        sampler: What users see as the sampler of the items.
    """

    def __init__(self, order: Order, shard: Shard, sampler: Any, *, train: bool, size: int, drop_last: bool) -> None:
        super().__init__(order, shard, train=train, size=size, drop_last=drop_last)
        self.sampler = sampler
        self.batch_size = -(-size // shard.num_ranks)  # the largest of all ranks

    def __iter__(self) -> Iterator[list[Any]]:
        return self.read()


def draw_order(sampler: Any, seed: int) -> list[Any]:
    """Return all that a sampler yields, while the generators that it may draw from are seeded."""
    with seeded(seed, *_generators(sampler)):
        return list(sampler)


def is_plain_shuffle(sampler: Any) -> bool:
    """Whether the sampler shuffles all items: no replacement, and no limited number of samples."""
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


def with_inner(sampler: Any) -> Iterator[Any]:
    """Yield the sampler, then the samplers that it reads, from the outermost on."""
    seen: list[int] = []
    while sampler is not None and id(sampler) not in seen:
        seen.append(id(sampler))
        yield sampler
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner


def forward_epoch(epoch: int, users: Iterable[Any]) -> None:
    """Set the epoch of each user that has one."""
    for user in {id(user): user for user in users}.values():
        if callable(set_epoch := getattr(user, "set_epoch", None)):
            set_epoch(epoch)


def _generators(sampler: Any) -> list[torch.Generator]:
    """Return the generators of a sampler and of those that it reads."""
    found = [getattr(each, "generator", None) for each in with_inner(sampler)]
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
