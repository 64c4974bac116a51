"""Where a run keeps its files, what it does about failures, which checkpoints it keeps."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysgd.config.checks import check_amount, check_choice, check_component, check_count
from raysgd.errors import ConfigError

DEFAULT_STORAGE_PATH = "~/raysgd_runs"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run's files go.

    Attributes:
        name: Folder of this Trainer's runs, one path component; made from train_func's name and the time if None.
        storage_path: Path, or URI of ``pyarrow.fs``, that holds those folders; ``~/raysgd_runs`` if None.
        detached: The Trainer outlives the driver; ``Trainer.attach(name)`` takes hold of it. Needs ``name``.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    detached: bool = False

    def __post_init__(self) -> None:
        if self.name is not None:
            check_component("RunConfig(name)", self.name)
        if self.storage_path is not None and not isinstance(self.storage_path, (str, os.PathLike)):
            raise ConfigError(f"RunConfig(storage_path={self.storage_path!r}) is no path; give a path or a URI.")
        if self.detached and self.name is None:
            raise ConfigError("RunConfig(detached=True) needs name=..., by which Trainer.attach(name) finds the run.")


@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """What a run does about failures of processes and nodes. Exceptions in train_func are not retried.

    Attributes:
        max_failures: Re-entries of train_func in one run; two deaths at once are one. -1: no limit.
        spares: Warm processes kept beside the workers, with resources of their own, that take the place of those that die.
        abort_grace_s: Seconds a living worker has to leave an ended attempt before it is killed and replaced.
        heartbeat_timeout_s: Seconds without a sign of life after which a process counts as dead; one that uses its CPU is busy.
        progress_timeout_s: Seconds without a report, checkpoint or batch after which a worker counts as hung;
            ``"auto"`` derives it from the run's own pace; None: never.
        preemption_grace_s: Seconds for the ranks to leave train_func when a worker got SIGTERM, out of ``should_stop()`` or their
            next checkpoint; then the attempt is ended where it stands. Of a draining node its deadline counts, if it has one.
        start_timeout_s: Seconds for workers to be placed and up.
        on_resize: ``fn(old_size, new_size)``, called on every rank of an elastic group before train_func is entered with
            another number of ranks than before; `raysgd.world_size` and the like give the new values.
    """

    max_failures: int = 3
    spares: int = 0
    abort_grace_s: float = 2
    heartbeat_timeout_s: float = 10
    progress_timeout_s: float | str | None = None
    preemption_grace_s: float = 25
    start_timeout_s: float = 120
    on_resize: Callable[[int, int], Any] | None = None

    def __post_init__(self) -> None:
        check_count("FailureConfig(max_failures)", self.max_failures, minimum=-1)
        check_count("FailureConfig(spares)", self.spares, minimum=0)
        check_amount("FailureConfig(abort_grace_s)", self.abort_grace_s)
        check_amount("FailureConfig(heartbeat_timeout_s)", self.heartbeat_timeout_s, positive=True)
        check_amount("FailureConfig(preemption_grace_s)", self.preemption_grace_s)
        check_amount("FailureConfig(start_timeout_s)", self.start_timeout_s, positive=True)
        if self.progress_timeout_s not in (None, "auto"):
            check_amount("FailureConfig(progress_timeout_s)", self.progress_timeout_s, positive=True)
        if self.on_resize is not None and not callable(self.on_resize):
            raise ConfigError(
                f"FailureConfig(on_resize={self.on_resize!r}) is not callable; give fn(old_size, new_size)."
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Which checkpoints are kept, and how writing them may fail.

    Attributes:
        num_to_keep: Checkpoints kept on storage, the best by score and always the newest; None: all.
        score_attribute: Metric that ranks them; None: by age.
        score_order: ``"max"`` or ``"min"`` is best.
        memory_only_between: Every how many-th save goes to storage; those between are held in the cluster's memory alone,
            from where a run recovers. The newest is written to storage when the run ends. 0: every save goes there.
        keep_in_memory: Hold the newest checkpoint in the cluster's object store as well, outside the worker that made it,
            where a run goes on from after a worker's death. It takes the size of a state there, twice while saving.
        max_pending_bytes: Bytes of snapshots a worker may hold before ``save_checkpoint`` waits.
        on_write_error: ``"raise"`` ends the run when storage goes on failing for a minute; ``"warn"`` goes on without that
            checkpoint after 1.5 s of tries.
    """

    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: str = "max"
    memory_only_between: int = 0
    keep_in_memory: bool = True
    max_pending_bytes: int = 4 << 30
    on_write_error: str = "raise"

    def __post_init__(self) -> None:
        if self.num_to_keep is not None:
            check_count("CheckpointConfig(num_to_keep)", self.num_to_keep, minimum=1)
        if self.score_attribute is not None and not isinstance(self.score_attribute, str):
            raise ConfigError(f"CheckpointConfig(score_attribute={self.score_attribute!r}) must be a metric's name.")
        check_choice("CheckpointConfig(score_order)", self.score_order, ("max", "min"))
        check_count("CheckpointConfig(memory_only_between)", self.memory_only_between, minimum=0)
        if self.memory_only_between > 1 and not self.keep_in_memory:
            raise ConfigError(
                f"CheckpointConfig(memory_only_between={self.memory_only_between}, keep_in_memory=False) would keep the "
                "saves between nowhere."
            )
        check_count("CheckpointConfig(max_pending_bytes)", self.max_pending_bytes, minimum=1)
        check_choice("CheckpointConfig(on_write_error)", self.on_write_error, ("raise", "warn"))
