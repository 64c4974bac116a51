"""Random numbers of data loaders: other ones on every rank, in every epoch and process. Worker side.

The generators of the worker itself are seeded, saved and restored by `raysgd.session.generators`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def drawing_from(seed: int, *generators: torch.Generator) -> Iterator[None]:
    """Inside, Python, NumPy, torch's CPU generator and the given ones start from ``seed``; after it they are as before."""
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
    """Random numbers for a DataLoader's processes: other ones on every rank, in every epoch and process.

    It is a ``worker_init_fn``, since the seeds that torch deals out are alike on ranks that seeded alike. It also holds
    a generator for the DataLoader, which otherwise draws from torch's global one at each ``iter()``: a loop that was
    resumed in mid-epoch makes one such call more than one that was not, and would go on with other numbers.

    Args:
        seed: None: what torch was seeded with in this process.
        rank: World rank.
        then: The user's own ``worker_init_fn``, called after it.
    """

    def __init__(self, seed: int | None, rank: int, then: Callable[[int], Any] | None) -> None:
        self.generator = torch.Generator()
        self._seed = seed
        self._rank = rank
        self._then = then
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the processes load. Those of ``persistent_workers=True`` start once, and are not told."""
        base = torch.initial_seed() if self._seed is None else self._seed
        self._epoch_seed = _mixed(base, self._rank, epoch)
        self.generator.manual_seed(self._epoch_seed)

    def __call__(self, worker_id: int) -> None:
        _seed_process(_mixed(self._epoch_seed, worker_id))
        if self._then is not None:
            self._then(worker_id)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "generator"}  # its processes need none


def _mixed(*numbers: int) -> int:
    """One seed of several numbers; those that are close to each other give seeds that are not."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest(), "big")


def _seed_process(value: int) -> None:
    random.seed(value)
    np.random.seed(value % 2**32)  # it takes no more
    torch.manual_seed(value)
