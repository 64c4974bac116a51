"""What a measure's train function needs of the system it runs in. Worker side.

Ranks come from ``torch.distributed``: every system here makes a gloo group of its workers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Inside(Protocol):
    """The calls of one system; ``report`` is the system's own function, with nothing around it."""

    report: Callable[[dict[str, Any]], None]

    def prepare_model(self, model: Any) -> Any: ...
    def save(self, state: Any, step: int) -> None: ...
    def load(self) -> Any: ...


class InRaysgd:
    """raysgd's session."""

    def __init__(self) -> None:
        import raysgd

        self.report = raysgd.report

    def prepare_model(self, model: Any) -> Any:
        import raysgd

        return raysgd.torch.prepare_model(model)

    def save(self, state: Any, step: int) -> None:
        import raysgd

        raysgd.save_checkpoint(state, metrics={"step": step})

    def load(self) -> Any:
        import raysgd

        return raysgd.load_checkpoint()


class InRayTrain:
    """Ray Train's session."""

    def __init__(self) -> None:
        import ray.train

        self.report = ray.train.report

    def prepare_model(self, model: Any) -> Any:
        import ray.train.torch

        return ray.train.torch.prepare_model(model)

    def save(self, state: Any, step: int) -> None:
        """As Ray Train's guide to checkpoints has it: rank 0 writes a folder, all ranks report."""
        import ray.train
        import torch

        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if state is not None:
                torch.save(state, Path(folder) / "model.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step}, checkpoint=checkpoint)

    def load(self) -> Any:
        import ray.train
        import torch

        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as folder:
            return torch.load(Path(folder) / "model.pt")


class InPlainTorch:
    """A process group and nothing else: it keeps no checkpoints."""

    def report(self, metrics: dict[str, Any]) -> None:
        return None

    def prepare_model(self, model: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model)

    def save(self, state: Any, step: int) -> None:
        return None

    def load(self) -> Any:
        return None


def inside(config: Mapping[str, Any]) -> Inside:
    """The system a train function was started by, which its config names."""
    kinds: dict[str, Callable[[], Inside]] = {
        "raysgd": InRaysgd,
        "ray_train": InRayTrain,
        "ray_train_tuned": InRayTrain,
        "torchrun": InPlainTorch,
        "bare": InPlainTorch,
    }
    name = config["system"]
    return kinds["raysgd" if name.startswith("raysgd") else name]()
