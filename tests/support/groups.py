"""A process group of one member, in the process of the test."""

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


def leave() -> None:
    """Destroy the group."""
    group = dist.group.WORLD
    dist.destroy_process_group()
    _left[:] = [group]
