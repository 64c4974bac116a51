"""Says whether a sampler takes its rank's shard of the data itself, so that it must not be divided again. Worker side."""

from __future__ import annotations

import hashlib
from collections.abc import Sized
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from raysgd._util.logs import get_logger
from raysgd.errors import ConfigError
from raysgd.session import api, context
from raysgd.torch.samplers import Shard, draw_order, is_plain_shuffle, with_inner

_logger = get_logger()
#: Names under which samplers keep among how many ranks they divide, and whose shard they take; also with an underscore before.
_NAMES = (
    ("num_replicas", "rank"),
    ("world_size", "rank"),
    ("num_processes", "process_index"),
    ("num_shards", "shard_index"),
    ("num_shards", "shard_id"),
    ("data_parallel_size", "data_parallel_rank"),
)


def is_own_shard(sampler: Any, shard: Shard, dataset: Any) -> bool:
    """Return whether the sampler yields this rank's shard only. All ranks call it.

    A sampler that says whose shard it takes is believed. Of any other than torch's sequential and shuffling samplers, the ranks
    compare what they would read: orders that are equal on all ranks are to be divided.

    Args:
        sampler: Yields items or batches.
        shard: What this rank reads.
        dataset: What the sampler's items belong to.

    Raises:
        ConfigError: The sampler takes another shard than this rank's; or the ranks read different orders, which are too long
            to be shards.
    """
    stated = stated_shard(sampler)
    if stated is not None:
        _check_shard(sampler, stated, shard)
        return True
    if shard.num_ranks == 1:
        return isinstance(sampler, DistributedSampler)
    is_known = type(sampler) is SequentialSampler or is_plain_shuffle(sampler)
    if is_known or isinstance(sampler, DistributedSampler) or not hasattr(sampler, "__len__"):
        return False
    return _is_shard_by_order(sampler, shard, dataset)


def stated_shard(sampler: Any) -> tuple[int, int] | None:
    """Return the rank whose shard the sampler takes, and of how many ranks, if it or a sampler that it reads says so.

    None also stands for the shard of a single rank, which is the whole.
    """
    for each in with_inner(sampler):
        for size_name, rank_name in _NAMES:
            for mark in ("", "_"):
                rank, size = getattr(each, mark + rank_name, None), getattr(each, mark + size_name, None)
                if isinstance(rank, int) and isinstance(size, int) and size > 1:
                    return rank, size
    return None


def check_no_repeats(sampler: Any, shard: Shard, dataset: Any) -> None:
    """Check that samplers which take the shards of their ranks repeat no rows. All ranks call it.

    Raises:
        ConfigError: The shards are more rows than there are.
    """
    if shard.num_ranks == 1 or not (isinstance(sampler, Sized) and isinstance(dataset, Sized)):
        return
    apart = context.current().identity.workers_per_replica
    together = sum(api.gather(sum(map(_num_rows, draw_order(sampler, shard.seed))))[::apart])
    if together > len(dataset):
        raise ConfigError(
            f"{type(sampler).__name__} yields {together} rows on all ranks together, and the dataset has {len(dataset)}: an "
            "evaluation would count the repeated ones twice. Leave out the sampler: prepare_data_loader(train=False) and "
            "compose(eval_dataloader=) divide the rows."
        )


def _num_rows(item: Any) -> int:
    return len(item) if isinstance(item, (list, tuple)) else 1


def _check_shard(sampler: Any, stated: tuple[int, int], shard: Shard) -> None:
    if stated == (shard.rank, shard.num_ranks):
        return
    raise ConfigError(
        f"{type(sampler).__name__} takes the shard of rank {stated[0]} of {stated[1]}, and this worker reads that of rank "
        f"{shard.rank} of {shard.num_ranks}: make it with raysgd.data_parallel_rank() and raysgd.data_parallel_size(), or leave "
        "it out, so that prepare_data_loader divides the rows. add_sampler=False reads what the sampler yields, unchecked."
    )


def _is_shard_by_order(sampler: Any, shard: Shard, dataset: Any) -> bool:
    order = draw_order(sampler, shard.seed)
    sizes = [_num_rows(each) for each in order]
    digest = hashlib.blake2b(repr(order).encode(), digest_size=16).digest()
    of_ranks: list[tuple[bytes, int, int]] = api.gather((digest, sum(sizes), max(sizes, default=1)))
    num_rows = len(dataset) if isinstance(dataset, Sized) else None
    name, apart = type(sampler).__name__, context.current().identity.workers_per_replica
    if len({each for each, _, _ in of_ranks}) == 1:
        if num_rows is not None and abs(sum(sizes) * shard.num_ranks - num_rows) < shard.num_ranks:
            what = (
                "num_samples" if isinstance(sampler, RandomSampler) or hasattr(sampler, "num_samples") else "its length"
            )
            _logger.warning(
                "%s yields %d of %d rows, the same on all %d ranks, so they are divided: each rank reads %d. If %s was meant for "
                "one rank, pass add_sampler=False to prepare_data_loader.",
                name,
                sum(sizes),
                num_rows,
                shard.num_ranks,
                -(-sum(sizes) // shard.num_ranks),
                what,
            )
        return False
    replicas = [of_ranks[start : start + apart] for start in range(0, len(of_ranks), apart)]
    is_alike_in_replicas = all(len({each for each, _, _ in replica}) == 1 for replica in replicas)
    together = sum(replica[0][1] for replica in replicas)
    at_most = None if num_rows is None else num_rows + sum(replica[0][2] for replica in replicas)
    if is_alike_in_replicas and at_most is not None and together <= at_most:
        return True
    raise ConfigError(
        f"{name} yields different orders on the ranks, of {together} rows together: prepare_data_loader cannot divide them, as "
        "some rows would be read twice and others never. Give it one seed on all ranks, or let each rank yield its shard and "
        "pass add_sampler=False."
    )
