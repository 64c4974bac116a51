"""What a Trainer asks of its TrainerActor. Plain data; the user's objects travel in it as pickles."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from raysgd.backends.base import BackendConfig
from raysgd.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.controller.shelf import Start
from raysgd.data.plan import NO_DATASETS, DatasetPlan
from raysgd.errors import UsageError
from raysgd.result import RunInfo
from raysgd.workers.orders import Blob, RunOrder

if TYPE_CHECKING:
    from raysgd.controller.fleet import Fleet
    from raysgd.workers.seats import Room


@dataclass(frozen=True)
class TrainerSettings:
    """What stays the same for all runs of a Trainer.

    Attributes:
        name: Unique in the cluster.
        alias: What a detached Trainer is found by; None: it ends with its driver.
        room: A placement group of others that has its first workers.
        run: For those who attach, as are the rest.
    """

    name: str
    scaling: ScalingConfig
    backend: BackendConfig
    failure: FailureConfig
    checkpoint: CheckpointConfig
    runtime_env: Mapping[str, Any] | None = None
    alias: str | None = None
    room: Room | None = None
    run: RunConfig = field(default_factory=RunConfig)
    seed: int | None = None
    deterministic: bool = False


class RunNotGiven(UsageError):
    """The TrainerActor was started again, and was not given this run; a driver that still has it gives it again."""


@dataclass(frozen=True)
class RunRequest:
    """One run.

    Attributes:
        run_id: Made by the driver, so that it can ask for the stream at once.
        runs_uri: The folder that holds the Trainer's runs.
        config: The config as ``run.json`` shows it: plain values, secrets redacted.
        start: The checkpoint to start from, if it is one on storage.
        datasets: The datasets; the references to their rows keep these alive as long as the request travels or is held.
        host_callbacks: Pickle of the callbacks that run on the controller's side, or None.
        on_resize: Pickle of ``FailureConfig(on_resize=...)``, or None.
        description: What else goes into ``run.json``; the TrainerActor redacts it.
        secrets: Texts that must not stand in the run's files.
    """

    run_id: str
    runs_uri: str
    code: Blob
    config: dict[str, Any]
    start: Start = field(default_factory=Start)
    initial_state: Blob | None = None
    datasets: DatasetPlan = NO_DATASETS
    returns: str = "first"
    reduce: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    deterministic: bool = False
    worker_callbacks: Blob | None = None
    host_callbacks: Blob | None = None
    on_resize: Blob | None = None
    description: dict[str, Any] = field(default_factory=dict)
    secrets: frozenset[str] = field(default=frozenset(), repr=False)


def make_run_order(request: RunRequest, info: RunInfo, checkpoints_uri: str, checkpoint: CheckpointConfig) -> RunOrder:
    """What the workers need to know of it."""
    return RunOrder(
        run_id=request.run_id,
        code=request.code,
        info=info,
        checkpoints_uri=checkpoints_uri,
        checkpoint=checkpoint,
        returns=request.returns,
        seed=request.seed,
        deterministic=request.deterministic,
        callbacks=request.worker_callbacks,
        initial_state=request.initial_state,
        datasets=request.datasets,
        on_resize=request.on_resize,
    )


def describe_run(request: RunRequest, info: RunInfo, fleet: Fleet) -> dict[str, Any]:
    """What ``run.json`` says, secrets and all."""
    found = [fleet.info(rank) for rank in range(fleet.size)]
    workers = [{"rank": rank, **(worker.shown() if worker is not None else {})} for rank, worker in enumerate(found)]
    return {**request.description, **asdict(info), "workers": workers, "started": time.time()}
