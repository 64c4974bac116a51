"""The Ray actor in each worker process. Its methods run in a pool of threads: one streams events, the others answer calls.

The TrainerActor imports this module to start workers. What only an attempt needs is imported in `WorkerActor.load`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayError

from raysgd._util.imports import uncollected
from raysgd.backends.base import BackendConfig, Member
from raysgd.backends.flight_recorder import Collective, CollectiveId
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.errors import StorageError
from raysgd.session.events import AtSavePoint
from raysgd.session.progress import Heartbeat, NodeClock
from raysgd.workers.events_connection import VALUE_FOLLOWS, EventSender
from raysgd.workers.liveness.stacks import expose_stacks
from raysgd.workers.liveness.watched import Watched
from raysgd.workers.orders import (
    AttemptOrder,
    Blob,
    GpuId,
    Position,
    Prepared,
    PrepareOrder,
    RunOrder,
    WorkerInfo,
)
from raysgd.workers.process.imports import EarlyImports, installed_modules
from raysgd.workers.process.reset import Baseline, ModuleWatch
from raysgd.workers.versions import own_versions

if TYPE_CHECKING:
    from raysgd.workers.process.attempt import Attempt

T = TypeVar("T")

#: Threads of the actor: the event stream, and calls that must be answered while it runs.
NUM_THREADS = 8
#: Seconds in which the controller can end the process of a preempted attempt, before the process ends itself.
_REMIND_S = 5.0


class CurrentAttempt:
    """The attempt that runs in this process, if there is one. Called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt: Attempt | None = None
        self._is_expected = False
        self._early: list[tuple[int, Callable[[Attempt], Any]]] = []

    def get(self) -> Attempt | None:
        """Return the attempt that runs, or None."""
        return self._attempt

    def expect(self) -> None:
        """Keep the calls that arrive from now on until the next attempt begins."""
        with self._lock:
            self._is_expected = True
            self._early.clear()

    def begin(self, attempt: Attempt) -> None:
        """Make ``attempt`` the current one, after the calls on it that arrived early."""
        with self._lock:
            early, self._early, self._is_expected = self._early, [], False
            for number, function in early:
                if number == attempt.number:
                    function(attempt)
            self._attempt = attempt

    def call(self, number: int, function: Callable[[Attempt], T], otherwise: T) -> T:
        """Call ``function`` with the attempt of that number, now or when the attempt begins.

        Returns:
            What ``function`` returns; ``otherwise`` if the attempt has not begun, or is over.
        """
        with self._lock:
            current = self._attempt
            if current is None or current.number != number:
                if self._is_expected:
                    self._early.append((number, function))
                return otherwise
        return function(current)

    def forget(self, attempt: Attempt | None = None) -> None:
        """Drop the attempt if it is the current one; without an argument, drop whichever is current."""
        with self._lock:
            if attempt in (None, self._attempt):
                self._attempt = None


class Termination:
    """Handles SIGTERM of this process: a notice while an attempt runs, and the end of the process otherwise.

    Make it in the main thread.

    Args:
        on_notice: Called for each SIGTERM, in the main thread; returns whether it handles the signal.
    """

    def __init__(self, on_notice: Callable[[], bool]) -> None:
        self._on_notice = on_notice
        self._pid = os.getpid()
        self._earlier_handler: Any = signal.signal(signal.SIGTERM, self._handle)

    def remind(self) -> None:
        """Send this process SIGTERM again some seconds after a preempted attempt, in case nobody ends the process."""
        reminder = threading.Timer(_REMIND_S, os.kill, (self._pid, signal.SIGTERM))
        reminder.daemon = True
        reminder.start()

    def end_now(self) -> None:
        """End the process at once."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, signum: int, frame: Any) -> None:
        # A forked child inherits this handler, but has no attempt.
        if os.getpid() == self._pid and self._on_notice():
            return
        if callable(self._earlier_handler):
            self._earlier_handler(signum, frame)
        else:
            self.end_now()


class WorkerActor(Watched):
    """One worker process, which is reused from one run to the next."""

    def __init__(self) -> None:
        self._baseline = Baseline()
        self._modules = ModuleWatch()
        self._early_imports = EarlyImports()
        self._backend: Any = None  # `load` makes these three
        self._attempts: Any = None
        self._instances: Any = None
        self._current = CurrentAttempt()
        self._is_in_group = False
        self._is_reset = True  # no run since the start, or since the last reset
        self._leaving = threading.Lock()
        self._rank = 0
        self._visible_gpus: tuple[GpuId, ...] = ()
        self._stacks_file = expose_stacks()
        self._termination = Termination(self._on_sigterm)

    # -- life ---------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the fields of this process's `WorkerInfo`, and its ``versions``.

        These are built-in types, which a TrainerActor with another version of raysgd can read too.
        """
        return {**vars(self._locate()), "versions": own_versions(WorkerActor)}

    def _locate(self) -> WorkerInfo:
        run_context = ray.get_runtime_context()
        gpus = run_context.get_accelerator_ids().get("GPU", [])
        return WorkerInfo(
            node_id=run_context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            gpu_ids=tuple(int(gpu) if str(gpu).isdigit() else str(gpu) for gpu in gpus),
            stacks_file=self._stacks_file,
        )

    def load(self, config: BackendConfig, controller: str, warm_up: bool = False) -> str | None:
        """Import the framework; called once, before an attempt. Return what is wrong if it is not installed, else None.

        Args:
            config: The configuration of the backend.
            controller: Name of the TrainerActor.
            warm_up: No rank waits for this process, so import what training loops import later as well.
        """
        backend = config.make_backend()
        try:
            with uncollected():
                backend.load()
                if warm_up:
                    backend.warm_up()
        except ImportError as error:
            return str(error)
        from raysgd.workers.process.build import AttemptBuilder
        from raysgd.workers.process.own_instance import OwnInstance

        place = self._locate()
        self._backend = backend
        self._attempts = AttemptBuilder(backend, controller, place)
        self._instances = OwnInstance(backend, place.node)
        self._baseline.note_framework()
        return None

    def list_imports(self) -> list[str]:
        """Return the modules that spares should import; see `installed_modules`."""
        return installed_modules() if self._backend is not None and self._backend.can_import_early else []

    def import_early(self, names: Sequence[str]) -> None:
        """Import modules that a member has imported; for a spare."""
        if self._backend is not None and self._backend.can_import_early:
            self._early_imports.run(names)

    def prepare(self, order: PrepareOrder) -> Prepared:
        """Reset this process and its environment for an attempt, and open the rendezvous if the order says so.

        The process must be replaced if user modules changed since they were loaded, or if the framework has not freed its
        earlier groups.
        """
        from raysgd.session import context

        self._early_imports.end()
        self._rank = order.rank
        self._current.expect()
        context.uninstall()
        with self._leaving:  # an earlier call of `leave` may still run
            # train_func may have returned here, and another rank been lost before it returned.
            if self._is_in_group and not order.keeps_group:
                self._leave()
        self._modules.note_loaded()
        if stale := self._modules.stale():
            return Prepared(f"{', '.join(stale)} changed since the workers loaded it")
        if self._backend.should_replace_process():
            return Prepared("their framework has not freed all resources of earlier groups")
        if order.is_run or not self._is_reset:
            self._baseline.restore(may_freeze=not self._is_in_group and not self._instances.is_in_group)
            self._is_reset = True
        if order.visible_gpus:
            # CUDA reads the variable once, so this process keeps the GPUs that it saw first, whatever others the group gets.
            self._visible_gpus = self._visible_gpus or order.visible_gpus
            own = order.visible_gpus[order.device_index]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._visible_gpus))
            os.environ["RAYSGD_DEVICE_INDEX"] = str(self._visible_gpus.index(own))
        elif "CUDA_VISIBLE_DEVICES" not in ray.get_runtime_context().runtime_env.get("env_vars", {}):
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray shows a worker without GPUs all those of its node
        rendezvous = self.open_rendezvous(order.rendezvous_ip) if order.rendezvous_ip else None
        return Prepared(rendezvous=rendezvous, live=self._attempts.live.report(order.run_id))

    def open_rendezvous(self, node_ip: str) -> str:
        """Open the rendezvous on rank 0, at an address of its node; return the value of `Member.rendezvous`."""
        return str(self._backend.open_rendezvous(node_ip))

    def probe(self, folder: str, name: str) -> bool:
        """Return True if this node sees the file ``name`` that another node wrote into ``folder``."""
        return (Path(folder) / name).exists()

    # -- an attempt ---------------------------------------------------------------------------------------------

    def run(self, run: RunOrder, order: AttemptOrder) -> Iterator[Any]:
        """Run train_func once; yield the events that do not travel over a connection."""
        self._is_reset = False
        attempt: Attempt = self._attempts.make(run, order)
        self._current.begin(attempt)
        sender = EventSender(order.inbox, on_problem=attempt.use_ray_stream)
        for item in attempt.events():
            if isinstance(item, list):
                for batch in sender.send(item):  # no `yield from`: Ray calls `send` of its generators
                    yield batch
            else:
                yield VALUE_FOLLOWS
                yield item
        for batch in sender.finish():
            yield batch
        self._current.forget(attempt)  # the attempt refers to the run's data, which must be freed now
        self._is_in_group = attempt.has_returned
        if attempt.is_preempted:
            self._termination.remind()
        self._modules.note_loaded()
        del attempt, sender  # they refer to what train_func returned
        if not self._is_in_group:
            self._baseline.settle()

    def payloads(self, attempt: int) -> Iterator[Any]:
        """Yield what this rank saves in an attempt, each part as an array of bytes. The controller owns the items."""
        current = self._current.get()
        if current is None or current.number != attempt:
            return
        yield from current.writer.payloads()

    def reach(self, parts: Sequence[Any], timeout_s: float) -> bool:
        """Fetch these parts of a checkpoint to this node's memory; return True if all of them are there in time."""
        try:
            ray.get(list(parts), timeout=timeout_s)  # `ray.wait` counts lost objects as ready
        except RayError:
            return False
        return True

    def store(self, parts: Sequence[Any], folder: str, prefix: str) -> list[FileEntry]:
        """Write a part of a checkpoint from memory to a folder on storage; return its files, which are durable.

        ``parts`` is a list with one reference: Ray would replace a reference that is an argument itself by its value.

        Raises:
            StorageError: Writing failed for good.
        """
        from raysgd.checkpoint.format.parts import write_payload
        from raysgd.checkpoint.storage.storage import PATIENT, Storage

        return write_payload(ray.get(parts[0]), Storage.from_uri(folder, retry=PATIENT), prefix)

    def end(self, attempt: int, why: str) -> None:
        """End an attempt that runs, or is about to begin."""
        self._current.call(attempt, lambda current: current.end(why), None)

    def heartbeat(self, clock: NodeClock | None = None) -> Heartbeat:
        """Return how far train_func has come; ``clock`` is what the controller knows of this node's clock."""
        current = self._current.get()
        return Heartbeat() if current is None else current.heartbeat(clock)

    def position(self, asked: Collection[CollectiveId] = ()) -> Position:
        """Return where train_func is; if it does not run, only what it has communicated.

        Args:
            asked: The collectives that other ranks wait in.
        """
        if (current := self._current.get()) is not None:
            return current.positions.find(asked)
        from raysgd.workers.process.position_finder import find_collectives  # not for a cold start

        last, begun = find_collectives(self._backend, asked)
        return Position(last, begun=begun)

    def flight_record(self, folder: str) -> tuple[Collective, ...]:
        """Return the last collectives of this rank, and write its whole flight record into ``folder``."""
        record = self._backend.dump_flight_record()
        if record is None:
            return ()
        from raysgd.checkpoint.storage.storage import Storage

        def write() -> None:
            with contextlib.suppress(StorageError, OSError):
                Storage.from_uri(folder).write_bytes(f"rank_{self._rank}", record.dump)

        threading.Thread(target=write, name="raysgd-record", daemon=True).start()  # storage must not delay the answer
        last: tuple[Collective, ...] = record.last
        return last

    def hold(self, attempt: int) -> tuple[int, int]:
        """Hold this rank until `stop_from`; return how far it has come, or zeros if it is not in the attempt."""
        return self._current.call(
            attempt, lambda current: current.session.stop_gate.hold(current.session.num_reports), (0, 0)
        )

    def stop_from(self, attempt: int, check: int, last_report: int | None) -> None:
        """Make ``should_stop()`` true from this check on."""
        self._current.call(attempt, lambda current: current.session.stop_gate.release(check, last_report), None)

    def hold_saves(self, attempt: int) -> int:
        """Hold this rank at its next save until `leave_after`; return how many saves it has begun."""
        return self._current.call(attempt, lambda current: current.session.save_gate.hold(), 0)

    def leave_after(self, attempt: int, limit: AtSavePoint | None) -> None:
        """Make train_func leave after this save; None: after no save."""
        self._current.call(attempt, lambda current: current.session.save_gate.release(limit), None)

    def leave(self, keeps_group: bool = False) -> bool:
        """Leave the process group, once all ranks have returned; return whether this process stays in it.

        Args:
            keeps_group: Stay, unless the group was left when train_func ended.
        """
        self._attempts.live.release()  # all ranks have returned
        with self._leaving:
            if not (keeps_group and self._is_in_group):
                self._leave()
            return self._is_in_group

    # -- the class API -------------------------------------------------------------------------------------------

    def make_instance(self, blob: Blob, member: Member) -> None:
        """Join a group and make this worker's instance of the user's class."""
        self._instances.make(blob, member)

    def execute(self, blob: Blob, has_instance: bool) -> bytes:
        """Call the user's function; return the pickle of its value."""
        value: bytes = self._instances.execute(blob, has_instance, self._rank)
        return value

    def drop_instance(self) -> None:
        """Drop the instance and leave its group."""
        self._instances.drop()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._current.forget()
        self._is_in_group = False
        self._backend.destroy_process_group()
        self._baseline.settle()

    def _on_sigterm(self) -> bool:
        """Handle SIGTERM in the main thread: the first one ends the attempt in order, the second one ends the process."""
        current = self._current.get()
        if current is None:
            return False
        if not current.preempt("its process got SIGTERM"):
            self._termination.end_now()
        return True
