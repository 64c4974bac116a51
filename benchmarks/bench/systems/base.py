"""The interface of a system: run a train function on two workers, and say what arrives and when. Driver side."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Called with the time a round of reports arrived, and each rank's metrics.
OnReport = Callable[[float, list[dict[str, Any]]], None]
#: Called with the time at which a checkpoint was known to be complete.
OnCheckpoint = Callable[[float], None]
TrainFunc = Callable[[dict[str, Any]], Any]

_CALM_PERCENT = 15.0


class System:
    """One of the systems that are compared.

    Attributes:
        name: A key of `bench.systems.TITLES`.
        folder: The folder for its files, and for the notes of train functions.
        called: The time at which the last `run` made its call, in seconds since the epoch; earlier work does not count.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.called = 0.0

    def open(self) -> None:
        """Start what must be there before a run."""

    def close(self) -> None:
        """End what `open` and the runs have started."""

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
        """Run ``train_func`` on two workers with a gloo group; return when the system has finished the run.

        A system that has no results or checkpoints, or reads no datasets, ignores those arguments.

        Raises:
            Exception: What the system raises for an exception in ``train_func``.
        """
        raise NotImplementedError(f"{self.name} runs no train function")

    def _full(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**config, "system": self.name, "out": str(self.folder)}


class RaySystem(System):
    """A system that needs a local Ray, whose files are removed at the end."""

    _temp: str | None = None

    def open(self) -> None:
        self.start_ray(int(os.environ.get("BENCH_NUM_CPUS", "4")))  # the measure's ``environment`` may say more

    def start_ray(self, num_cpus: int, **settings: Any) -> None:
        import ray

        self._temp = tempfile.mkdtemp(prefix="rb")  # short: Ray has sockets below it
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, _temp_dir=self._temp, **settings)
        wait_for_calm()

    def close(self) -> None:
        import ray

        self.reset()
        ray.shutdown()
        if self._temp is not None:
            shutil.rmtree(self._temp, ignore_errors=True)


def wait_for_calm(limit_s: float = 8.0) -> None:
    """Wait until the processor is idle: a Ray that has just started still starts processes of its own."""
    import psutil

    deadline = time.monotonic() + limit_s
    psutil.cpu_percent()
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if psutil.cpu_percent() < _CALM_PERCENT:
            return
