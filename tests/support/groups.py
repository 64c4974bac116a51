"""Process groups of one member, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

#: The group that was left last. If a DDP model were the last to hold it, as when a test's fixtures are let go of after the
#: group was destroyed, its destructor would wait for the group's threads with the interpreter's lock held. They may want
#: it, to let go of a tensor of the last collective: then both wait for ever. Let go of by Python, a group drops the lock.
_left: list[Any] = []


@contextmanager
def group_of_one() -> Iterator[None]:
    """A gloo group in this process, gone afterwards."""
    enter()
    try:
        yield
    finally:
        leave()


def enter() -> None:
    """Form a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def leave() -> None:
    """Leave it."""
    group = dist.group.WORLD
    dist.destroy_process_group()
    _left[:] = [group]
