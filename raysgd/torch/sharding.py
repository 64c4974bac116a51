"""Samplers that give each rank its share of what a DataLoader's own sampler gives. Worker side.

All of them are functions of (seed, epoch): every rank makes the same order and takes every N-th of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from raysgd.torch.seeding import drawing_from


@dataclass(frozen=True)
class Share:
    """Which share of an order a rank takes.

    Attributes:
        rank: World rank.
        num_ranks: World size.
        seed: The same on all ranks.
    """

    rank: int
    num_ranks: int
    seed: int

    @property
    def whole(self) -> Share:
        """All of the order."""
        return Share(0, 1, self.seed)

    def of(self, sampler: Any, *, drop_last: bool) -> Any:
        """A sampler that gives this rank's share of what ``sampler`` gives.

        torch's sequential and shuffling samplers become a `DistributedSampler`; one of these is left as it is, since it
        gives a share already; all others are strided.

        Args:
            sampler: Gives items, or whole batches.
            drop_last: Leave out what does not divide by the number of ranks, rather than repeat the first items.
        """
        if isinstance(sampler, DistributedSampler) or isinstance(getattr(sampler, "sampler", None), DistributedSampler):
            return sampler
        if type(sampler) is SequentialSampler or _is_plain_shuffle(sampler):
            return DistributedSampler(
                sampler.data_source,
                num_replicas=self.num_ranks,
                rank=self.rank,
                shuffle=type(sampler) is RandomSampler,
                seed=self.seed,
                drop_last=drop_last,
            )
        return StridedSampler(sampler, self, drop_last=drop_last)


class DealtBatches(Sampler[list[Any]]):
    """This rank's part of each batch that all ranks make together, whose size does not divide by their number.

    The parts follow each other in the batch and differ by one item at most. Where the last batch has fewer items than there
    are ranks, the first ones of the epoch are repeated, so that each rank has one.

    Args:
        sampler: Gives items; of a kind that is not split already.
        size: Items of a batch, of all ranks together.
        drop_last: Leave out a last batch that is smaller.
    """

    def __init__(self, sampler: Any, share: Share, size: int, *, drop_last: bool) -> None:
        self.sampler = share.whole.of(sampler, drop_last=False)
        self.share = share
        self.size = size
        self.drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        rank, num_ranks = self.share.rank, self.share.num_ranks
        items: Iterator[Any] = iter(self.sampler)
        head: list[Any] = []
        while batch := list(islice(items, self.size)):
            head = head or batch[:num_ranks]
            if len(batch) < self.size and self.drop_last:
                return
            batch += islice(cycle(head), max(0, num_ranks - len(batch)))
            yield batch[len(batch) * rank // num_ranks : len(batch) * (rank + 1) // num_ranks]


class StridedSampler(Sampler[Any]):
    """Every N-th item, or batch, of what another sampler gives.

    All ranks must see the same order. Where the sampler has a length, its whole order is made at the start of an epoch
    while the global generators, and its own ``generator``, stand at seed + epoch: that makes samplers that draw from
    them alike on all ranks. Without a length it may be endless: then it is read as it goes, must give the same order on
    all ranks by itself, and ends with the last complete round of ranks.
    """

    def __init__(self, sampler: Any, share: Share, *, drop_last: bool) -> None:
        self.sampler = sampler
        self.share = share
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
            return self._complete_rounds()
        with drawing_from(self.share.seed + self.epoch, *_generators(self.sampler)):
            order = list(self.sampler)
        total = self._num_items(len(order)) * self.share.num_ranks
        return self._strided(islice(chain(order, cycle(order)), total))

    def _num_items(self, total: int) -> int:
        return total // self.share.num_ranks if self.drop_last else math.ceil(total / self.share.num_ranks)

    def _strided(self, items: Iterable[Any]) -> Iterator[Any]:
        return islice(items, self.share.rank, None, self.share.num_ranks)

    def _complete_rounds(self) -> Iterator[Any]:
        items = iter(self.sampler)
        while len(one_each := list(islice(items, self.share.num_ranks))) == self.share.num_ranks:
            yield one_each[self.share.rank]


def _is_plain_shuffle(sampler: Any) -> bool:
    """A shuffle of everything: no draws with replacement, no chosen number of them."""
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


def _generators(sampler: Any) -> list[torch.Generator]:
    """The sampler's own generator, and that of the sampler inside a batch sampler."""
    found = [getattr(each, "generator", None) for each in (sampler, getattr(sampler, "sampler", None))]
    unique = {id(one): one for one in found if isinstance(one, torch.Generator) and one.device.type == "cpu"}
    return list(unique.values())
