"""Process groups in the process of the test: of one member, or of several of which the others are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

#: The last group. If a DDP model held the last reference to a destroyed group, the group's destructor would wait for its
#: threads with the GIL held, while they may need the GIL to release a tensor: a deadlock. When Python releases the group,
#: the destructor releases the GIL.
_left: list[Any] = []


@contextmanager
def group_of_one() -> Iterator[None]:
    """Form a gloo group in this process, and destroy it afterwards."""
    enter()
    try:
        yield
    finally:
        leave()


def enter() -> None:
    """Form a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def one_of_several(size: int) -> Iterator[None]:
    """Be rank 0 of a group, in place of the group of one; its collectives leave tensors as they are."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    leave()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        leave()
        enter()


def leave() -> None:
    """Destroy the group."""
    group = dist.group.WORLD
    dist.destroy_process_group()
    _left[:] = [group]
