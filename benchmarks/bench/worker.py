"""What train functions of all systems use: the system's session, notes for the driver, and a busy step.

Worker side. Its imports are part of what is measured, so it imports no framework.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

NUM_WORKERS = 2
#: The number of checkpoints that are kept.
NUM_KEPT = 2


def note(config: Mapping[str, Any], name: str, rank: int, value: Any) -> None:
    """Write a value of a worker to a file, for `gather`."""
    (Path(config["out"]) / f"{name}-{rank}.json").write_text(json.dumps(value), encoding="utf-8")


def gather(folder: Path, name: str) -> list[Any]:
    """Return the values that the ranks noted, by rank, and remove their files."""
    values = []
    for rank in range(NUM_WORKERS):
        path = folder / f"{name}-{rank}.json"
        values.append(json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
    return values


class SystemSession(Protocol):
    """The calls of one system; ``report`` is the system's own function, with nothing around it."""

    report: Callable[[dict[str, Any]], None]

    def prepare_model(self, model: Any) -> Any: ...
    def save(self, state: Any, step: int) -> None: ...
    def load(self) -> Any: ...


class RaysgdSession:
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


class RayTrainSession:
    """Ray Train's session."""

    def __init__(self) -> None:
        import ray.train

        self.report = ray.train.report

    def prepare_model(self, model: Any) -> Any:
        import ray.train.torch

        return ray.train.torch.prepare_model(model)

    def save(self, state: Any, step: int) -> None:
        """Save as in Ray Train's guide to checkpoints: rank 0 writes a folder, all ranks report."""
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


class TorchSession:
    """A process group alone, which keeps no checkpoints."""

    def report(self, metrics: dict[str, Any]) -> None:
        return None

    def prepare_model(self, model: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model)

    def save(self, state: Any, step: int) -> None:
        return None

    def load(self) -> Any:
        return None


def session_of(config: Mapping[str, Any]) -> SystemSession:
    """Return the session of the system that runs a train function; its config names the system."""
    kinds: dict[str, Callable[[], SystemSession]] = {
        "raysgd": RaysgdSession,
        "ray_train": RayTrainSession,
        "ray_train_tuned": RayTrainSession,
        "torchrun": TorchSession,
        "bare": TorchSession,
    }
    name = config["system"]
    return kinds["raysgd" if name.startswith("raysgd") else name]()


_SIZE = 192


class BusyStep:
    """A function that keeps one core busy for about ``seconds``.

    Attributes:
        count: The number of matrix products in a step.
    """

    def __init__(self, seconds: float) -> None:
        import torch

        self._mm = torch.mm
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
        """Return a step of ``count`` products, without measuring their time."""
        step = cls(0)
        step.count = count
        return step

    def __call__(self) -> None:
        for _ in range(self.count):
            self._mm(self._a, self._a, out=self._out)

    def _time(self) -> float:
        start = time.perf_counter()
        self()
        return time.perf_counter() - start
