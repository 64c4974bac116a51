"""The orders that the TrainerActor sends to workers, as plain data. The user's objects travel as unopened pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysgd.backends.base import Member
from raysgd.backends.flight_recorder import Collective
from raysgd.config import CheckpointConfig
from raysgd.data.plan import NO_DATASETS, DatasetPlan
from raysgd.result import RunInfo
from raysgd.session.events import HeldStep, LiveReport
from raysgd.transport import Endpoint
from raysgd.workers.events_connection import InboxAddress

if TYPE_CHECKING:
    from raysgd.checkpoint.format.manifest import Manifest

#: A pickle or, if it is large, a reference to one in the object store.
Blob = Any

#: A GPU's number, or its name if it is shared between processes: ``MIG-...``, ``GPU-...``.
GpuId = int | str


@dataclass(frozen=True)
class WorkerTask:
    """What the user gave to a run and its workers need. It travels unchanged from the driver to the workers.

    Attributes:
        run_id: Made by the driver, so that it can ask for the stream at once.
        code: Pickle of ``(train_func, config)``; each attempt opens its own copy.
        callbacks: Pickle of the callbacks that run in workers, or None.
        initial_state: Pickle of the state given as ``run(resume_from=...)``, or None.
        datasets: The datasets; the object store keeps their rows as long as this object refers to them.
        returns: ``"first"`` (only rank 0's value travels) or ``"all"``.
        on_resize: Pickle of ``FailureConfig(on_resize=...)``, or None.
        retry_on: Pickle of ``FailureConfig(retry_on=...)``, or None.
    """

    run_id: str
    code: Blob
    returns: str = "first"
    seed: int | None = None
    deterministic: bool = False
    logical_workers: int | None = None
    callbacks: Blob | None = None
    initial_state: Blob | None = None
    datasets: DatasetPlan = NO_DATASETS
    on_resize: Blob | None = None
    retry_on: Blob | None = None


@dataclass(frozen=True)
class RunOrder:
    """What is the same for all attempts of a run."""

    task: WorkerTask
    info: RunInfo
    checkpoints_uri: str
    checkpoint: CheckpointConfig


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint in the cluster's memory.

    Attributes:
        manifest: The manifest as on storage, but without files.
        parts: References to the payloads, by the rank that saved them.
    """

    manifest: Manifest
    parts: Mapping[int, Any]


@dataclass(frozen=True)
class LiveOrder:
    """A complete step whose state is in the memory of workers.

    Attributes:
        held: The step.
        small: The small state of this rank after it, as JSON; None: another number of ranks made the step.
        endpoint: Where to copy the state from; None: it is in this worker's memory.
        is_settled: See `raysgd.session.events.Mark`, of the attempts before.
    """

    held: HeldStep
    small: bytes | None
    endpoint: Endpoint | None
    is_settled: bool = False


@dataclass(frozen=True)
class AttemptOrder:
    """The order for one worker in one attempt.

    Attributes:
        checkpoint: URI of the folder of the checkpoint to start from; None: the run's initial state, if it has one.
        held: The checkpoint to start from if it is in memory; it has precedence over ``checkpoint``.
        live: The complete step to start from, if survivors hold one; it has precedence over both.
        previous_size: The world size of the previous attempt; None in the first one.
        first_number: The number of the checkpoint that the attempt's first ``save_checkpoint`` creates.
        iterations_before: The number of rounds before this attempt.
        time_before_s: The training time before this attempt.
        flush_interval_s: The minimum time between two batches of this worker's events on a connection.
        inbox: Where to send events; None: through Ray.
    """

    attempt: int
    member: Member
    checkpoint: str | None
    first_number: int
    iterations_before: int
    time_before_s: float
    flush_interval_s: float
    held: HeldCheckpoint | None = None
    live: LiveOrder | None = None
    previous_size: int | None = None
    inbox: InboxAddress | None = None


@dataclass(frozen=True)
class WorkerInfo:
    """Where a worker process runs.

    Attributes:
        gpu_ids: The worker's GPUs, as CUDA names them.
        stacks_file: The descriptor of its stacks, see `raysgd.workers.liveness.stacks`.
    """

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    gpu_ids: tuple[GpuId, ...] = ()
    stacks_file: int = -1

    @property
    def node(self) -> str:
        return f"{self.hostname} ({self.node_ip})"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that users see."""
        return {name: getattr(self, name) for name in ("node_id", "node_ip", "hostname", "pid", "gpu_ids")}


@dataclass(frozen=True)
class Position:
    """The place of train_func on a rank, from which waiting in a collective is distinguished from computing.

    Attributes:
        collectives: The last collective of each process group, and the last barriers of raysgd. Operations are left out, and
            all are taken for done, while the rank is not blocked.
        waited_s: Seconds since the oldest of them that is not done began; 0 if all are done.
        blocked_s: For how many seconds the training thread has been at one place, begun no collective, and used no CPU (with
            a GPU, waiting may use the CPU).
        line: The innermost line of the user's code, such as ``train.py:31 in evaluate``; empty if it is unknown.
        begun: The collectives that were asked about, as far as this rank has begun them; None while its record is not read.
    """

    collectives: tuple[Collective, ...] = ()
    waited_s: float = 0.0
    blocked_s: float = 0.0
    line: str = ""
    begun: tuple[Collective, ...] | None = None


@dataclass(frozen=True)
class PrepareOrder:
    """The order to prepare for a run: reset what changed in the process since its start, and choose the GPUs.

    Attributes:
        is_run: A run follows. The functions of `raysgd.Trainer.execute` find what earlier ones changed; only what a run changed
            is reset for them.
        keeps_group: This process is in a group that the next attempt uses again; it must not leave it.
        rendezvous_ip: The address at which this process opens the rendezvous; empty: it opens none.
        run_id: The run that follows, of which this process may have a live state.
    """

    visible_gpus: tuple[GpuId, ...] = ()
    device_index: int = 0
    rank: int = 0
    is_run: bool = True
    keeps_group: bool = False
    rendezvous_ip: str = ""
    run_id: str = ""


@dataclass(frozen=True)
class Prepared:
    """The answer to a `PrepareOrder`.

    Attributes:
        stale: Why this process must be replaced, or None.
        rendezvous: What `Backend.open_rendezvous` returned, if the order was to open the rendezvous.
        live: What the process has of the run's live state, if it has anything.
    """

    stale: str | None = None
    rendezvous: str | None = None
    live: LiveReport | None = None
