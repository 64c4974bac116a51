"""The Ray actor in each worker process. Its methods run in a pool of threads: one streams, the others answer meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from raysgd._util.imports import uncollected
from raysgd.backends.base import BackendConfig
from raysgd.checkpoint.names import FileEntry
from raysgd.errors import SessionError, StorageError
from raysgd.session.progress import Pulse
from raysgd.workers.current import CurrentAttempt
from raysgd.workers.freshness import ModuleWatch
from raysgd.workers.orders import AttemptOrder, Blob, GpuId, PrepareOrder, RunOrder, WorkerInfo
from raysgd.workers.reset import Baseline
from raysgd.workers.stacks import make_readable
from raysgd.workers.termination import Termination
from raysgd.workers.uplink import VALUE_FOLLOWS, Batch, Uplink

if TYPE_CHECKING:
    from raysgd.backends.flight_record import Collective
    from raysgd.workers.attempt import Attempt
    from raysgd.workers.entry import Entry
    from raysgd.workers.instances import Instances

#: Threads of the actor: the stream, and calls that must be answered while it runs.
NUM_THREADS = 8
#: Seconds for a train_func that waited for another attempt to be left.
_LEAVE_S = 5.0


class WorkerActor:
    """One worker process, warm from one run to the next."""

    def __init__(self) -> None:
        self._controller = ""
        self._baseline = Baseline()
        self._modules = ModuleWatch()
        self._backend: Any = None
        self._pool: Any = None
        self._current = CurrentAttempt()
        self._entry: Entry | None = None
        self._instances: Instances | None = None
        self._is_in_group = False
        self._leaving = threading.Lock()
        self._rank = 0
        self._visible_gpus: tuple[GpuId, ...] = ()
        self._stacks_file = make_readable()
        self._termination = Termination(self._told_to_end)

    # -- life ---------------------------------------------------------------------------------------------------

    def describe(self) -> WorkerInfo:
        """Where this process is."""
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
        """Import the framework; once, before all else. Returns what is wrong where it is not installed.

        Args:
            config: Tells which one.
            controller: Name of the TrainerActor.
            warm_up: Nobody waits for this process: import what training loops import later as well.
        """
        self._controller = controller
        backend = config.make()
        try:
            with uncollected():
                backend.load()
                if warm_up:
                    backend.warm_up()
        except ImportError as error:
            return str(error)
        self._backend = backend
        backend.recover_inside(self._rejoin)
        import raysgd.workers.making  # noqa: F401  (for what comes; the TrainerActor imports this module without it)

        self._baseline.note_framework()
        return None

    def prepare(self, order: PrepareOrder) -> str | None:
        """Make ready for an attempt: a clean slate, the environment; for a train_func that goes on, nothing.

        Returns why this process must be replaced, if it must: modules of the user's have changed since they were loaded, or
        the framework has left too much behind.
        """
        from raysgd.session import context

        self._rank = order.rank
        self._current.expect()
        if order.is_parked:
            is_there = self._entry is not None and self._entry.is_parked
            return None if is_there else "train_func has left its last attempt"
        if self._entry is not None and (problem := self._leave_train_func(self._entry)) is not None:
            return problem
        context.uninstall()
        with self._leaving:  # it may be under way still
            if self._is_in_group:  # train_func had returned here, and a rank that had not was lost
                self._leave()
        self._modules.look()
        if stale := self._modules.stale():
            return f"{', '.join(stale)} changed since they loaded it"
        if self._backend.is_worn_out():
            return "their framework does not free all that earlier groups have left"
        self._baseline.restore()
        if order.visible_gpus:
            # CUDA reads the variable once: what the group has later, this process goes on with those that it has seen first.
            self._visible_gpus = self._visible_gpus or order.visible_gpus
            own = order.visible_gpus[order.device_index]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._visible_gpus))
            os.environ["RAYSGD_DEVICE_INDEX"] = str(self._visible_gpus.index(own))
        return None

    def open_rendezvous(self) -> str:
        """Rank 0: where the others shall meet it."""
        return str(self._backend.open_rendezvous(ray.util.get_node_ip_address()))

    def probe(self, folder: str, name: str) -> bool:
        """Whether the file ``name`` that another node wrote into ``folder`` can be seen from this one."""
        return (Path(folder) / name).exists()

    # -- an attempt ---------------------------------------------------------------------------------------------

    def run(self, run: RunOrder, order: AttemptOrder) -> Iterator[Any]:
        """Run train_func once; a streaming generator of what the controller gets through Ray: see `uplink`."""
        from raysgd.workers import making

        if self._pool is None:
            self._pool = making.make_pool(run)
        if self._entry is None or not self._entry.is_parked:
            self._entry = making.make_entry()
        attempt = making.make_attempt(
            run, order, entry=self._entry, controller=self._controller, backend=self._backend, pool=self._pool
        )
        self._current.begin(attempt)
        uplink = Uplink(order.place)
        if not uplink.is_direct:
            attempt.go_through_ray(None)
        for item in attempt.events():
            if isinstance(item, list):
                for batch in self._send(uplink, item, attempt):  # no `yield from`: Ray sends into its generators
                    yield batch
            else:
                yield VALUE_FOLLOWS
                yield item
        for batch in uplink.finish():
            yield batch
        self._forget(attempt)
        self._is_in_group = attempt.has_returned
        if attempt.is_preempted:
            self._termination.remind()
        self._modules.look()

    def payloads(self, attempt: int) -> Iterator[Any]:
        """What this rank saves in an attempt, each part an array of bytes; a stream, whose items the controller owns."""
        current = self._current.get()
        if current is None or current.number != attempt:
            return
        yield from current.payloads()

    def reach(self, parts: Sequence[Any], timeout_s: float) -> bool:
        """Whether this node has these parts of a checkpoint in memory, or can fetch them within the time."""
        try:
            ray.get(list(parts), timeout=timeout_s)  # views; `ray.wait` takes what is lost for ready
        except RayError:
            return False
        return True

    def store(self, parts: Sequence[Any], folder: str, prefix: str) -> list[FileEntry]:
        """Write a part of a checkpoint from memory to storage; returns its files, which are durable."""
        from raysgd.workers.starting import store_part

        return store_part(parts[0], folder, prefix)

    def end(self, attempt: int, why: str, goes_on: bool = False) -> None:
        """End an attempt that still runs, or is about to. ``goes_on``: another one follows, which train_func may wait for."""
        self._current.order(attempt, lambda current: current.end(why, goes_on=goes_on), None)
        if not goes_on and self._entry is not None:
            self._entry.let_go(why)

    def change_group(self, attempt: int) -> bool:
        """Have train_func leave its group when it can, for another one; False if it cannot be told so yet."""
        return self._current.order(attempt, lambda current: self._backend.change_group(), False)

    def pulse(self) -> Pulse:
        """A sign of life, and how far train_func has come."""
        current = self._current.get()
        return Pulse() if current is None else current.pulse()

    def flight_record(self, folder: str) -> tuple[Collective, ...]:
        """What the last collectives of this rank were; all that is known of them is written into ``folder``."""
        record = self._backend.flight_record()
        if record is None:
            return ()
        from raysgd.checkpoint.storage import Storage

        def write() -> None:
            with contextlib.suppress(StorageError, OSError):
                Storage.from_uri(folder).write_bytes(f"rank_{self._rank}", record.dump)

        threading.Thread(target=write, name="raysgd-record", daemon=True).start()  # the answer waits for no storage
        last: tuple[Collective, ...] = record.last
        return last

    def hold(self, attempt: int) -> tuple[int, int]:
        """How far this rank has come; it waits there for `stop_from`. Zeros for one that is not in the attempt, or not yet."""
        return self._current.order(attempt, lambda current: current.hold(), (0, 0))

    def stop_from(self, attempt: int, look: int, last_report: int | None) -> None:
        """Make ``should_stop()`` true from this look on."""
        self._current.order(attempt, lambda current: current.stop_from(look, last_report), None)

    def hold_saves(self, attempt: int) -> int:
        """How many saves this rank has begun; it waits at the next for `leave_after`."""
        return self._current.order(attempt, lambda current: current.hold_saves(), 0)

    def leave_after(self, attempt: int, last_save: int | None) -> None:
        """Let all leave after this save; None: after none."""
        self._current.order(attempt, lambda current: current.leave_after(last_save), None)

    def leave(self) -> None:
        """Leave the group, once all ranks have returned."""
        with self._leaving:
            self._leave()

    # -- the class API -------------------------------------------------------------------------------------------

    def make_instance(self, blob: Blob, order: AttemptOrder) -> None:
        """Join a group and make this worker's instance of the user's class."""
        from raysgd.workers.making import node_name, resolve

        self._backend.set_up(order.member)
        try:
            node, is_collective = node_name(order.member.node_ip), self._backend.is_collective_error
            self._class_api().make(resolve(blob), order.member, node, is_collective)
        except BaseException:
            self.drop_instance()
            raise

    def execute(self, blob: Blob, has_instance: bool) -> bytes:
        """Call the user's function here; returns the pickle of its value."""
        from raysgd.workers.making import node_name, resolve

        node = node_name(ray.util.get_node_ip_address())
        self._backend.take_device()
        return self._class_api().execute(resolve(blob), has_instance, self._backend.reducers(), self._rank, node)

    def drop_instance(self) -> None:
        """Forget the instance and leave its group."""
        self._class_api().drop()
        self._backend.tear_down()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._current.forget()
        self._is_in_group = False
        self._backend.tear_down()

    def _rejoin(self, iteration: int | None = None, is_broken: bool = True) -> None:
        if self._entry is None or not self._entry.is_in_thread:
            raise SessionError("a group is formed anew in the thread of train_func alone")
        self._entry.rejoin(iteration, is_broken=is_broken)

    def _leave_train_func(self, entry: Entry) -> str | None:
        """A train_func that waited for another attempt is to be left; why this process must be replaced where it is not."""
        entry.let_go("the run is over, or goes on without this rank's train_func")
        return None if entry.join(_LEAVE_S) else "train_func did not leave its last run"

    def _class_api(self) -> Instances:
        from raysgd.workers.instances import Instances

        if self._instances is None:
            self._instances = Instances()
        return self._instances

    def _forget(self, attempt: Attempt) -> None:
        """It is over; its orders refer to the run's data, which is to be freed however the run ends."""
        self._current.forget(attempt)

    def _told_to_end(self) -> bool:
        """SIGTERM has come, in the main thread: an attempt is to be left in order, unless that is not done by the second."""
        current = self._current.get()
        if current is None:
            return False
        if not current.preempt("its process got SIGTERM"):
            self._termination.end_now()
        return True

    @staticmethod
    def _send(uplink: Uplink, events: list[Any], attempt: Attempt) -> list[Batch]:
        was_direct = uplink.is_direct
        batches = uplink.send(events)
        if was_direct and not uplink.is_direct:
            attempt.go_through_ray(uplink.problem)
        return batches
