"""`prepare_data_loader`: a torch DataLoader that reads this rank's shard and yields batches on this rank's device.

Worker side. For training on each row exactly once, through failures and resizes, use ``raysgd.get_dataset``.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from raysgd._util.text import with_article
from raysgd.config.checks import check_count
from raysgd.errors import ConfigError, UsageError
from raysgd.session import context
from raysgd.torch.batches import without_rows
from raysgd.torch.devices import device, to_device
from raysgd.torch.own_shards import check_no_repeats, is_own_shard, stated_shard
from raysgd.torch.samplers import (
    BatchSeeds,
    EvaluationBatches,
    EvaluationItems,
    EvaluationTurns,
    LoaderSeeds,
    Shard,
    UnevenBatchSampler,
)

_Split = Callable[[Any, bool], Any]
_END = object()
_BEFORE_A_FORK_S = 0.002


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

    A sampler that takes its rank's shard itself is kept, such as a DistributedSampler, or any with ``num_replicas`` and
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
        global_batch_size: Items per step on all workers together, of which each takes a slice. If it does not divide by the
            number of workers, the slices differ by one item, and gradients are averaged as if they did not. By default each
            worker takes batches of the loader's own size.
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
    split = _split_for_this_rank(loader, add_sampler, global_batch_size, train)
    settings = {"add_sampler": add_sampler, "move_to_device": move_to_device, "global_batch_size": global_batch_size}
    return PreparedLoader(split, target, make_batch_seeds(), given=loader, settings=settings, train=train)


def make_batch_seeds() -> BatchSeeds | None:
    """Return the seeds with which this rank reads batches; None if no other rank has to read the same."""
    session = context.current()
    is_shared = session.identity.workers_per_replica > 1
    return BatchSeeds(session.seed or 0, session.identity.data_parallel_rank) if is_shared else None


class Newest:
    """Holds the prepared loader that has handed out a batch last in this process, and the batch's number in its epoch."""

    loader: Callable[[], PreparedLoader | None] = staticmethod(lambda: None)
    number = 0


newest = Newest()


class PreparedLoader:
    """A DataLoader that was prepared: can be iterated, and has the length and attributes of the DataLoader inside.

    Each ``iter()`` starts the next epoch, with an order of its own. A resumed loop calls ``set_epoch(start)``, once or before
    every epoch.

    Attributes:
        loader: The DataLoader inside.
        epoch: The epoch that was started last, or after `set_epoch` the one that the next ``iter()`` starts.
        first_batch: The number of the batch that ``iter()`` begins with, if the DataLoader was set to a position by itself.
        train: Whether items are repeated so that all ranks have equally many.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device | None,
        seeds: BatchSeeds | None,
        *,
        given: DataLoader[Any],
        settings: dict[str, Any],
        train: bool,
    ) -> None:
        self.loader = loader
        self.train = train
        self.given = given
        self._settings = settings
        self.first_batch = 0
        self._seeds = seeds
        self.epoch = 0
        self._is_started = False
        self._device = device

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0, that the next ``iter()`` starts."""
        self.epoch = check_count("set_epoch(epoch)", epoch, minimum=0)
        self._is_started = False

    def __iter__(self) -> Iterator[Any]:
        if self._is_started:
            self.epoch += 1
        self._is_started = True
        self._forward_epoch()
        if self.loader.num_workers:
            # gloo's threads still release the tensors of the last collective. A process that is forked while such a thread
            # registers with the interpreter hangs in its first instruction (Python 3.10 and 3.11). Nothing says when they are
            # done: the pause makes it rare, and cannot exclude it.
            time.sleep(_BEFORE_A_FORK_S)
        # A loop that was resumed within an epoch has put a sampler there that leaves out the first batches.
        sampler = self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler
        number = getattr(sampler, "num_left_out", 0) or self.first_batch
        batches = iter(self.loader)
        return self._batches(batches if self._seeds is None else self._seeds.read(batches, self.epoch, number), number)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # copy.copy asks before there are attributes
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _batches(self, batches: Iterator[Any], number: int) -> Iterator[Any]:
        progress = context.current().progress
        is_stand_in = getattr(self.loader.batch_sampler, "is_stand_in", None)
        newest.loader = weakref.ref(self)
        while True:
            with progress.data:
                batch = next(batches, _END)
            if batch is _END:
                return
            progress.mark("batch")
            if is_stand_in is not None and is_stand_in(number):
                batch = without_rows(batch)
            newest.number = number
            yield batch if self._device is None else to_device(batch, self._device)
            number += 1

    def _forward_epoch(self) -> None:
        loader, batches = self.loader, self.loader.batch_sampler
        users = (loader.sampler, batches, getattr(batches, "sampler", None), loader.dataset, loader.worker_init_fn)
        for user in {id(user): user for user in users}.values():
            if callable(set_epoch := getattr(user, "set_epoch", None)):
                set_epoch(self.epoch)


def _split_for_this_rank(
    loader: DataLoader[Any], add_sampler: bool, global_batch_size: int | None, train: bool
) -> DataLoader[Any]:
    session = context.current()
    changes: dict[str, Any] = {}
    is_iterable = isinstance(loader.dataset, IterableDataset)
    rank, num_ranks = session.identity.data_parallel_rank, session.identity.data_parallel_size
    if is_iterable and add_sampler and num_ranks > 1:
        raise _unsplittable(loader, num_ranks)
    shard = Shard(rank, num_ranks, session.seed or 0)
    splits = session.in_worker and add_sampler and not is_iterable
    if session.in_worker and not is_iterable and not train:
        loader = _with_whole_order(loader, shard)
    is_split = splits and is_own_shard(_sampler_of(loader), shard, loader.dataset)
    splits = splits and not is_split
    if session.in_worker and not is_iterable and not train and (is_split or stated_shard(_sampler_of(loader))):
        check_no_repeats(_sampler_of(loader), shard, loader.dataset)
    batch_size = _batch_size(loader, global_batch_size, num_ranks, splits=splits)
    if session.in_worker:
        is_shared = session.identity.workers_per_replica > 1  # then ranks of a replica need equal seeds
        seeds = LoaderSeeds((session.seed or 0) if is_shared else session.seed, rank, loader.worker_init_fn)
        changes |= {"worker_init_fn": seeds, "generator": loader.generator or seeds.generator}
    if splits and not train:
        changes |= _split_evaluation(loader, shard, global_batch_size)
    elif splits and global_batch_size is not None and global_batch_size % num_ranks:
        changes |= _split_unevenly(loader, shard, global_batch_size)
    elif splits:
        changes |= _split_samplers(loader, shard.split, batch_size)
    elif batch_size is not None:
        changes |= _split_samplers(loader, lambda sampler, drop_last: sampler, batch_size)
    return _copy_with(loader, changes)


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Return what is divided over the ranks: the sampler of rows, or a batch sampler of another type than torch's."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def _with_whole_order(loader: DataLoader[Any], shard: Shard) -> DataLoader[Any]:
    """Return the loader with the order of all ranks in place of this rank's DistributedSampler, which repeats the first rows."""
    sampler, batches = _sampler_of(loader), loader.batch_sampler
    is_own = stated_shard(sampler) == (shard.rank, shard.num_ranks)
    if type(sampler) is not DistributedSampler or sampler.drop_last or not is_own:
        return loader
    data: Any = sampler.dataset
    whole: Any = DistributedSampler(data, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed)
    if batches is None:
        return _copy_with(loader, {"sampler": whole})
    plain: Any = BatchSampler(whole, batches.batch_size, batches.drop_last)  # type: ignore[attr-defined]
    return _copy_with(loader, {"batch_sampler": plain, "sampler": whole})


def _split_evaluation(loader: DataLoader[Any], shard: Shard, size: int | None) -> dict[str, Any]:
    """Return what `_split_samplers` does, without rows that are repeated."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return {"sampler": EvaluationItems(loader.sampler, shard, drop_last=False)}
    if type(batches) is not BatchSampler:
        return {"batch_sampler": EvaluationTurns(batches, shard, drop_last=getattr(batches, "drop_last", False))}
    size = size or batches.batch_size * shard.num_ranks
    divided = EvaluationBatches(batches.sampler, shard, size, drop_last=batches.drop_last)
    changes: dict[str, Any] = {"batch_sampler": divided}
    if loader.batch_size is not None:
        changes |= {"sampler": divided.sampler, "batch_size": divided.batch_size}
    return changes


def _split_samplers(loader: DataLoader[Any], split: _Split, batch_size: int | None) -> dict[str, Any]:
    """Return the attributes of a DataLoader that say what it reads, with split samplers and another batch size."""
    batches: Any = loader.batch_sampler
    if batches is None:  # items are loaded one by one
        return {"sampler": split(loader.sampler, False)}
    if type(batches) is not BatchSampler:
        return {"batch_sampler": split(batches, getattr(batches, "drop_last", False))}
    size = batch_size or batches.batch_size
    sampler = split(batches.sampler, batches.drop_last)
    changes: dict[str, Any] = {"batch_sampler": BatchSampler(sampler, size, batches.drop_last)}
    if loader.batch_size is not None:  # else the user gave the batch sampler
        changes |= {"sampler": sampler, "batch_size": size}
    return changes


def _split_unevenly(loader: DataLoader[Any], shard: Shard, size: int) -> dict[str, Any]:
    """Return what `_split_samplers` does, for a global batch size that does not divide by the number of ranks."""
    given: Any = loader.batch_sampler
    batches = UnevenBatchSampler(given.sampler, shard, size, drop_last=given.drop_last)
    changes: dict[str, Any] = {"batch_sampler": batches}
    if loader.batch_size is not None:
        changes |= {"sampler": batches.sampler, "batch_size": -(-size // shard.num_ranks)}
    return changes


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
