"""Random numbers in a worker: seeds per rank, determinism, the state of torch's generators. Worker side."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from raysgd.torch.devices import uses_cuda

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_logger = logging.getLogger(__name__)
_workspace_was_set = False  # by this process, before it used CUDA; the variable itself may have been reset since


def seed_all(seed: int | None, rank: int = 0, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (CPU and all GPUs) with ``seed + rank``.

    Args:
        seed: None leaves the generators as they are.
        rank: World rank; each rank draws other numbers.
        deterministic: Also let torch use deterministic algorithms only (an operation that has none raises) and cuDNN
            choose its own the same way each time. Must come before the process uses CUDA. Never turned off here.
    """
    if seed is not None:
        _seed_process(seed + rank)
    if deterministic:
        _set_cublas_workspace()
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def capture_rng() -> dict[str, str]:
    """The state of torch's generators, as text: of the CPU (7 KB), and of the current GPU if CUDA is in use."""
    states = {"torch": _encode(torch.get_rng_state())}
    if uses_cuda():
        states["torch_cuda"] = _encode(torch.cuda.get_rng_state())
    return states


def restore_rng(states: Mapping[str, str]) -> None:
    """Put torch's generators where `capture_rng` saw them; the GPU's state is left out where there is no GPU."""
    if "torch" in states:
        torch.set_rng_state(_decode(states["torch"]))
    if "torch_cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(states["torch_cuda"]))


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


def _set_cublas_workspace() -> None:
    global _workspace_was_set
    if _WORKSPACE not in os.environ and uses_cuda() and not _workspace_was_set:
        _logger.warning("%s is set after CUDA was used in this process: its first results may not repeat.", _WORKSPACE)
    _workspace_was_set = _workspace_was_set or not uses_cuda()
    os.environ.setdefault(_WORKSPACE, ":4096:8")


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
