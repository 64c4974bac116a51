"""The systems for the measures of recovery: with their own settings, and runs in which workers die. Driver side."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from bench.machine import without_paths
from bench.systems import framework_of
from bench.systems.base import RaySystem, TrainFunc

_MAX_ERROR = 300
#: A process has finished its imports if it wants to run for no more than this share of so many seconds.
_IDLE_S = 0.5
_IDLE_SHARE = 0.1
#: A library that shows, in a process's memory map, that the framework is loaded.
_LIBRARIES = {
    "torch": "libtorch_cpu",
    "horovod": "horovod/torch/",
    "tensorflow": "libtensorflow_cc",
    "jax": "jaxlib/",
}


class FragileSystem(RaySystem):
    """A system that the measure starts, because each measure needs other settings.

    Attributes:
        failures: A line for each failed repetition; see `counting_failures`.
        params: The measure's params: ``num_workers`` (two numbers for an elastic group), ``num_spares`` and others.
    """

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.failures: list[str] = []
        self.params: dict[str, Any] = {}

    def open(self) -> None:
        """Start nothing: the measure calls `start`."""

    def start(self, params: Mapping[str, Any]) -> None:
        """Start Ray with ``params["num_cpus"]``, and keep the settings for the runs."""
        self.params = dict(params)
        self.start_ray(params["num_cpus"], log_to_driver=False)

    def is_whole(self, members: Collection[int]) -> bool:
        """Whether the spares, the processes other than ``members`` of the group, are ready and idle."""
        return True

    @contextlib.contextmanager
    def counting_failures(self) -> Iterator[None]:
        """Count and print a failed repetition; the next one begins with new processes."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            lines = [line for line in str(error).splitlines() if line.strip()]
            self.failures.append(without_paths(f"{type(error).__name__}: {lines[0] if lines else ''}")[:_MAX_ERROR])
            self.reset()


class FragileRaysgd(FragileSystem):
    """raysgd; one Trainer for all runs."""

    _trainer: Any = None

    def reset(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.shutdown()

    def make_trainer(self) -> Any:
        import raysgd

        given = self.params
        failure = {
            name: given[name] for name in ("num_spares", "heartbeat_timeout_s", "progress_timeout_s") if name in given
        }
        num_workers = given["num_workers"]
        return raysgd.Trainer(
            num_workers if isinstance(num_workers, int) else (num_workers[0], num_workers[1]),
            framework_of(self.name),
            run_config=raysgd.RunConfig(storage_path=self.folder / "runs"),
            failure_config=raysgd.FailureConfig(max_failures=-1, **failure),
            checkpoint_config=raysgd.CheckpointConfig(num_to_keep=2, **given.get("checkpoint", {})),
        )

    def run(self, train_func: TrainFunc, config: Mapping[str, Any], **_: Any) -> None:
        import raysgd

        if self._trainer is None:
            self._trainer = self.make_trainer()
        trainer = self._trainer
        trainer.run(train_func, self._full(config), callbacks=[raysgd.callbacks.ProgressCallback(mode="off")])

    def is_whole(self, members: Collection[int]) -> bool:
        """Whether all spares have loaded the framework and are idle."""
        others = [each for each in processes_of("ray::WorkerActor") if each.pid not in members]
        spares = [each for each in others if has_framework(each, framework_of(self.name))]
        if len(spares) < self.params.get("num_spares", 0):
            return False
        before = [wanted_s(each) for each in spares]
        time.sleep(_IDLE_S)
        return all(wanted_s(each) - since < _IDLE_SHARE * _IDLE_S for each, since in zip(spares, before, strict=True))


class FragileRayTrain(FragileSystem):
    """Ray Train's TorchTrainer with ``max_failures=-1``."""

    def run(self, train_func: TrainFunc, config: Mapping[str, Any], **_: Any) -> None:
        import ray.train
        from ray.train.torch import TorchTrainer

        num_workers, scaling = self.params["num_workers"], {}
        if not isinstance(num_workers, int):
            num_workers = tuple(num_workers)
            scaling = {"elastic_resize_monitor_interval_s": self.params["look_s"]}
        TorchTrainer(
            train_func,
            train_loop_config=self._full(config),
            scaling_config=ray.train.ScalingConfig(num_workers=num_workers, **scaling),
            run_config=ray.train.RunConfig(
                name=f"run-{time.time_ns()}",
                storage_path=str(self.folder / "runs"),
                failure_config=ray.train.FailureConfig(max_failures=-1),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            ),
        ).fit()


class BareWorker:
    """A process with torch that joins groups and leaves them."""

    def load(self) -> None:
        import torch.distributed.nn.functional  # noqa: F401  (before the first group, so that groups can be left)

    def run(self, rank: int, size: int, port: int, train_func: TrainFunc, config: dict[str, Any]) -> None:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", port, world_size=size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        try:
            train_func(config)
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)
            raise RuntimeError("a peer died") from None
        finally:
            gc.collect()
            dist.destroy_process_group()


class FragileBare(FragileSystem):
    """The mechanism alone: when an actor has died, another one is started, and all join a new group."""

    def run(self, train_func: TrainFunc, config: Mapping[str, Any], **_: Any) -> None:
        import ray
        from ray.exceptions import ActorDiedError

        from bench.systems.bare import free_port

        worker, full = ray.remote(BareWorker).options(num_cpus=1, max_concurrency=2), self._full(config)
        workers = [worker.remote() for _ in range(self.params["num_workers"])]
        while True:
            ray.get([each.load.remote() for each in workers])
            port = free_port()
            refs = [each.run.remote(rank, len(workers), port, train_func, full) for rank, each in enumerate(workers)]
            has_failed = False
            for rank, ref in enumerate(refs):
                try:
                    ray.get(ref)
                except ActorDiedError:
                    has_failed, workers[rank] = True, worker.remote()
                except RuntimeError:
                    has_failed = True
            if not has_failed:
                break
        for each in workers:
            ray.kill(each)


def processes_of(title: str) -> list[psutil.Process]:
    """Return the descendants of this process that have ``title`` in their command lines."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if title in " ".join(process.cmdline()):
                found.append(process)
    return found


def wanted_s(process: psutil.Process) -> float:
    """Return the seconds that a process's threads have run or have waited for a core."""
    total = 0
    for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            ran, waited, _ = path.read_text(encoding="utf-8").split()
            total += int(ran) + int(waited)
    return total / 1e9


def has_framework(process: psutil.Process, name: str) -> bool:
    """Return whether a process has loaded a framework."""
    try:
        return _LIBRARIES[name] in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return False
