"""The systems as the measures of recovery need them: with settings of their own, and runs in which workers die. Driver side."""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from bench.machine import without_paths
from bench.systems import FRAMEWORKS
from bench.systems.base import OnCheckpoint, OnReport, RaySystem, TrainFunc, wait_for_calm

_MAX_ERROR = 300
#: A process that in so many seconds wants to run for no more than this share of them has finished its imports.
_IDLE_S = 0.5
_IDLE_SHARE = 0.1
#: A library that is in a process's memory once the framework is.
_LIBRARIES = {
    "torch": "libtorch_cpu",
    "horovod": "horovod/torch/",
    "tensorflow": "libtensorflow_cc",
    "jax": "jaxlib/",
}


class FragileSystem(RaySystem):
    """A system that is started by the measure, which knows what it needs.

    Attributes:
        failures: What went wrong in repetitions, one line each; see `counting_failures`.
        params: Of the measure: ``num_workers`` (two numbers for an elastic group), ``spares``, ``heartbeat_timeout_s``.
    """

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.failures: list[str] = []
        self.params: dict[str, Any] = {}
        self._temp: str | None = None

    def open(self) -> None:
        """Nothing is started before `start`."""

    def start(self, params: Mapping[str, Any]) -> None:
        """Start Ray with ``params["num_cpus"]``, and keep the settings for the runs."""
        import ray

        self.params = dict(params)
        self._temp = tempfile.mkdtemp(prefix="rb")
        ray.init(
            address="local",
            num_cpus=params["num_cpus"],
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=self._temp,
        )
        wait_for_calm()

    def close(self) -> None:
        import ray

        ray.shutdown()
        if self._temp is not None:
            shutil.rmtree(self._temp, ignore_errors=True)

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

    @property
    def _framework(self) -> str:
        return FRAMEWORKS.get(self.name, "torch")

    def close(self) -> None:
        self.reset()
        super().close()

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
            self._framework,
            run_config=raysgd.RunConfig(storage_path=self.folder / "runs"),
            failure_config=raysgd.FailureConfig(max_failures=-1, **failure),
            checkpoint_config=raysgd.CheckpointConfig(num_to_keep=2),
        )

    def run(
        self,
        train_func: TrainFunc,
        config: Mapping[str, Any],
        *,
        on_report: OnReport | None = None,
        on_checkpoint: OnCheckpoint | None = None,
    ) -> None:
        import raysgd

        if self._trainer is None:
            self._trainer = self.make_trainer()
        trainer = self._trainer
        trainer.run(train_func, self._full(config), callbacks=[raysgd.callbacks.ProgressCallback(mode="off")])

    def is_whole(self, members: Collection[int]) -> bool:
        """As many spares as there should be have the framework in their memory, and do nothing any more."""
        others = [each for each in processes_of("ray::WorkerActor") if each.pid not in members]
        spares = [each for each in others if has_framework(each, self._framework)]
        if len(spares) < self.params.get("num_spares", 0):
            return False
        before = [wanted_s(each) for each in spares]
        time.sleep(_IDLE_S)
        return all(wanted_s(each) - since < _IDLE_SHARE * _IDLE_S for each, since in zip(spares, before, strict=True))


class FragileRayTrain(FragileSystem):
    """Ray Train's TorchTrainer with ``max_failures=-1``."""

    def run(
        self,
        train_func: TrainFunc,
        config: Mapping[str, Any],
        *,
        on_report: OnReport | None = None,
        on_checkpoint: OnCheckpoint | None = None,
    ) -> None:
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
    """The mechanism alone: when an actor has died another is started, and all join a new group."""

    def run(
        self,
        train_func: TrainFunc,
        config: Mapping[str, Any],
        *,
        on_report: OnReport | None = None,
        on_checkpoint: OnCheckpoint | None = None,
    ) -> None:
        import ray
        from ray.exceptions import ActorDiedError

        from bench.systems.bare import _free_port

        worker, full = ray.remote(BareWorker).options(num_cpus=1, max_concurrency=2), self._full(config)
        workers = [worker.remote() for _ in range(self.params["num_workers"])]
        while True:
            ray.get([each.load.remote() for each in workers])
            port = _free_port()
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
    """The processes below this one that call themselves so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if title in " ".join(process.cmdline()):
                found.append(process)
    return found


def wanted_s(process: psutil.Process) -> float:
    """Seconds that its threads have run so far, or have waited for a core to run on."""
    total = 0
    for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            ran, waited, _ = path.read_text(encoding="utf-8").split()
            total += int(ran) + int(waited)
    return total / 1e9


def has_framework(process: psutil.Process, name: str) -> bool:
    """Whether a framework is in its memory."""
    try:
        return _LIBRARIES[name] in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return False
