"""raysgd, with one Trainer for all runs of the process, as a user would have. Driver side."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import raysgd
from bench.systems import PRELOADING, framework_of
from bench.systems.base import OnCheckpoint, OnReport, RaySystem, TrainFunc, wait_for_calm
from bench.systems.fragile import has_framework, processes_of
from bench.worker import NUM_KEPT, NUM_WORKERS

#: Seconds for Ray's idle processes to import torch.
_PRELOAD_S = 60.0


class Commits(raysgd.Callback):
    """Calls a function with the time of each commit of a checkpoint."""

    critical = True

    def __init__(self, on_commit: OnCheckpoint) -> None:
        self._on_commit = on_commit

    def on_checkpoint(self, checkpoint: Any) -> None:
        self._on_commit(time.time())


class RaysgdSystem(RaySystem):
    """raysgd; a dataset, results and checkpoints go through its public API."""

    _trainer: raysgd.Trainer | None = None

    def start_ray(self, num_cpus: int, **settings: Any) -> None:
        if self.name != PRELOADING:
            super().start_ray(num_cpus, **settings)
            return
        super().start_ray(num_cpus, **settings, _system_config={"preload_python_modules": ["torch"]})
        expected, deadline = min(num_cpus, os.cpu_count() or 1), time.monotonic() + _PRELOAD_S
        while sum(has_framework(process, "torch") for process in processes_of("ray::IDLE")) < expected:
            if time.monotonic() > deadline:
                raise TimeoutError("Ray's idle processes have not imported torch")
            time.sleep(0.5)
        wait_for_calm()

    def reset(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.shutdown()

    def run(
        self,
        train_func: TrainFunc,
        config: Mapping[str, Any],
        *,
        on_report: OnReport | None = None,
        on_checkpoint: OnCheckpoint | None = None,
        dataset: Any = None,
    ) -> None:
        callbacks: list[raysgd.Callback] = [raysgd.callbacks.ProgressCallback(mode="off")]
        if on_checkpoint is not None:
            callbacks.append(Commits(on_checkpoint))
        if self._trainer is None:
            self._trainer = raysgd.Trainer(
                NUM_WORKERS,
                framework_of(self.name),
                run_config=raysgd.RunConfig(storage_path=self.folder / "runs"),
                checkpoint_config=raysgd.CheckpointConfig(num_to_keep=NUM_KEPT),
            )
        full = self._full(config)
        self.called = time.time()
        stream = self._trainer.run_generator(train_func, full, dataset=dataset, callbacks=callbacks)
        if on_report is not None:
            for result in stream:
                on_report(time.time(), result.workers)
        stream.get_returns()
