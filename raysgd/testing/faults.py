"""The kinds of faults that a `FaultPlan` can make happen, and what each does.

`Fault.act` runs in the process that breaks, through the `Scene` it is given; when it is time is decided in
`raysgd.testing.injection`.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from raysgd.config.checks import check_amount, check_count
from raysgd.errors import ConfigError
from raysgd.testing.fault import IN_TRAINING, IN_WRITER, PHASES, Fault, Scene

PLANNED_ERROR = RuntimeError("a fault that was planned")
_CHUNK_BYTES = 16 << 20
_FOR_EVER_S = 3600

# -- what happens to the process ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Kill(Fault):
    """SIGKILL. What the process had reported in its last milliseconds may not have left it."""

    def act(self, scene: Scene) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        _wait_for_ever()


@dataclass(frozen=True, kw_only=True, repr=False)
class Stop(Fault):
    """SIGSTOP: the process stays and does nothing more. After a SIGCONT it goes on."""

    def act(self, scene: Scene) -> None:
        # To this thread: a signal to the process is taken by any, and this one might go on until that one gets a processor.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


@dataclass(frozen=True, kw_only=True, repr=False)
class Preempt(Fault):
    """SIGTERM, as from a platform that takes its machine back: the rank is to leave, and the run to go on without it."""

    def act(self, scene: Scene) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, repr=False)
class Exit(Fault):
    """The process ends itself.

    Attributes:
        code: Its exit code.
        hard: By ``os._exit``; otherwise by ``sys.exit``, which is an exception of train_func.
    """

    code: int = 1
    hard: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hard and self.where in IN_WRITER:
            raise _only_in_training(self)

    def act(self, scene: Scene) -> None:
        if self.hard:
            os._exit(self.code)
        sys.exit(self.code)


@dataclass(frozen=True, kw_only=True, repr=False)
class Hang(Fault):
    """The thread never goes on.

    Attributes:
        holds_lock: It hangs in a C call that holds the interpreter's lock, so that no other thread goes on either.
    """

    holds_lock: bool = False

    def act(self, scene: Scene) -> None:
        if self.holds_lock:
            sleep = ctypes.PyDLL(None).sleep
            while True:
                sleep(_FOR_EVER_S)
        _wait_for_ever()


# -- what happens in train_func ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Raise(Fault):
    """An exception in train_func.

    Attributes:
        error: The exception; a copy is raised.
    """

    error: BaseException = PLANNED_ERROR

    phases = IN_TRAINING

    def act(self, scene: Scene) -> None:
        raise copy.copy(self.error)

    def _is_default(self, spec: dataclasses.Field[Any]) -> bool:
        return repr(self.error) == repr(PLANNED_ERROR) if spec.name == "error" else super()._is_default(spec)


@dataclass(frozen=True, kw_only=True, repr=False)
class OutOfMemory(Fault):
    """Memory runs out.

    Attributes:
        num_bytes: The process takes so many, and holds them until the attempt is over; whether that is survived is the
            machine's affair. None: it takes none, and train_func gets a ``MemoryError``.
    """

    num_bytes: int | None = None

    phases = IN_TRAINING

    def act(self, scene: Scene) -> None:
        if self.num_bytes is None:
            raise MemoryError("a fault that was planned")
        held: list[bytearray] = []
        scene.hold(held)
        for start in range(0, self.num_bytes, _CHUNK_BYTES):
            held.append(
                bytearray(b"\x01") * min(_CHUNK_BYTES, self.num_bytes - start)
            )  # written to: the pages are taken


@dataclass(frozen=True, kw_only=True, repr=False)
class Slow(Fault):
    """Each step of the rank lasts longer; in the phase ``"write"`` instead each file of a checkpoint that it writes.

    Attributes:
        delay_s: Seconds that are added to a step, or to a file.
        steps: How many of them are slow.
    """

    delay_s: float = 1.0
    steps: int = 1

    phases = frozenset({"report", "write"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amount("Slow(delay_s)", self.delay_s)
        check_count("Slow(steps)", self.steps, minimum=1)

    def act(self, scene: Scene) -> None:
        if self.where in IN_WRITER:
            scene.slow_writes(self.delay_s, self.steps)
        else:
            scene.slow_down(self.delay_s, self.steps)


@dataclass(frozen=True, kw_only=True, repr=False)
class NetworkCut(Fault):
    """The rank's connections to the other ranks are shut down, in both directions.

    These are the TCP connections that came to be while the process group was formed; Ray's and raysgd's own, which were
    there before, stay. Linux only; where the backend connects ranks at their first collective there is nothing to cut.
    """

    phases = IN_TRAINING

    def act(self, scene: Scene) -> None:
        if not scene.cut_group():
            raise ConfigError(f"{self!r} found no connection between ranks; use a backend that makes some.")


# -- what happens to storage -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class StorageFault(Fault):
    """The rank's writes of checkpoints fail.

    Attributes:
        times: So many writes of a file fail; a write that is tried again is another one.
        for_s: Instead: all of them, for so many seconds.
        error: The errno. One that passes, such as ``EIO``, is tried again; ``ENOSPC`` is not.
    """

    times: int = 1
    for_s: float | None = None
    error: int = errno.EIO

    usual_phase = "write"
    phases = frozenset({"write"})
    needs_state = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(f"{type(self).__name__}(times)", self.times, minimum=1)
        if self.for_s is not None:
            check_amount(f"{type(self).__name__}(for_s)", self.for_s, positive=True)

    def act(self, scene: Scene) -> None:
        scene.fail_writes(self.error, self.times, self.for_s)


@dataclass(frozen=True, kw_only=True, repr=False)
class DiskFull(StorageFault):
    """The disk that the rank writes checkpoints to is full, as in `StorageFault`."""

    error: int = errno.ENOSPC


@dataclass(frozen=True, kw_only=True, repr=False)
class TornWrite(Fault):
    """Half of a file of a checkpoint is lost, as by a disk that promised more than it did.

    In the phase ``"written"`` before the checkpoint is committed, and of the rank's own part; in ``"committed"`` after it.
    """

    usual_phase = "written"
    phases = frozenset({"written", "committed"})
    needs_state = True

    def act(self, scene: Scene) -> None:
        _change_file(scene, lambda data: data[: len(data) // 2])


@dataclass(frozen=True, kw_only=True, repr=False)
class BitFlip(Fault):
    """One bit of a file of a committed checkpoint changes, chosen by the plan's seed."""

    usual_phase = "committed"
    phases = frozenset({"written", "committed"})

    def act(self, scene: Scene) -> None:
        def flip(data: bytes) -> bytes:
            bit = scene.random.randrange(8 * len(data))
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            return bytes(changed)

        _change_file(scene, flip)


def _change_file(scene: Scene, change: Callable[[bytes], bytes]) -> None:
    number = scene.moment.checkpoint
    names = list(scene.moment.files)
    if not names:
        manifest = scene.store.read(number)
        names = [entry.name for rank in sorted(manifest.parts) for entry in manifest.parts[rank]]
    folder, name = scene.store.directory(number), scene.random.choice(names)
    folder.write_bytes(name, change(folder.read_bytes(name)))


# -- what happens to others --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class KillTrainerActor(Fault):
    """The Trainer's controller process is killed, by a worker."""

    def act(self, scene: Scene) -> None:
        from raysgd.testing.processes import kill_actor

        kill_actor(scene.controller)


@dataclass(frozen=True, kw_only=True, repr=False)
class KillDriver(Fault):
    """The driver is killed, by a worker on the same node.

    Attributes:
        pid: Its process; the one that the fault was made in, if not given.
    """

    pid: int = field(default_factory=os.getpid)

    def act(self, scene: Scene) -> None:
        os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True, repr=False)
class RemoveNode(Fault):
    """A node is lost, or whatever else a test can do from outside, when the driver gets the result of ``step``.

    It needs ``callbacks=[plan.driver_callback()]``.

    Attributes:
        remove: What takes the node away; called in the driver, in the thread that reads the run.
    """

    remove: Callable[[], object]

    phases = frozenset({"report"})
    in_driver = True

    def act(self, scene: Scene | None) -> None:
        self.remove()


def _only_in_training(fault: Fault) -> ConfigError:
    allowed = ", ".join(repr(phase) for phase in PHASES if phase in IN_TRAINING)
    return ConfigError(
        f"{fault!r}: the thread that writes checkpoints is none of train_func's; give a phase of {allowed}."
    )


def _wait_for_ever() -> NoReturn:
    while True:
        time.sleep(_FOR_EVER_S)
