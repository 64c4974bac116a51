"""Ray Train's TorchTrainer. Driver side, except `Arrivals`.

Ray Train has no stream of results: the driver is blocked in ``fit`` until the end. A user sees a report first in a callback
in the controller's process, so that is where arrivals are recorded: one hop less than with raysgd.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import ray.train
from ray.train import RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer

from bench.systems.base import OnCheckpoint, OnReport, RaySystem, TrainFunc
from bench.worker import NUM_KEPT, NUM_WORKERS


class Arrivals(UserCallback):
    """Records the times at which rounds of reports and checkpoints arrive. Runs in Ray Train's controller."""

    def __init__(self, path: str) -> None:
        self._path = path

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        line = json.dumps([time.time(), metrics, checkpoint is not None])
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


class RayTrainSystem(RaySystem):
    """Ray Train; the process's environment makes it the tuned one."""

    _numbers = count()

    def run(
        self,
        train_func: TrainFunc,
        config: Mapping[str, Any],
        *,
        on_report: OnReport | None = None,
        on_checkpoint: OnCheckpoint | None = None,
        dataset: Any = None,
    ) -> None:
        number = next(self._numbers)
        arrivals = self.folder / f"arrivals-{number}.jsonl"
        is_watched = on_report is not None or on_checkpoint is not None
        trainer = TorchTrainer(
            train_func,
            train_loop_config=self._full(config),
            scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
            datasets=None if dataset is None else {"train": dataset},
            run_config=RunConfig(
                name=f"run-{number}",
                storage_path=str(self.folder / "runs"),
                callbacks=[Arrivals(str(arrivals))] if is_watched else [],
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=NUM_KEPT),
            ),
        )
        self.called = time.time()
        trainer.fit()
        if is_watched:
            _pass_on(arrivals, on_report, on_checkpoint)


def _pass_on(path: Path, on_report: OnReport | None, on_checkpoint: OnCheckpoint | None) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        arrived, metrics, has_checkpoint = json.loads(line)
        if on_report is not None:
            on_report(arrived, metrics)
        if on_checkpoint is not None and has_checkpoint:
            on_checkpoint(arrived)
