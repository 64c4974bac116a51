"""A training step of a known length: matrix products, as many as take that long on this machine. Worker side."""

from __future__ import annotations

import time

import torch

_SIZE = 192


class BusyStep:
    """Call it for one step of about ``seconds`` of one core."""

    def __init__(self, seconds: float) -> None:
        self._a = torch.rand(_SIZE, _SIZE)
        self._out = torch.empty(_SIZE, _SIZE)
        self._count = 50
        for _ in range(3):  # the first rounds also bring the core up to speed
            took = min(self._time(), self._time())
            self._count = max(1, round(self._count * seconds / took))

    def __call__(self) -> None:
        for _ in range(self._count):
            torch.mm(self._a, self._a, out=self._out)

    def _time(self) -> float:
        start = time.perf_counter()
        self()
        return time.perf_counter() - start
