"""The interface of a system: run a train function on two workers, and pass on what arrives and when. Driver side."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

#: Called with the time a round of reports arrived, and each rank's metrics.
OnReport = Callable[[float, list[dict[str, Any]]], None]
#: Called with the time at which a checkpoint was known to be complete.
OnCheckpoint = Callable[[float], None]
TrainFunc = Callable[[dict[str, Any]], Any]

_CALM_PERCENT = 15.0


class System:
    """One of the things compared.

    Attributes:
        name: As in `bench.systems.TITLES`.
        folder: For its files, and for the notes of train functions.
        called: When the last `run` made its call, seconds since the epoch; what it did before does not count.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.called = 0.0

    def open(self) -> None:
        """Start what must be there before a run."""

    def close(self) -> None:
        """End all of it."""

    def reset(self) -> None:
        """Release what a failed run may have left."""

    def run(
        self,
        train_func: TrainFunc,
        config: Mapping[str, Any],
        *,
        on_report: OnReport | None = None,
        on_checkpoint: OnCheckpoint | None = None,
        dataset: Any = None,
    ) -> None:
        """Run ``train_func`` on two workers with a gloo group; returns when the system says that it is done.

        Raises:
            Exception: What the system raises for an exception in ``train_func``.
        """
        raise NotImplementedError(f"{self.name} runs no train function")

    def _full(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**config, "system": self.name, "out": str(self.folder)}


class RaySystem(System):
    """A system that needs a local Ray; its files are removed with it."""

    def open(self) -> None:
        import ray

        self._temp = tempfile.mkdtemp(prefix="rb")  # a short path: Ray's sockets live below it
        num_cpus = int(os.environ.get("BENCH_NUM_CPUS", "4"))  # as the measure's ENVIRONMENT says
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, _temp_dir=self._temp)
        wait_for_calm()

    def close(self) -> None:
        import ray

        ray.shutdown()
        shutil.rmtree(self._temp, ignore_errors=True)


def wait_for_calm(limit_s: float = 8.0) -> None:
    """Wait until the processor is idle: a Ray that has just come up still starts processes of its own."""
    deadline = time.monotonic() + limit_s
    psutil.cpu_percent()
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if psutil.cpu_percent() < _CALM_PERCENT:
            return
