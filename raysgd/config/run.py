"""The settings of a run that are not about its workers: its files, how failures are handled, which checkpoints are kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from raysgd.config.argument_names import (
    CHECKPOINT_CONFIG_HINTS,
    FAILURE_CONFIG_HINTS,
    RUN_CONFIG_HINTS,
    refuse_unknown_fields,
)
from raysgd.config.checks import check_amount, check_bool, check_choice, check_component, check_count, check_exceptions
from raysgd.errors import ConfigError

DEFAULT_STORAGE_PATH = "~/raysgd_runs"

ScoreOrder = Literal["max", "min"]
OnWriteError = Literal["raise", "warn"]
#: Values of ``run(returns=...)`` and ``run(reduce={metric: ...})``, and the names of the shipped backends.
Returns = Literal["first", "all"]
Reduction = Literal["mean", "sum", "min", "max", "last", "first"]
#: Which checkpoints count for ``num_to_keep``.
Scope = Literal["run", "folder"]
BackendName = Literal["torch", "pytorch", "horovod", "tensorflow", "jax", "env", "none"]


@refuse_unknown_fields(RUN_CONFIG_HINTS)
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The place of a run's files, and whether the run outlives its driver.

    Attributes:
        name: Folder of this Trainer's runs, one path component. None: the name of train_func and the time.
        storage_path: Path, or URI of ``pyarrow.fs``, of the folder that holds those folders. None: ``~/raysgd_runs``.
        detached: Whether the Trainer outlives its driver. ``Trainer.attach(name)`` attaches to it, so ``name`` is needed.
        ray_address: The Ray cluster to use, if the program is not connected to one yet: ``"local"`` starts one that ends with
            the program, ``"auto"`` joins a running one, ``"10.0.0.1:6379"`` joins that one. None: as the environment variable
            ``RAY_ADDRESS`` says, in the same words; without it, a cluster that runs on this machine, or else a new one.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    detached: bool = False
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            check_component("RunConfig(name)", self.name)
        if self.storage_path is not None and not isinstance(self.storage_path, (str, os.PathLike)):
            raise ConfigError(f"RunConfig(storage_path={self.storage_path!r}) is not a path; give a path or a URI.")
        check_bool("RunConfig(detached)", self.detached)
        if self.detached and self.name is None:
            raise ConfigError("RunConfig(detached=True) needs name=..., by which Trainer.attach(name) finds the run.")
        if self.ray_address is not None:
            _check_address(self.ray_address)


def _check_address(address: Any) -> None:
    if not isinstance(address, str) or not address:
        raise ConfigError(f"RunConfig(ray_address={address!r}) is not an address; give 'local', 'auto' or 'HOST:PORT'.")
    if "://" in address:
        raise ConfigError(
            f"RunConfig(ray_address={address!r}) is an address of Ray Client, through which raysgd does not run; give "
            "'HOST:PORT', or submit the script with `ray job submit`."
        )


@refuse_unknown_fields(FAILURE_CONFIG_HINTS)
@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """Settings for failures of processes and nodes. An exception of train_func is retried only if it is in ``retry_on``.

    Attributes:
        max_failures: How often a run may enter train_func again after a failure. Two deaths at once are one failure. -1: no
            limit.
        num_spares: Started processes kept in addition to the workers, with resources of their own. A spare replaces a worker
            that dies.
        abort_grace_s: Seconds for a living worker to leave train_func when its attempt has ended. After that the worker is
            killed and replaced. Workers that leave from a savepoint, to grow, to pause or before a preemption, have at least
            30 seconds.
        heartbeat_timeout_s: Seconds without a heartbeat after which a process counts as dead. A process that uses its CPU
            meanwhile is busy, not dead. It holds for workers and for raysgd's own processes. A node that does not answer for so
            long is given up, if the group can continue without it.
        callback_timeout_s: Seconds after the end of a run for callbacks that run in the controller, such as loggers, to
            end. After that their process is killed, with a warning that names the callback.
        progress_timeout_s: Seconds without a report, checkpoint or batch after which a worker counts as hung. ``"auto"``
            derives them from the pace of the run. None: never.
        mismatch_timeout_s: Seconds that ranks wait in collectives which can no longer complete, because a rank that they need
            has returned from train_func or waits in another collective. Then the run ends with a `CollectiveMismatchError`.
            None: they wait until the backend's own timeout.
        preemption_grace_s: Seconds for the ranks to leave train_func after a worker got SIGTERM: by ``should_stop()`` or at
            their next checkpoint. Then the attempt is ended. For a draining node its own deadline counts, if it has one.
        stop_grace_s: Seconds for the ranks to save and leave train_func after Ctrl-C or SIGTERM in the driver: by
            ``should_stop()`` or at their next checkpoint. Then the run is cancelled.
        start_timeout_s: Seconds for workers to be placed and started, and to wait for a node that does not answer, if nothing
            can replace its workers.
        wait_for_nodes_s: Seconds to wait for nodes that are still joining the cluster, until it can hold the workers. 0: workers
            that the cluster cannot hold are refused at once.
        retry_on: Exceptions of train_func that count as failures, so that train_func is entered again: a class or a tuple of
            classes, which include their subclasses. The exception is raised once ``max_failures`` allows no more.
        on_resize: ``fn(old_size, new_size)``, called on every rank of an elastic group before train_func is entered with
            a different number of ranks. `raysgd.world_size` already gives the new value there.
    """

    max_failures: int = 3
    num_spares: int = 0
    abort_grace_s: float = 2
    heartbeat_timeout_s: float = 10
    callback_timeout_s: float = 300
    progress_timeout_s: float | Literal["auto"] | None = None
    mismatch_timeout_s: float | None = 60
    preemption_grace_s: float = 25
    stop_grace_s: float = 30
    start_timeout_s: float = 120
    wait_for_nodes_s: float = 0
    retry_on: type[Exception] | tuple[type[Exception], ...] = ()
    on_resize: Callable[[int, int], Any] | None = None

    def __post_init__(self) -> None:
        check_count("FailureConfig(max_failures)", self.max_failures, minimum=-1)
        check_count("FailureConfig(num_spares)", self.num_spares, minimum=0)
        check_amount("FailureConfig(abort_grace_s)", self.abort_grace_s)
        check_amount("FailureConfig(heartbeat_timeout_s)", self.heartbeat_timeout_s, positive=True)
        check_amount("FailureConfig(callback_timeout_s)", self.callback_timeout_s, positive=True)
        check_amount("FailureConfig(preemption_grace_s)", self.preemption_grace_s)
        check_amount("FailureConfig(stop_grace_s)", self.stop_grace_s)
        check_amount("FailureConfig(start_timeout_s)", self.start_timeout_s, positive=True)
        check_amount("FailureConfig(wait_for_nodes_s)", self.wait_for_nodes_s)
        object.__setattr__(self, "retry_on", check_exceptions("FailureConfig(retry_on)", self.retry_on))
        if self.progress_timeout_s not in (None, "auto"):
            check_amount("FailureConfig(progress_timeout_s)", self.progress_timeout_s, positive=True)
        if self.mismatch_timeout_s is not None:
            check_amount("FailureConfig(mismatch_timeout_s)", self.mismatch_timeout_s, positive=True)
        if self.on_resize is not None and not callable(self.on_resize):
            raise ConfigError(
                f"FailureConfig(on_resize={self.on_resize!r}) is not callable; give fn(old_size, new_size)."
            )


@refuse_unknown_fields(CHECKPOINT_CONFIG_HINTS)
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Which checkpoints are kept and where, and what happens when writing one fails.

    Attributes:
        num_to_keep: Checkpoints to keep on storage: the best by score, and always the newest. None: all.
        scope: Whose checkpoints count for ``num_to_keep`` and ``keep_best``: those of each ``"run"`` by itself, or those of all
            runs in the ``"folder"`` of the Trainer's runs, which are then one training that was resumed.
        score_attribute: Metric to score checkpoints by. None: a newer checkpoint is better.
        score_order: Whether the highest score is best, ``"max"``, or the lowest, ``"min"``.
        keep_best: Metrics by which the best checkpoint is kept in addition to the ``num_to_keep``, each with ``"max"`` or
            ``"min"``: ``{"val/loss": "min", "accuracy": "max"}``.
        links: Whether ``last`` and ``best`` in the folder of the Trainer's runs lead to the newest checkpoint and to the best
            one, by the first metric of ``keep_best``, or else by ``score_attribute``. They are symbolic links on a local disk,
            and elsewhere small files that ``Checkpoint.from_path`` follows.
        storage_interval: Write every n-th checkpoint to storage. The others are held in the cluster's memory only, from
            which a run recovers. The newest is written to storage when the run ends. 1: every checkpoint is written.
        keep_in_memory: Whether the newest checkpoint is also held in the cluster's object store, outside the worker that
            made it. A run resumes from there after the death of a worker. It takes the size of the state, and twice that
            while the next checkpoint is saved.
        max_pending_bytes: Bytes of snapshots that a worker may hold before ``save_checkpoint`` waits.
        on_write_error: ``"raise"`` ends the run when storage has failed for a minute. ``"warn"`` skips the checkpoint after
            1.5 s of retries, and training continues.
    """

    num_to_keep: int | None = None
    scope: Scope = "run"
    score_attribute: str | None = None
    score_order: ScoreOrder = "max"
    keep_best: Mapping[str, ScoreOrder] = field(default_factory=dict)
    links: bool = False
    storage_interval: int = 1
    keep_in_memory: bool = True
    max_pending_bytes: int = 4 << 30
    on_write_error: OnWriteError = "raise"

    def __post_init__(self) -> None:
        if self.num_to_keep is not None:
            check_count("CheckpointConfig(num_to_keep)", self.num_to_keep, minimum=1)
        check_choice("CheckpointConfig(scope)", self.scope, get_args(Scope))
        if self.score_attribute is not None and not isinstance(self.score_attribute, str):
            raise ConfigError(
                f"CheckpointConfig(score_attribute={self.score_attribute!r}) is not a metric's name; give a string."
            )
        check_choice("CheckpointConfig(score_order)", self.score_order, get_args(ScoreOrder))
        given: object = self.keep_best
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise ConfigError(
                f"CheckpointConfig(keep_best={self.keep_best!r}) is not a mapping of metrics to 'max' or 'min'; give one such as "
                "{'loss': 'min'}."
            )
        for metric, order in self.keep_best.items():
            check_choice(f"CheckpointConfig(keep_best={{{metric!r}}})", order, get_args(ScoreOrder))
        check_bool("CheckpointConfig(links)", self.links)
        check_count("CheckpointConfig(storage_interval)", self.storage_interval, minimum=1)
        if self.storage_interval > 1 and not self.keep_in_memory:
            raise ConfigError(
                f"CheckpointConfig(storage_interval={self.storage_interval}, keep_in_memory=False) would lose the checkpoints "
                "between those that are written; give keep_in_memory=True or storage_interval=1."
            )
        check_count("CheckpointConfig(max_pending_bytes)", self.max_pending_bytes, minimum=1)
        check_choice("CheckpointConfig(on_write_error)", self.on_write_error, get_args(OnWriteError))
