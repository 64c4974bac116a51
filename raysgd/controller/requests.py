"""What a Trainer sends to its TrainerActor. Plain data; the user's objects travel in it as pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raysgd.backends.base import BackendConfig
from raysgd.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.controller.run_plan import Start
from raysgd.errors import UsageError
from raysgd.workers.orders import Blob, WorkerTask

if TYPE_CHECKING:
    from raysgd.workers.placement.slots import ExistingPlacement


@dataclass(frozen=True)
class TrainerSettings:
    """The settings of all runs of a Trainer.

    Attributes:
        name: Unique in the cluster.
        alias: The name by which other drivers find a detached Trainer; None: it ends with its driver.
        room: Bundles of an existing placement group for its first workers.
        run: For drivers that attach, as are ``seed`` and ``deterministic``.
    """

    name: str
    scaling: ScalingConfig
    backend: BackendConfig
    failure: FailureConfig
    checkpoint: CheckpointConfig
    runtime_env: Mapping[str, Any] | None = None
    alias: str | None = None
    room: ExistingPlacement | None = None
    run: RunConfig = field(default_factory=RunConfig)
    seed: int | None = None
    deterministic: bool = False


class RunNotGiven(UsageError):
    """The restarted TrainerActor does not have this run; a driver that has its request sends it again."""


@dataclass(frozen=True)
class RunRequest:
    """One run.

    Attributes:
        task: What the workers need; passed on to them as it is.
        runs_uri: The folder that holds the Trainer's runs.
        config: The config as ``run.json`` shows it: plain values, secrets redacted.
        start: The checkpoint to start from, if it is one on storage.
        host_callbacks: Pickle of the callbacks that run on the controller's side, or None.
        description: What else ``run.json`` contains; the TrainerActor redacts it.
        secrets: Texts that must not stand in the run's files.
    """

    task: WorkerTask
    runs_uri: str
    config: dict[str, Any]
    start: Start = field(default_factory=Start)
    reduce: Mapping[str, str] = field(default_factory=dict)
    host_callbacks: Blob | None = None
    description: dict[str, Any] = field(default_factory=dict)
    secrets: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def run_id(self) -> str:
        return self.task.run_id
