"""What a Trainer sends to its TrainerActor. Plain data; the user's objects travel in it as pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raysgd.backends.base import BackendConfig
from raysgd.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.config.checks import check_count, check_instance
from raysgd.controller.run_plan import Start
from raysgd.errors import ConfigError, UsageError
from raysgd.workers.orders import Blob, WorkerTask
from raysgd.workers.versions import Versions

if TYPE_CHECKING:
    from raysgd.workers.placement.slots import ExistingPlacement

_WITH_LOGICAL_WORKERS = ("torch", "jax")


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """The settings of a Trainer; `raysgd.Trainer` documents them as its arguments. None stands for a default config."""

    scaling: ScalingConfig
    backend: BackendConfig
    runtime_env: Mapping[str, Any] | None = None
    seed: int | None = None
    deterministic: bool = False
    logical_workers: int | None = None
    run_config: RunConfig = field(default_factory=RunConfig)
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if self.seed is not None:
            check_count("seed", self.seed, minimum=0)
        if self.logical_workers is not None:
            self._check_logical_workers(check_count("logical_workers", self.logical_workers, minimum=1))
        kinds = {"run_config": RunConfig, "failure_config": FailureConfig, "checkpoint_config": CheckpointConfig}
        for name, kind in kinds.items():
            object.__setattr__(self, name, check_instance(name, getattr(self, name), kind))
        if self.runtime_env is not None:  # a copy: a later change of the caller's dict must not change these settings
            object.__setattr__(self, "runtime_env", dict(self.runtime_env))

    def _check_logical_workers(self, logical_workers: int) -> None:
        most = self.scaling.max_workers
        if most > logical_workers:
            raise ConfigError(
                f"logical_workers={logical_workers} with num_workers={most:g}: a worker acts as at least one logical worker; "
                f"give at most {logical_workers} workers."
            )
        if not self.deterministic:
            raise ConfigError(
                "logical_workers=... is for equal bits on any number of workers; give deterministic=True too."
            )
        if self.backend.name not in _WITH_LOGICAL_WORKERS:
            raise ConfigError(
                f"logical_workers=... with backend={self.backend.name!r}: their gradients are added by "
                "raysgd.torch.logical_steps or raysgd.jax.logical_steps; give backend='torch' or 'jax'."
            )
        if self.scaling.workers_per_replica > 1:
            raise ConfigError(
                "logical_workers=... and workers_per_replica=... exclude each other: a logical worker is part of one process."
            )


@dataclass(frozen=True)
class TrainerSettings:
    """The settings of a TrainerActor.

    Attributes:
        name: Unique in the cluster.
        spec: The Trainer's settings, without ``on_resize`` and ``retry_on``, which are code of the user.
        versions: The driver's versions.
        room: Bundles of an existing placement group for its first workers.
    """

    name: str
    spec: TrainerSpec
    versions: Versions
    room: ExistingPlacement | None = None

    @property
    def alias(self) -> str | None:
        """The name by which other drivers find a detached Trainer. None: the Trainer ends with its driver."""
        return self.spec.run_config.name if self.spec.run_config.detached else None


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
        checkpoint_config: Which of the run's checkpoints are kept. None: as the Trainer's settings say.
    """

    task: WorkerTask
    runs_uri: str
    config: dict[str, Any]
    start: Start = field(default_factory=Start)
    reduce: Mapping[str, str] = field(default_factory=dict)
    host_callbacks: Blob | None = None
    description: dict[str, Any] = field(default_factory=dict)
    secrets: frozenset[str] = field(default=frozenset(), repr=False)
    checkpoint_config: CheckpointConfig | None = None

    @property
    def run_id(self) -> str:
        return self.task.run_id


def is_data_kept(task: WorkerTask) -> bool:
    """Return whether a detached run has data that a process of its own must hold."""
    return bool(task.datasets.sources) or not isinstance(task.initial_state, (bytes, type(None)))
