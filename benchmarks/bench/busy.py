"""A training step of a known length: matrix products, as many as take that long on this machine. Worker side."""

from __future__ import annotations

import time

import torch

_SIZE = 192


class BusyStep:
    """Call it for one step of about ``seconds`` of one core.

    Attributes:
        count: Products in a step.
    """

    def __init__(self, seconds: float) -> None:
        self._a = torch.rand(_SIZE, _SIZE)
        self._out = torch.empty(_SIZE, _SIZE)
        self.count = 50
        if seconds == 0:
            return
        for _ in range(3):  # the first rounds also bring the core up to speed
            took = min(self._time(), self._time())
            self.count = max(1, round(self.count * seconds / took))

    @classmethod
    def of(cls, count: int) -> BusyStep:
        """A step of so many products, whatever they take."""
        step = cls(0)
        step.count = count
        return step

    def __call__(self) -> None:
        for _ in range(self.count):
            torch.mm(self._a, self._a, out=self._out)

    def _time(self) -> float:
        start = time.perf_counter()
        self()
        return time.perf_counter() - start
