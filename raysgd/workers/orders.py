"""What the controller tells a worker to do. Plain data; what belongs to the user travels as pickles nobody opens on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysgd.backends.base import Member
from raysgd.config import CheckpointConfig
from raysgd.data.plan import NO_DATASETS, DatasetPlan
from raysgd.result import RunInfo
from raysgd.workers.uplink import Place

if TYPE_CHECKING:
    from raysgd.checkpoint.manifest import Manifest

#: A pickle, or (where it is large) a reference to one in the object store.
Blob = Any


#: A number, or what stands in its place where processes are given parts of GPUs: ``MIG-...``, ``GPU-...``.
GpuId = int | str


@dataclass(frozen=True)
class RunOrder:
    """What stays the same for all attempts of a run.

    Attributes:
        code: Pickle of ``(train_func, config)``; each attempt opens its own copy.
        callbacks: Pickle of the callbacks that run in workers, or None.
        initial_state: Pickle of the state given as ``run(checkpoint=...)``, or None.
        datasets: What was given as ``run(dataset=...)``; its rows lie in the object store.
        returns: ``"first"`` (rank 0's value travels) or ``"all"``.
        on_resize: Pickle of what is called with the old and the new number of ranks where they differ, or None.
    """

    run_id: str
    code: Blob
    info: RunInfo
    checkpoints_uri: str
    checkpoint: CheckpointConfig
    returns: str = "first"
    seed: int | None = None
    deterministic: bool = False
    callbacks: Blob | None = None
    initial_state: Blob | None = None
    datasets: DatasetPlan = NO_DATASETS
    on_resize: Blob | None = None


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint in the cluster's memory.

    Attributes:
        manifest: As it would be on storage, without files.
        parts: References to the payloads, by the rank that saved them.
    """

    manifest: Manifest
    parts: Mapping[int, Any]


@dataclass(frozen=True)
class AttemptOrder:
    """What one worker does in one attempt.

    Attributes:
        checkpoint: URI of the checkpoint's folder to start from; None: the run's initial state, if it has one.
        held: The checkpoint to start from, where it is in memory; it comes before ``checkpoint``.
        previous_size: Ranks of the attempt before; None for the first.
        first_number: Number of the checkpoint that the first ``save_checkpoint`` of the attempt makes.
        iterations_before: Rounds before this attempt.
        time_before_s: Training time before this attempt.
        flush_interval_s: Least time between two batches of this worker's events, over a connection.
        place: Where to connect with events; None: they go through Ray.
    """

    attempt: int
    member: Member
    checkpoint: str | None
    first_number: int
    iterations_before: int
    time_before_s: float
    flush_interval_s: float
    held: HeldCheckpoint | None = None
    previous_size: int | None = None
    place: Place | None = None


@dataclass(frozen=True)
class WorkerInfo:
    """Where a worker process is. ``stacks_file``: see `raysgd.workers.stacks`; ``gpu_ids``: as CUDA names them."""

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    gpu_ids: tuple[GpuId, ...] = ()
    stacks_file: int = -1

    @property
    def node(self) -> str:
        return f"{self.hostname} ({self.node_ip})"

    def shown(self) -> dict[str, Any]:
        """What users are shown of it."""
        return {name: getattr(self, name) for name in ("node_id", "node_ip", "hostname", "pid", "gpu_ids")}


@dataclass(frozen=True)
class PrepareOrder:
    """Make ready for an attempt: reset what the last run left, choose the GPUs.

    Attributes:
        is_parked: train_func is inside, and goes on in that attempt.
    """

    visible_gpus: tuple[GpuId, ...] = ()
    device_index: int = 0
    rank: int = 0
    is_parked: bool = False
