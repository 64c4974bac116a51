"""`prepare_data_loader`: a torch DataLoader that reads this rank's shard and yields batches on this rank's device.

Worker side. For training on each row exactly once, through failures and resizes, use ``raysgd.get_dataset``.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from raysgd._util.text import with_article
from raysgd.config.checks import check_count
from raysgd.errors import ConfigError, UsageError
from raysgd.session import api, context
from raysgd.torch.batches import count_samples, digest, without_rows
from raysgd.torch.devices import device, to_device
from raysgd.torch.own_shards import check_no_repeats, is_own_shard, stated_shard
from raysgd.torch.samplers import (
    BatchSeeds,
    LoaderSeeds,
    Order,
    RankBatches,
    RankSampler,
    Shard,
    forward_epoch,
    is_plain_shuffle,
    seeded,
    with_inner,
)

_END = object()
_BEFORE_A_FORK_S = 0.002
#: The epoch that samplers of users got last from a prepared loader. Another one was set by the loop, as in torchrun's scripts.
_forwarded: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
#: For each batch of a rank: how many items it has, and how many of these are the rank's own; None: not known.
_Reads = dict[int, tuple[int, int]] | None


def prepare_data_loader(
    loader: DataLoader[Any],
    *,
    add_sampler: bool = True,
    move_to_device: bool = True,
    global_batch_size: int | None = None,
    train: bool = True,
) -> PreparedLoader:
    """Prepare a DataLoader for use on all workers. All its other settings are kept. All ranks call it.

    Each rank reads its shard of the order, which is a function of the Trainer's seed (0 by default) and the epoch. In training
    all ranks get equally many items, as gradients are averaged step by step. If the data does not divide by the number of
    workers, the first items are repeated, or with ``drop_last=True`` the last ones dropped.

    An evaluation, ``train=False``, reads each item once. All ranks get equally many batches, some of which have fewer items.
    If there are not enough for all ranks, as in the last step of ``batch_size=1``, a rank gets a batch without items.

    A loop may set the epoch by ``loader.sampler.set_epoch``, too, as in scripts of torchrun.

    A sampler that takes its rank's shard itself is kept, as a DistributedSampler, or any with ``num_replicas`` and
    ``rank``. Batch samplers, and samplers other than torch's sequential and shuffling ones, are read in full on every rank, and
    every rank keeps each N-th item or batch. A sampler with a length may draw from Python's, NumPy's and torch's generators,
    which are seeded for it. If it yields different items on the ranks all the same, it is kept, as it takes a shard.

    Ranks that hold one replica of a model between them read the same rows. Rows that are augmented with random numbers are the
    same on all of them: Python's, NumPy's and torch's generators are seeded while a batch is read.

    Outside a worker the loader is not split; batches are moved and epochs are counted.

    Args:
        loader: Stays usable by itself; the result works on a copy.
        add_sampler: False leaves the order to the loader, for data that is split already.
        move_to_device: Yield batches on `device()`: tensors in dicts, lists, tuples, dataclasses, and objects with a method
            ``to``. With ``pin_memory=True`` the copies to a GPU are asynchronous.
        global_batch_size: Items per step on all workers together, of which each of N takes every N-th. If it does not divide
            by N, they differ by one item, and gradients are averaged as if they did not. By default each worker takes batches
            of the loader's own size.
        train: False for an evaluation, which counts each item once. A loader that was prepared for training is prepared again.

    Raises:
        UsageError: The loader has an IterableDataset and there are several workers: no sampler can split it.
        ConfigError: ``global_batch_size`` is less than the number of workers, or does not divide by it and the loader's data
            is split already; or the loader makes no batches; or its sampler takes another shard than this rank's, or yields
            different orders on the ranks that are not shards.
    """
    if isinstance(loader, PreparedLoader):
        if train or not loader.train:
            return loader
        return prepare_data_loader(loader.given, **loader._settings, train=False)
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"prepare_data_loader takes a torch DataLoader, not {with_article(type(loader).__name__)}.")
    if context.current().logical is not None:
        raise ConfigError(
            "prepare_data_loader() with Trainer(logical_workers=...): a DataLoader's rows belong to no logical worker. Give the "
            "data to run(dataset=...), and loop over raysgd.torch.logical_steps."
        )
    target = device() if move_to_device else None
    split, reads = _split_for_this_rank(loader, add_sampler, global_batch_size, train)
    settings = {"add_sampler": add_sampler, "move_to_device": move_to_device, "global_batch_size": global_batch_size}
    return PreparedLoader(split, target, make_batch_seeds(), reads, given=loader, settings=settings, train=train)


def make_batch_seeds() -> BatchSeeds | None:
    """Return the seeds with which this rank reads batches; None if no other rank has to read the same."""
    session = context.current()
    is_shared = session.identity.workers_per_replica > 1
    return BatchSeeds(session.seed or 0, session.identity.data_parallel_rank) if is_shared else None


@dataclass(frozen=True)
class BatchRows:
    """The rows of a batch.

    Attributes:
        num: How many there are.
        own: How many count on this rank; they are the first ones. The others are repeated, and count on another rank.
        samples: Rows of the dataset that it was made of, from which a collate function may make more or fewer.
        own_samples: How many of these count on this rank.
        together: How many rows follow each other in the data, as those of a batch of the user's batch sampler; ranks take turns
            after so many.
    """

    num: int
    own: int
    samples: int
    own_samples: int
    together: int = 1


class PreparedLoader:
    """A DataLoader that was prepared: can be iterated, and has the length and attributes of the DataLoader inside.

    Each ``iter()`` starts the next epoch, with an order of its own. A resumed loop calls ``set_epoch(start)``, once or before
    every epoch; on the loader or, as in scripts of torchrun, on ``loader.sampler``.

    Attributes:
        loader: The DataLoader inside.
        epoch: The epoch that was started last, or after `set_epoch` the one that the next ``iter()`` starts.
        first_batch: The number of the batch that ``iter()`` begins with, if the DataLoader was set to a position by itself.
        train: Whether items are repeated so that all ranks have equally many.
        rows: Those of the batch that was handed out last.
        newest: Returns the loader that has handed out a batch last in this process.
    """

    newest: ClassVar[Callable[[], PreparedLoader | None]] = staticmethod(lambda: None)

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device | None,
        seeds: BatchSeeds | None,
        reads: _Reads,
        *,
        given: DataLoader[Any],
        settings: dict[str, Any],
        train: bool,
    ) -> None:
        self.loader = loader
        self.train = train
        self.given = given
        self.rows = BatchRows(0, 0, 0, 0)
        self._settings = settings
        self._reads = reads
        self.first_batch = 0
        self._seeds = seeds
        self.epoch = 0
        self._is_started = False
        self._device = device

    @property
    def knows_own_rows(self) -> bool:
        """Whether it is known which rows of the data each rank reads."""
        is_alone = context.current().identity.data_parallel_size == 1
        return is_alone or self._reads is not None or isinstance(self._sampler, RankSampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0, that the next ``iter()`` starts."""
        self.epoch = check_count("set_epoch(epoch)", epoch, minimum=0)
        self._is_started = False
        self._forward_epoch()

    def __iter__(self) -> Iterator[Any]:
        return self.start_epoch()

    def start_epoch(self, num_left_out: int = 0) -> Iterator[Any]:
        """Start the next epoch, and leave out its first batches, whose rows are not read where there is a sampler."""
        of_loop = [epoch for each, epoch in self._epochs_of_samplers().items() if epoch != _forwarded.get(each, 0)]
        self.epoch = of_loop[0] if of_loop else self.epoch + self._is_started
        self._is_started = True
        self._forward_epoch()
        if self.loader.num_workers:
            # gloo's threads still release the tensors of the last collective. A process that is forked while such a thread
            # registers with the interpreter hangs in its first instruction (Python 3.10 and 3.11). Nothing says when they are
            # done: the pause makes it rare, and cannot exclude it.
            time.sleep(_BEFORE_A_FORK_S)
        sampler, reads, number = self._sampler, self._reads, num_left_out or self.first_batch
        if isinstance(sampler, RankSampler):
            sampler.reads = reads = {}
        has_processes = (
            getattr(self.loader, "_iterator", None) is not None
        )  # they keep the sampler of their first epoch
        num_read = num_left_out if has_processes or isinstance(self.loader.dataset, IterableDataset) else 0
        name = "sampler" if self.loader.batch_sampler is None else "batch_sampler"
        remaining = _RemainingItems(sampler, num_left_out)
        vars(self.loader)[name] = remaining if num_left_out > num_read else sampler
        try:
            batches: Iterator[Any] = iter(self.loader)  # with processes, torch starts to read the sampler twice
        finally:
            vars(self.loader)[name], remaining.num_left_out = sampler, 0
        if self._seeds is not None:
            batches = self._seeds.read(batches, self.epoch, number - num_read)
        return self._hand_out(self._read(islice(batches, num_read, None), number, reads), number)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # copy.copy asks before there are attributes
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _sampler(self) -> Any:
        """What yields the indices of each batch."""
        return self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler

    def _hand_out(self, batches: Iterator[tuple[Any, BatchRows]], number: int) -> Iterator[Any]:
        for batch, rows in batches:
            self.rows = rows
            PreparedLoader.newest = weakref.ref(self)
            yield batch

    def _read(self, batches: Iterator[Any], number: int, reads: _Reads) -> Iterator[tuple[Any, BatchRows]]:
        progress, source = context.current().progress, str(id(self.loader.dataset))
        while True:
            with progress.data:
                batch = next(batches, _END)
            progress.batches.add(source, None if batch is _END else batch)
            if batch is _END:
                return
            progress.mark("batch")
            items, own = (1, 1) if reads is None or number not in reads else reads[number]
            if not own and not self.train:
                batch = without_rows(batch)
            num, samples = count_samples(batch, self._count_items(number, reads))
            rows = BatchRows(num, -(-num * own // items), samples, -(-samples * own // items), max(1, num // items))
            yield batch if self._device is None else to_device(batch, self._device), rows
            number += 1

    def _count_items(self, number: int, reads: _Reads) -> int | None:
        """Return how many rows of the dataset are read for a batch; None if they are not counted."""
        batches: Any = self.loader.batch_sampler
        if isinstance(batches, RankBatches):
            return None if reads is None or number not in reads else reads[number][0]
        if getattr(type(batches), "__iter__", None) is not BatchSampler.__iter__:
            return None
        size, left = batches.batch_size, math.inf  # of a sampler without a length
        with contextlib.suppress(TypeError):
            left = len(batches.sampler) - number * batches.batch_size
        return int(min(size, left)) if left > 0 else size

    def _forward_epoch(self) -> None:
        forward_epoch(self.epoch, [*self._samplers(), self.loader.dataset, self.loader.worker_init_fn])
        _forwarded.update(self._epochs_of_samplers())

    def _epochs_of_samplers(self) -> dict[Any, int]:
        return {each: each.epoch for each in self._samplers() if isinstance(each, (DistributedSampler, RankSampler))}

    def _samplers(self) -> list[Any]:
        return [*with_inner(self.loader.sampler), *with_inner(self.loader.batch_sampler)]


class _RemainingItems:
    """A sampler that leaves out its first items in the epoch that is started; persistent processes keep it."""

    def __init__(self, sampler: Any, num_items: int) -> None:
        self.sampler = sampler
        self.num_left_out = num_items

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.num_left_out, None)


def _split_for_this_rank(
    loader: DataLoader[Any], add_sampler: bool, global_batch_size: int | None, train: bool
) -> tuple[DataLoader[Any], _Reads]:
    session = context.current()
    changes: dict[str, Any] = {}
    is_iterable = isinstance(loader.dataset, IterableDataset)
    rank, num_ranks = session.identity.data_parallel_rank, session.identity.data_parallel_size
    if is_iterable and add_sampler and num_ranks > 1:
        raise _unsplittable(loader, num_ranks)
    shard = Shard(rank, num_ranks, session.seed or 0)
    sampler, is_ordered = _sampler_of(loader), session.in_worker and not is_iterable
    # An evaluation reads the order of all ranks instead of this rank's DistributedSampler, which repeats the first rows.
    is_padded = type(sampler) is DistributedSampler and not sampler.drop_last
    is_replaced = is_ordered and not train and is_padded and stated_shard(sampler) == (rank, num_ranks)
    is_split = is_ordered and add_sampler and is_own_shard(sampler, shard, loader.dataset)
    splits = is_replaced or (is_ordered and add_sampler and not is_split)
    if is_ordered and not train and not splits and (is_split or stated_shard(sampler)):
        check_no_repeats(sampler, shard, loader.dataset)
    batch_size = _batch_size(loader, global_batch_size, num_ranks, splits=splits)
    if session.in_worker:
        is_shared = session.identity.workers_per_replica > 1  # then ranks of a replica need equal seeds
        seeds = LoaderSeeds((session.seed or 0) if is_shared else session.seed, rank, loader.worker_init_fn)
        changes |= {"worker_init_fn": seeds, "generator": loader.generator or seeds.generator}
    if splits:
        changes |= _split_samplers(loader, shard, global_batch_size, train)
    elif batch_size is not None:
        plain: Any = loader.batch_sampler
        changes["batch_sampler"] = BatchSampler(plain.sampler, batch_size, plain.drop_last)
        if loader.batch_size is not None:  # else the user gave the batch sampler
            changes["batch_size"] = batch_size
    split = _copy_with(loader, changes)
    return split, None if splits or not session.in_worker else _reads_of_own_shard(split, shard)


def reads_shard(loader: DataLoader[Any], sampler: Any) -> bool:
    """Return whether a loader reads this rank's shard, by the sampler that it was made with or by its own. All ranks call it.

    If it reads whole datasets, those of the ranks are compared by their lengths and first rows: they may be shards themselves.
    """
    session, dataset = context.current(), loader.dataset
    shard = Shard(session.identity.data_parallel_rank, session.identity.data_parallel_size, session.seed or 0)
    used = [*with_inner(loader.sampler), *with_inner(loader.batch_sampler)]
    if shard.num_ranks == 1 or isinstance(dataset, IterableDataset) or any(each is sampler for each in used):
        return True
    if is_own_shard(_sampler_of(loader), shard, dataset):
        return True
    with seeded(shard.seed):  # rows may be augmented
        read = getattr(dataset, "__getitems__", lambda places: [dataset[place] for place in places])
        first = digest(read([0])) if len(dataset) else b""  # type: ignore[arg-type]
    return len(set(api.gather((len(dataset), first)))) > 1  # type: ignore[arg-type]


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Return what is divided over the ranks: the sampler of rows, or a batch sampler of another type than torch's."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def _split_samplers(loader: DataLoader[Any], shard: Shard, size: int | None, train: bool) -> dict[str, Any]:
    """Return the attributes of a DataLoader that say what it reads, with samplers that read this rank's shard of each step."""
    sampler, batches = _sampler_of(loader), loader.batch_sampler
    drop_last = getattr(batches, "drop_last", False)
    if type(sampler) is SequentialSampler or is_plain_shuffle(sampler):
        shuffle = type(sampler) is not SequentialSampler
        sampler = DistributedSampler(
            sampler.data_source, shard.num_ranks, shard.rank, shuffle=shuffle, seed=shard.seed, drop_last=drop_last
        )
    order = Order(sampler, shard.seed)
    one_by_one = RankSampler(order, shard, train=train, drop_last=drop_last)
    if batches is None:  # items are loaded one by one, or as batches that the sampler yields
        one_by_one.stands_in = isinstance(sampler, BatchSampler)
        return {"sampler": one_by_one}
    if type(batches) is not BatchSampler:
        return {"batch_sampler": one_by_one}
    shows_torchs = type(sampler) is DistributedSampler and sampler.num_replicas == shard.num_ranks
    shown = sampler if shows_torchs else one_by_one
    size = size or batches.batch_size * shard.num_ranks
    divided: Any = RankBatches(order, shard, shown, train=train, size=size, drop_last=drop_last)
    changes: dict[str, Any] = {"batch_sampler": divided}
    if loader.batch_size is not None:  # else the user gave the batch sampler
        changes |= {"sampler": shown, "batch_size": divided.batch_size}
    return changes


def _reads_of_own_shard(loader: DataLoader[Any], shard: Shard) -> _Reads:
    """Return what this rank reads in each batch of a DistributedSampler; other samplers say nothing of the other ranks."""
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else getattr(batches, "sampler", None)
    is_plain = batches is None or type(batches).__iter__ is BatchSampler.__iter__
    is_own = stated_shard(sampler) == (shard.rank, shard.num_ranks)
    if not (is_plain and is_own and isinstance(sampler, DistributedSampler)):
        return None
    size = 1 if batches is None else batches.batch_size
    own = len(range(shard.rank, len(sampler.dataset), shard.num_ranks))  # type: ignore[arg-type]
    sizes = [(start, min(size, len(sampler) - start)) for start in range(0, len(sampler), size)]
    return {batch: (num, max(0, min(num, own - start))) for batch, (start, num) in enumerate(sizes)}


def _batch_size(
    loader: DataLoader[Any], global_batch_size: int | None, num_workers: int, *, splits: bool
) -> int | None:
    """Return this rank's batch size; the largest of all ranks if they differ."""
    if global_batch_size is None:
        return None
    check_count("global_batch_size", global_batch_size, minimum=1)
    if type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            "global_batch_size needs a DataLoader that makes its batches by size; this one has "
            f"{'batch_size=None' if loader.batch_sampler is None else type(loader.batch_sampler).__name__}."
        )
    if global_batch_size < num_workers:
        raise ConfigError(
            f"global_batch_size={global_batch_size} leaves some of {num_workers} workers without an item: give {num_workers} "
            "or more."
        )
    if global_batch_size % num_workers and not splits:
        lower = global_batch_size - global_batch_size % num_workers
        raise ConfigError(
            f"global_batch_size={global_batch_size} does not divide by {num_workers} workers, and the loader's data is "
            f"split already: give {lower} or {lower + num_workers}."
        )
    return -(-global_batch_size // num_workers)


def _copy_with(loader: DataLoader[Any], changes: dict[str, Any]) -> DataLoader[Any]:
    # A copy, not a new DataLoader, so that subclasses keep their attributes and methods. Set through __dict__, since a
    # DataLoader refuses to have its samplers set; it reads them at each iter().
    changed = copy.copy(loader)
    vars(changed).update(changes, _iterator=None)
    return changed


def _unsplittable(loader: DataLoader[Any], num_workers: int) -> UsageError:
    name = type(loader.dataset).__name__
    return UsageError(
        f"{name} is an IterableDataset, which no sampler can split: each of the {num_workers} workers would read all of "
        "it. Let it yield a shard by raysgd.world_rank() and raysgd.world_size(), and use "
        "raysgd.torch.prepare_data_loader(loader, add_sampler=False), which the engine and its templates take too; or give the "
        "data to the Trainer and use raysgd.get_dataset()."
    )
