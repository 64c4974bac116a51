"""The faults that a `FaultPlan` can make happen, and what each one does.

`Fault.inject` runs in the affected process, with the `FaultContext` that it is given. `raysgd.testing.injection` decides when.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Literal, NoReturn, TypeAlias, get_args

import psutil

from raysgd.checkpoint.store import CheckpointStore
from raysgd.config.checks import check_amount, check_choice, check_count
from raysgd.errors import ConfigError
from raysgd.session.worker import WorkerSession
from raysgd.testing.faulty_files import FaultyStore

#: The local and the remote address of a connection.
Connection: TypeAlias = tuple[Any, Any]

Phase = Literal["start", "report", "collective", "save", "write", "half_written", "written", "committed", "load"]
#: The phases in which a fault can happen; see `Fault`.
PHASES = get_args(Phase)
#: The phases of the thread that writes checkpoints.
WRITER_PHASES = frozenset({"write", "half_written", "written"})
#: The phases that belong to one checkpoint.
CHECKPOINT_PHASES = WRITER_PHASES | {"save", "committed"}
#: The phases of train_func's own thread.
TRAINING_PHASES = frozenset(PHASES) - WRITER_PHASES

PLANNED_ERROR = RuntimeError("a planned fault")
_CHUNK_BYTES = 16 << 20
_FOR_EVER_S = 3600
#: The time for a process to start, before a fault that affects it gives up.
_START_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Moment:
    """A place that a rank has reached.

    Attributes:
        step: The number of its reports so far, including those of the run before its attempt.
        checkpoint: The number of the checkpoint that the phase belongs to; 0 for other phases.
        files: In the phase ``"written"``, the names of the files.
    """

    phase: str
    step: int
    checkpoint: int = 0
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class FaultContext:
    """The access of a fault to the process in which it happens.

    Attributes:
        writes: The writes of this rank's checkpoints, which a fault can delay or make fail.
        random: The source of a fault's random choices.
        earlier_connections: The keys of `list_connections` before the process group formed.
        delays_s: The delays of the next reports, to which a fault can add.
        held: Objects that are kept until the attempt ends.
    """

    moment: Moment
    session: WorkerSession
    store: CheckpointStore
    writes: FaultyStore
    random: Random
    earlier_connections: frozenset[Connection]
    delays_s: list[float]
    held: list[object]


@dataclass(frozen=True, kw_only=True, repr=False)
class Fault:
    """A fault that happens once, as soon as its rank has reached the planned place.

    Attributes:
        rank: The rank in whose process it happens.
        step: The least number of reports of that rank, counted over the whole run like ``training_iteration``; 0: any.
        phase: Where it happens. ``"start"``: train_func is entered. ``"report"``: right after a report. ``"collective"``:
            before a `barrier`, a `broadcast`, a function of ``torch.distributed``, or a backward pass that reduces
            gradients. ``"save"``, ``"load"``: at the call. ``"write"``, ``"half_written"``, ``"written"``: in the thread that
            writes this rank's part, before the first byte, in the middle of a file, and before the part is announced as
            safe; only on ranks that give a state. ``"committed"``: at the first call of the rank's session that finds the
            checkpoint committed. None: the fault's default phase.
        checkpoint: In the phases of a checkpoint, the lowest number of the checkpoint; 0: any.

    Raises:
        ConfigError: The place does not exist.
    """

    rank: int = 0
    step: int = 0
    phase: Phase | None = None
    checkpoint: int = 0

    default_phase: ClassVar[str] = "report"
    phases: ClassVar[frozenset[str]] = frozenset(PHASES)
    needs_state: ClassVar[bool] = False  # it happens only on ranks that give a state to checkpoints
    in_driver: ClassVar[bool] = False

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name in ("rank", "step", "checkpoint"):
            check_count(f"{kind}({name})", getattr(self, name), minimum=0)
        if self.phase is not None:
            check_choice(f"{kind}(phase)", self.phase, [phase for phase in PHASES if phase in self.phases])
        if self.checkpoint and self.planned_phase not in CHECKPOINT_PHASES:
            allowed = ", ".join(repr(phase) for phase in PHASES if phase in CHECKPOINT_PHASES & self.phases)
            raise ConfigError(
                f"{kind}(checkpoint={self.checkpoint}) happens in the phase {self.planned_phase!r}, which belongs to no "
                f"checkpoint; give a phase of {allowed or 'another kind of fault'}."
            )

    @property
    def planned_phase(self) -> str:
        """The phase in which it happens."""
        return self.phase or self.default_phase

    def is_due(self, moment: Moment) -> bool:
        """Return True if it happens at this place."""
        return self.planned_phase == moment.phase and self.step <= moment.step and self.checkpoint <= moment.checkpoint

    def inject(self, context: FaultContext) -> None:
        """Make the fault happen."""
        raise NotImplementedError

    def __repr__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if not self._is_default(f)]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _is_default(self, spec: dataclasses.Field[Any]) -> bool:
        default = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
        return bool(getattr(self, spec.name) == default)


# -- faults of the process ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Kill(Fault):
    """The process is killed by SIGKILL; reports of its last milliseconds may be lost."""

    def inject(self, context: FaultContext) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        _wait_for_ever()


@dataclass(frozen=True, kw_only=True, repr=False)
class Stop(Fault):
    """The process is stopped by SIGSTOP, and continues after SIGCONT."""

    def inject(self, context: FaultContext) -> None:
        # To this thread: another thread might handle a signal to the process, while this one continues.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


@dataclass(frozen=True, kw_only=True, repr=False)
class Preempt(Fault):
    """The process gets SIGTERM, as from a platform that takes back its machine: the rank leaves, and the run continues."""

    def inject(self, context: FaultContext) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, repr=False)
class Exit(Fault):
    """The process exits by itself.

    Attributes:
        code: The exit code.
        hard: It exits by ``os._exit``; otherwise by ``sys.exit``, which raises an exception in train_func.
    """

    code: int = 1
    hard: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hard and self.planned_phase in WRITER_PHASES:
            raise _only_in_training(self)

    def inject(self, context: FaultContext) -> None:
        if self.hard:
            os._exit(self.code)
        sys.exit(self.code)


@dataclass(frozen=True, kw_only=True, repr=False)
class Hang(Fault):
    """The thread hangs for ever.

    Attributes:
        holds_lock: It hangs in a C call that holds the interpreter's lock, so that all other threads hang, too.
    """

    holds_lock: bool = False

    def inject(self, context: FaultContext) -> None:
        if self.holds_lock:
            sleep = ctypes.PyDLL(None).sleep
            while True:
                sleep(_FOR_EVER_S)
        _wait_for_ever()


# -- faults in train_func ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Raise(Fault):
    """An exception is raised in train_func.

    Attributes:
        error: The exception; a copy is raised.
    """

    error: BaseException = PLANNED_ERROR

    phases = TRAINING_PHASES

    def inject(self, context: FaultContext) -> None:
        raise copy.copy(self.error)

    def _is_default(self, spec: dataclasses.Field[Any]) -> bool:
        return repr(self.error) == repr(PLANNED_ERROR) if spec.name == "error" else super()._is_default(spec)


@dataclass(frozen=True, kw_only=True, repr=False)
class OutOfMemory(Fault):
    """Memory runs out.

    Attributes:
        num_bytes: The memory that the process allocates and keeps until the attempt ends; whether it survives depends on the
            machine. None: no memory is allocated, and a ``MemoryError`` is raised in train_func.
    """

    num_bytes: int | None = None

    phases = TRAINING_PHASES

    def inject(self, context: FaultContext) -> None:
        if self.num_bytes is None:
            raise MemoryError("a planned fault")
        held: list[bytearray] = []
        context.held.append(held)
        for start in range(0, self.num_bytes, _CHUNK_BYTES):
            # Not zeros: the pages must be written to be allocated.
            held.append(bytearray(b"\x01") * min(_CHUNK_BYTES, self.num_bytes - start))


@dataclass(frozen=True, kw_only=True, repr=False)
class Slow(Fault):
    """Some steps of the rank take longer; in the phase ``"write"``, some of the checkpoint files that it writes.

    Attributes:
        delay_s: The seconds added to each step, or file.
        steps: The number of slow steps, or files.
    """

    delay_s: float = 1.0
    steps: int = 1

    phases = frozenset({"report", "write"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amount("Slow(delay_s)", self.delay_s)
        check_count("Slow(steps)", self.steps, minimum=1)

    def inject(self, context: FaultContext) -> None:
        if self.planned_phase in WRITER_PHASES:
            context.writes.slow_down(self.delay_s, self.steps)
        else:
            context.delays_s.extend([self.delay_s] * self.steps)


@dataclass(frozen=True, kw_only=True, repr=False)
class NetworkCut(Fault):
    """The rank's connections to the other ranks are shut down in both directions.

    These are the TCP connections that were opened while the process group formed; earlier ones, of Ray and raysgd, stay.
    Linux only. If the backend connects ranks only at their first collective, there is nothing to shut down.
    """

    phases = TRAINING_PHASES

    def inject(self, context: FaultContext) -> None:
        group = [fd for key, fd in list_connections().items() if key not in context.earlier_connections]
        if not group:
            raise ConfigError(f"{self!r} found no connection between ranks; use a backend that connects ranks.")
        for descriptor in group:
            with socket.socket(fileno=os.dup(descriptor)) as connection, contextlib.suppress(OSError):  # may be closed
                connection.shutdown(socket.SHUT_RDWR)


def list_connections() -> dict[Connection, int]:
    """Return the descriptors of this process's established TCP connections, by their local and remote addresses."""
    found = psutil.Process().net_connections("tcp")
    return {(each.laddr, each.raddr): each.fd for each in found if each.status == psutil.CONN_ESTABLISHED}


# -- faults of storage -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class StorageFault(Fault):
    """The rank's writes of checkpoint files fail.

    Attributes:
        times: The number of writes that fail; each retry counts.
        for_s: If given, all writes within this time fail instead.
        error: The errno. raysgd retries after a transient one, such as ``EIO``, but not after ``ENOSPC``.
    """

    times: int = 1
    for_s: float | None = None
    error: int = errno.EIO

    default_phase = "write"
    phases = frozenset({"write"})
    needs_state = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(f"{type(self).__name__}(times)", self.times, minimum=1)
        if self.for_s is not None:
            check_amount(f"{type(self).__name__}(for_s)", self.for_s, positive=True)

    def inject(self, context: FaultContext) -> None:
        context.writes.fail(self.error, self.times, self.for_s)


@dataclass(frozen=True, kw_only=True, repr=False)
class DiskFull(StorageFault):
    """The disk to which the rank writes checkpoints is full; the attributes are those of `StorageFault`."""

    error: int = errno.ENOSPC


@dataclass(frozen=True, kw_only=True, repr=False)
class TornWrite(Fault):
    """Half of a checkpoint file is lost, as by a disk that confirmed a write too early.

    In the phase ``"written"`` it is a file of the rank's own part, before the commit; in ``"committed"`` any file, after it.
    """

    default_phase = "written"
    phases = frozenset({"written", "committed"})
    needs_state = True

    def inject(self, context: FaultContext) -> None:
        _change_file(context, lambda data: data[: len(data) // 2])


@dataclass(frozen=True, kw_only=True, repr=False)
class BitFlip(Fault):
    """One bit of a checkpoint file flips, chosen by the plan's seed."""

    default_phase = "committed"
    phases = frozenset({"written", "committed"})

    def inject(self, context: FaultContext) -> None:
        def flip(data: bytes) -> bytes:
            bit = context.random.randrange(8 * len(data))
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            return bytes(changed)

        _change_file(context, flip)


def _change_file(context: FaultContext, change: Callable[[bytes], bytes]) -> None:
    number = context.moment.checkpoint
    names = list(context.moment.files)
    if not names:
        manifest = context.store.read(number)
        names = [entry.name for rank in sorted(manifest.parts) for entry in manifest.parts[rank]]
    folder, name = context.store.directory(number), context.random.choice(names)
    folder.write_bytes(name, change(folder.read_bytes(name)))


# -- faults of other processes -----------------------------------------------------------------------------------------


ProcessName = Literal[
    "TrainerActor",
    "callback host",
    "controller guard",
    "coordinator",
    "data holder",
    "node agent",
    "placement guard",
    "stream actor",
]
#: raysgd's own processes, and the classes of their Ray actors.
PROCESSES: dict[ProcessName, str] = {
    "TrainerActor": "TrainerActor",
    "callback host": "CallbackHost",
    "controller guard": "ControllerGuard",
    "coordinator": "CoordinatorActor",
    "data holder": "DataHolder",
    "node agent": "NodeAgent",
    "placement guard": "PlacementGuard",
    "stream actor": "StreamActor",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class KillProcess(Fault):
    """A worker kills one of raysgd's own processes by SIGKILL.

    Attributes:
        process: ``"TrainerActor"``, ``"callback host"``, ``"controller guard"``, ``"coordinator"``, ``"data holder"``,
            ``"node agent"``, ``"placement guard"`` or ``"stream actor"``. If the Trainer has several of that kind, the plan's
            seed chooses one.
    """

    process: ProcessName = "TrainerActor"

    signal_number: ClassVar[int] = signal.SIGKILL

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{type(self).__name__}(process)", self.process, list(PROCESSES))

    def inject(self, context: FaultContext) -> None:
        _send_signal(context, self.process, self.signal_number)


@dataclass(frozen=True, kw_only=True, repr=False)
class StopProcess(KillProcess):
    """A worker stops one of raysgd's own processes by SIGSTOP; the attributes are those of `KillProcess`."""

    signal_number = signal.SIGSTOP


@dataclass(frozen=True, kw_only=True, repr=False)
class KillTrainerActor(Fault):
    """A worker kills the process of the TrainerActor."""

    def inject(self, context: FaultContext) -> None:
        _send_signal(context, "TrainerActor", signal.SIGKILL)


def _send_signal(context: FaultContext, process: ProcessName, number: int) -> None:
    """Send a signal to a process of this run's Trainer, on whichever node it is.

    Raises:
        ConfigError: The Trainer has no such process.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    trainer = str(context.session._link._name)  # type: ignore[attr-defined]
    deadline = time.monotonic() + _START_S
    while not (found := _list_processes(trainer, PROCESSES[process])):
        if time.monotonic() > deadline:
            raise ConfigError(f"this Trainer has no {process} to send a signal to: it is not used, or is dead already.")
        time.sleep(_POLL_S)
    node_id, pid = context.random.choice(found)
    if node_id == ray.get_runtime_context().get_node_id():
        os.kill(pid, number)
    else:
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        ray.get(ray.remote(num_cpus=0)(_signal_here).options(scheduling_strategy=there).remote(pid, number))


def _list_processes(trainer: str, kind: str) -> list[tuple[str, int]]:
    """Return the nodes and process ids of a Trainer's actors of a class; of this job's if they have no name."""
    import ray
    from ray._private.state import state  # without Ray's dashboard no public API has an actor's process id

    job = ray.get_runtime_context().get_job_id()
    return sorted(
        (actor["Address"]["NodeID"], actor["Pid"])
        for actor in state.actor_table(None).values()
        if actor["ActorClassName"].rpartition(".")[2] == kind
        and actor["State"] == "ALIVE"
        and (actor["Name"].startswith(trainer) or (kind == "StreamActor" and actor["JobID"] == job))
    )


def _signal_here(pid: int, number: int) -> None:
    os.kill(pid, number)


@dataclass(frozen=True, kw_only=True, repr=False)
class KillDriver(Fault):
    """A worker on the same node kills the driver.

    Attributes:
        pid: The driver's process; by default the process that created the fault.
    """

    pid: int = field(default_factory=os.getpid)

    def inject(self, context: FaultContext) -> None:
        os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True, repr=False)
class RemoveNode(Fault):
    """A function in the driver removes a node, or breaks anything else, when the driver gets the result of ``step``.

    It needs ``callbacks=[plan.driver_callback()]``.

    Attributes:
        remove: The function; called in the driver, in the thread that reads the run.
    """

    remove: Callable[[], object]

    phases = frozenset({"report"})
    in_driver = True

    def inject(self, context: FaultContext | None) -> None:
        self.remove()


def _only_in_training(fault: Fault) -> ConfigError:
    allowed = ", ".join(repr(phase) for phase in PHASES if phase in TRAINING_PHASES)
    return ConfigError(f"{fault!r} cannot happen in the thread that writes checkpoints; give a phase of {allowed}.")


def _wait_for_ever() -> NoReturn:
    while True:
        time.sleep(_FOR_EVER_S)
