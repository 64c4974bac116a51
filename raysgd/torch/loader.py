"""`prepare_data_loader`: a torch DataLoader that reads this rank's share and gives batches on this rank's device.

Worker side. For data that must be trained on exactly once, through failures and resizes, there is ``raysgd.get_dataset``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from raysgd._util.wording import with_article
from raysgd.config.checks import check_count
from raysgd.errors import ConfigError, UsageError
from raysgd.session import context
from raysgd.torch.devices import device
from raysgd.torch.seeding import LoaderSeeds
from raysgd.torch.sharding import DealtBatches, Share
from raysgd.torch.transfer import to_device

_Split = Callable[[Any, bool], Any]
_END = object()


def prepare_data_loader(
    loader: DataLoader[Any],
    *,
    add_sampler: bool = True,
    move_to_device: bool = True,
    global_batch_size: int | None = None,
) -> PreparedLoader:
    """Make a DataLoader ready for training on all workers. All its other settings are kept.

    Each rank reads its share of the order, which is a function of the Trainer's seed (0 without one) and the epoch. All
    ranks get equally many items, as gradients are averaged step by step: where the data does not divide by the number
    of workers the first items are repeated (also in validation, which counts them twice), or with ``drop_last=True``
    the last ones are left out. Other samplers than torch's sequential and shuffling ones, and batch samplers, are read
    in full on every rank, and every rank keeps each N-th item or batch: they must give the same order on all ranks.
    Those that have a length and draw from Python's, NumPy's or torch's generators do. A DistributedSampler is kept.

    Outside a worker the loader is used as it is, apart from moving batches and counting epochs.

    Args:
        loader: Stays usable by itself; the result works on a copy.
        add_sampler: False leaves the order to the loader, for data that is split already.
        move_to_device: Give batches on `device()`: tensors in dicts, lists, tuples, dataclasses, and objects with a
            method ``to``. With ``pin_memory=True`` the copies to a GPU go on beside the host.
        global_batch_size: Items per step on all workers together; each then takes its part. Where it does not divide by
            the number of workers the parts differ by one item, and gradients are averaged as if they did not. By default
            each worker takes batches of the loader's own size.

    Raises:
        UsageError: An IterableDataset with several workers: no sampler can split it.
        ConfigError: ``global_batch_size`` is less than the number of workers, or does not divide by it and the loader's data
            are split already; or the loader makes no batches.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"prepare_data_loader takes a torch DataLoader, not {with_article(type(loader).__name__)}.")
    target = device() if move_to_device else None
    return PreparedLoader(_for_this_rank(loader, add_sampler, global_batch_size), target)


class PreparedLoader:
    """What `prepare_data_loader` returns: iterates, has a length, and the attributes of the DataLoader behind it.

    Each new ``iter()`` is the next epoch, with an order of its own. A loop that was resumed says where it stands by
    ``set_epoch(start)``, once or before every epoch.

    Attributes:
        loader: The DataLoader behind it.
        epoch: The epoch that was started last, or that the next ``iter()`` will start if none was since `set_epoch`.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device | None) -> None:
        self.loader = loader
        self.epoch = 0
        self._is_started = False
        self._device = device

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch``, counted from 0, the one that the next ``iter()`` starts."""
        self.epoch = check_count("set_epoch(epoch)", epoch, minimum=0)
        self._is_started = False

    def __iter__(self) -> Iterator[Any]:
        if self._is_started:
            self.epoch += 1
        self._is_started = True
        self._pass_epoch_on()
        return self._batches(iter(self.loader))

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        progress = context.current().progress
        while True:
            with progress.data:
                batch = next(batches, _END)
            if batch is _END:
                return
            progress.mark("batch")
            yield batch if self._device is None else to_device(batch, self._device)

    def _pass_epoch_on(self) -> None:
        loader, batches = self.loader, self.loader.batch_sampler
        users = (loader.sampler, batches, getattr(batches, "sampler", None), loader.dataset, loader.worker_init_fn)
        for user in {id(user): user for user in users}.values():
            if callable(set_epoch := getattr(user, "set_epoch", None)):
                set_epoch(self.epoch)


def _for_this_rank(loader: DataLoader[Any], add_sampler: bool, global_batch_size: int | None) -> DataLoader[Any]:
    session = context.current()
    changes: dict[str, Any] = {}
    splits = session.in_worker and add_sampler and not isinstance(loader.dataset, IterableDataset)
    batch_size = _batch_size(loader, global_batch_size, session.world_size, splits=splits)
    if session.in_worker:
        seeds = LoaderSeeds(session.seed, session.world_rank, loader.worker_init_fn)
        changes |= {"worker_init_fn": seeds, "generator": loader.generator or seeds.generator}
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if is_iterable and add_sampler and session.world_size > 1:
        raise _unsplittable(loader, session.world_size)
    share = Share(session.world_rank, session.world_size, session.seed or 0)
    if splits and global_batch_size is not None and global_batch_size % session.world_size:
        changes |= _dealt(loader, share, global_batch_size)
    elif splits:
        changes |= _samplers(loader, lambda sampler, drop_last: share.of(sampler, drop_last=drop_last), batch_size)
    elif batch_size is not None:
        changes |= _samplers(loader, lambda sampler, drop_last: sampler, batch_size)
    return _changed(loader, changes)


def _samplers(loader: DataLoader[Any], split: _Split, batch_size: int | None) -> dict[str, Any]:
    """The attributes of a DataLoader that say what it reads, with its samplers split and another batch size."""
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


def _dealt(loader: DataLoader[Any], share: Share, size: int) -> dict[str, Any]:
    """The same, where ranks take parts of batches that are not equally large."""
    given: Any = loader.batch_sampler
    batches = DealtBatches(given.sampler, share, size, drop_last=given.drop_last)
    changes: dict[str, Any] = {"batch_sampler": batches}
    if loader.batch_size is not None:
        changes |= {"sampler": batches.sampler, "batch_size": -(-size // share.num_ranks)}
    return changes


def _batch_size(
    loader: DataLoader[Any], global_batch_size: int | None, num_workers: int, *, splits: bool
) -> int | None:
    """This rank's batch size; the largest of all ranks where they differ."""
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
            f"global_batch_size={global_batch_size} leaves some of {num_workers} workers without an item; give {num_workers} "
            "or more."
        )
    is_split = isinstance(loader.batch_sampler.sampler, DistributedSampler)
    if global_batch_size % num_workers and (is_split or not splits):
        lower = global_batch_size - global_batch_size % num_workers
        raise ConfigError(
            f"global_batch_size={global_batch_size} does not divide by {num_workers} workers, and the loader's data are "
            f"split already; give {lower} or {lower + num_workers}."
        )
    return -(-global_batch_size // num_workers)


def _changed(loader: DataLoader[Any], changes: dict[str, Any]) -> DataLoader[Any]:
    # A copy, not a new DataLoader: subclasses keep their own attributes and methods. Through its __dict__, since a
    # DataLoader refuses to have its samplers set; they are read again at each iter().
    changed = copy.copy(loader)
    vars(changed).update(changes, _iterator=None)
    return changed


def _unsplittable(loader: DataLoader[Any], num_workers: int) -> UsageError:
    name = type(loader.dataset).__name__
    return UsageError(
        f"{name} is an IterableDataset, which no sampler can split: each of the {num_workers} workers would read all of "
        "it. Let it yield a share by raysgd.world_rank() and raysgd.world_size() and pass add_sampler=False, or give "
        "the data to the Trainer and use raysgd.get_dataset()."
    )
