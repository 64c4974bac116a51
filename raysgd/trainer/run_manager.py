"""The runs of one Trainer, driver side: the latest run, and the TrainerActor that runs them.

`RunHandle` asks about the latest run and controls it. `RunManager` starts the TrainerActor when it is first needed, begins
runs, and releases everything. `raysgd.Trainer` and the trials of Ray Tune are built on these two.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import gc
import os
import signal
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import ray
from ray.exceptions import RayError

from raysgd._util.logs import get_logger
from raysgd.callbacks.base import Callback
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.config.checks import check_choice, check_count
from raysgd.controller.commands import StopRequested
from raysgd.controller.journal.lineage import earlier_checkpoints
from raysgd.controller.requests import TrainerSpec
from raysgd.errors import MissingMetricError, RaySGDError, TrainerBusyError, TrainerClosedError, UsageError
from raysgd.result import LIVE, RunInfo, RunStatus
from raysgd.trainer import assembly
from raysgd.trainer.arguments import RunArguments
from raysgd.trainer.channel import Channel
from raysgd.trainer.stream import ResultStream
from raysgd.workers.placement.capacity import explain_busy
from raysgd.workers.placement.cluster import list_nodes

if TYPE_CHECKING:
    from raysgd.trainer.resume_from import FoundCheckpoint

#: Seconds that an interrupted run has to write pending checkpoints and to let its workers leave.
INTERRUPT_PATIENCE_S = 30.0


class RunHandle:
    """The latest run of a Trainer, whichever driver started it.

    Args:
        spec: The settings of the Trainer.
        channel: The channel to its TrainerActor, if it is started.

    Attributes:
        channel: As above; set by the `RunManager`.
        lease: Keeps the TrainerActor; None if it is detached or there is none.
        stream: The stream of the latest run that this driver started or first asked for.
    """

    def __init__(self, spec: TrainerSpec, channel: Channel | None = None) -> None:
        self._spec = spec
        self.channel = channel
        self.lease: Lease | None = None
        self.stream: ResultStream | None = None

    @property
    def is_live(self) -> bool:
        """Whether the run has not ended."""
        if self.channel is not None and self.channel.has_lost_cluster:
            return False
        if not self._spec.run_config.detached or self.channel is None:
            return self.stream is not None and self.stream.is_live
        return self.status().state in LIVE

    @property
    def run_dir(self) -> str | None:
        if self._spec.run_config.detached and self.channel is not None:  # another driver may have started the run
            return self.status().run_dir or None
        return None if self.stream is None else self.stream.run_dir

    @property
    def run_info(self) -> RunInfo | None:
        return None if self.stream is None else self.stream.run_info

    def status(self) -> RunStatus:
        if self.channel is None or self.channel.is_gone:
            return RunStatus()
        found = self.channel.call("status")
        return RunStatus() if found is None else RunStatus(**found)

    def open_stream(self, from_iteration: int = 0, display: Callback | None = None) -> ResultStream:
        """Return a new stream of the latest run, see `raysgd.Trainer.stream`; ``display`` is called in this process."""
        check_count("stream(from_iteration)", from_iteration, minimum=0)
        channel, latest = self._latest("stream()")
        stream = ResultStream(
            channel,
            **latest,
            make_reader=assembly.reader_maker([] if display is None else [display], latest["reduce"]),
            from_iteration=from_iteration,
            lease=self.lease,
            logs_warnings=self.stream is None and display is None,
        )
        if self.stream is None:
            self.stream = stream
        return stream

    def pause(self) -> RunStatus:
        channel, latest = self._latest("pause()")
        channel.call("pause", latest["run_id"])
        return self.status()

    def resume(self) -> None:
        channel, latest = self._latest("resume()")
        channel.call("resume", latest["run_id"])

    def cancel(self) -> None:
        channel, latest = self._latest("cancel()")
        channel.call("stop", latest["run_id"], StopRequested("Trainer.cancel() was called", cancel=True))

    def list_checkpoints(self) -> list[Checkpoint]:
        checkpoints = self._checkpoints()
        return [checkpoints[number] for number in sorted(checkpoints)]

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Let the TrainerActor delete a checkpoint of the run, which is over; see `raysgd.Trainer.delete_checkpoint`."""
        channel, latest = self._latest("delete_checkpoint()")
        checkpoints = self._checkpoints()
        number = next((number for number, each in checkpoints.items() if each == checkpoint), None)
        if number is None:
            raise UsageError(f"{checkpoint!r} is not a checkpoint of the latest run, {self.run_dir}.")
        channel.call("delete_checkpoint", latest["run_id"], number)
        if self.stream is not None:
            self.stream.forget_checkpoint(number)

    def newest_checkpoint(self) -> Checkpoint | None:
        checkpoints = self._checkpoints()
        return checkpoints[max(checkpoints)] if checkpoints else None

    def best_checkpoint(self, metric: str | None, mode: str | None) -> Checkpoint | None:
        config = self._spec.checkpoint_config
        order = check_choice("mode", mode or config.score_order, ("max", "min"))
        policy = RetentionPolicy(None, metric or config.score_attribute, order)
        own, run_dir = self._checkpoints(), self.run_dir
        found = [*([] if run_dir is None else earlier_checkpoints(run_dir)), *(own[number] for number in sorted(own))]
        scored = [
            _Scored(place, each.metrics, each) for place, each in enumerate(found)
        ]  # numbers begin again in each run
        if scored and not any(policy.can_rank(each.metrics) for each in scored):
            newest = max(scored, key=lambda each: each.number)
            raise MissingMetricError(
                f"no checkpoint of the run can be ranked by this metric; the newest {policy.explain_unranked(newest.metrics)}.",
                key=str(policy.score_attribute),
            )
        best = policy.best(scored)
        return None if best is None else best.checkpoint

    def _latest(self, caller: str) -> tuple[Channel, dict[str, Any]]:
        channel = self.channel
        latest = None if channel is None or channel.is_gone else channel.call("latest")
        if channel is None or latest is None:
            raise UsageError(f"{caller} needs a run, and this Trainer has had none; start one with run_generator().")
        return channel, latest

    def _checkpoints(self) -> dict[int, Checkpoint]:
        """Return the checkpoints of the latest run, by number."""
        stream = self.stream
        if stream is not None and not stream.is_live:  # an error is raised before pending writes are done
            stream.wait_closed(INTERRUPT_PATIENCE_S)
        run_dir = self.run_dir
        if run_dir is None:
            return {}
        if stream is not None and stream.run_dir == run_dir:
            return stream.checkpoints
        store = CheckpointStore(Storage.from_uri(run_dir).child("checkpoints"))
        return {found.number: Checkpoint.of_manifest(store.path(found.number), found) for found in store.list()}


@dataclass(frozen=True)
class _Scored:
    number: int
    metrics: Mapping[str, Any]
    checkpoint: Checkpoint


class RunManager:
    """Starts the TrainerActor of a Trainer, begins its runs, and releases everything.

    Args:
        spec: The settings of the Trainer.
        channel: The channel to the TrainerActor of an attached Trainer.
        runs_uri: The folder for the runs; None: it is named after the first train_func.
        resume_from: Where the first run starts, unless the run itself is given a place to start from.

    Attributes:
        spec: As above.
        latest: The latest run.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        *,
        channel: Channel | None = None,
        runs_uri: str | None = None,
        resume_from: FoundCheckpoint | None = None,
    ) -> None:
        self.spec = spec
        self.latest = RunHandle(spec, channel)
        self._runs_uri = runs_uri
        self._resume_from = resume_from
        self._is_closed = False

    def connect(self) -> Channel:
        """Return the channel to the TrainerActor, which is started if there is none.

        Raises:
            TrainerClosedError: The Trainer was shut down.
            InfeasibleError: The workers do not fit into the placement group that this process is in.
        """
        self._check_open()
        channel = self.latest.channel
        if channel is not None:
            channel.check_cluster()
        if channel is None or channel.is_gone:
            assembly.connect_ray(self.spec.run_config.ray_address)
            if self.spec.run_config.detached and assembly.owns_cluster():
                get_logger().warning(
                    "this program started the Ray cluster, so the cluster and the detached run end with it; "
                    "start a cluster with `ray start` first"
                )
            self._collect_dropped_trainers()
            channel = Channel.start(assembly.make_settings(self.spec))
            self._hold(channel)
        return channel

    def _collect_dropped_trainers(self) -> None:
        """Collect Trainers of this process that only cyclic garbage refers to, if these workers wait for resources."""
        if len(_leases) > 0:
            scaling, num_spares = self.spec.scaling, self.spec.failure_config.num_spares
            if explain_busy(scaling, list_nodes(), num_spares) is not None:
                gc.collect()

    def _hold(self, channel: Channel | None) -> None:
        """Use this channel from now on, and none of another one."""
        if self.latest.lease is not None:
            self.latest.lease.end()
        self.latest.channel = channel
        self.latest.lease = None if channel is None or self.spec.run_config.detached else Lease(channel)

    def warm_up(self, runs_uri: str) -> None:
        """Set the folder of the next runs and start the workers' processes; returns at once."""
        self._runs_uri = runs_uri
        self.connect()

    def check_idle(self) -> None:
        """Check that a run may start.

        Raises:
            TrainerClosedError: The Trainer was shut down.
            TrainerBusyError: A run is live.
        """
        self._check_open()
        if self.latest.is_live:
            run_dir = (self.latest.stream and self.latest.stream.run_dir) or ""
            name = run_dir.partition("?")[0].rstrip("/").rpartition("/")[2] or "a run"
            raise TrainerBusyError(f"{name} is running; wait for its end with get_returns(), or cancel() it.")

    def begin(self, run: RunArguments) -> ResultStream:
        """Start a run; the errors are those of `raysgd.Trainer.run`."""
        self.check_idle()
        run = assembly.check_run(run)
        channel = self.connect()
        runs_uri = self._runs_uri or assembly.runs_folder(self.spec, run.train_func)
        if run.resume_from is None:
            run = replace(run, resume_from=self._resume_from)
        is_known = self._runs_uri is not None or self.spec.run_config.name is not None
        self.latest.stream = stream = assembly.begin_run(
            channel, self.spec, run, runs_uri, self.latest.lease, resumes_in=runs_uri if is_known else None
        )
        self._resume_from = None
        self._runs_uri = runs_uri  # not before: a train_func that was refused must not name the folder
        return stream

    def interrupt(self, stream: ResultStream | None, error: BaseException) -> None:
        """Handle Ctrl-C or a signal that ends this process during a run: the run saves and ends. A detached run continues.

        Args:
            stream: The run that was started; None if the interrupt came before.
            error: What is raised for it.
        """
        is_detached = self.spec.run_config.detached
        if stream is None and not is_detached:
            self.release(patience_s=0)
        elif stream is None or is_detached:
            name = self.spec.run_config.name
            get_logger().info(
                "interrupted: the detached run continues; Trainer.attach(%r) attaches to it, and .cancel() ends it",
                name,
            )
            self.detach()
        else:
            grace_s, is_ctrl_c = self.spec.failure_config.stop_grace_s, isinstance(error, KeyboardInterrupt)
            get_logger().info(
                "stopping: the run saves a checkpoint and ends, within %g s; %s stops it at once",
                grace_s,
                "Ctrl-C again" if is_ctrl_c else "a second signal",
            )
            try:
                stream.stop("Ctrl-C" if is_ctrl_c else "a signal ended its driver", grace_s=grace_s)
                stream.wait_closed(grace_s + INTERRUPT_PATIENCE_S)
            finally:
                self.release(patience_s=0)

    def detach(self) -> None:
        """Close this driver's Trainer; the TrainerActor and its run continue."""
        self._hold(None)
        self._is_closed = True

    def leave(self, error: BaseException | None = None) -> None:
        """End the ``with`` block of a Trainer: detach from a live detached run, shut down otherwise.

        Args:
            error: What is raised in the block.
        """
        is_live = not self._is_closed and self.latest.channel is not None and self.latest.is_live
        if is_live and self.spec.run_config.detached:
            self.detach()
            return
        try:
            if is_live and is_interrupt(error):
                self.interrupt(self.latest.stream, error)
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """End everything for good. May be called again."""
        self._is_closed = True
        self.release()

    def release(self, patience_s: float = INTERRUPT_PATIENCE_S) -> None:
        """End a live run and the TrainerActor with its workers; a later run starts new ones."""
        if self.spec.run_config.detached and ray.is_initialized():
            self._open_live_stream()
        channel = self.latest.channel
        self._hold(None)
        if channel is None or channel.has_lost_cluster:
            return
        stream = self.latest.stream
        try:
            if stream is not None:
                if stream.is_live:
                    stream.cancel()
                stream.wait_closed(patience_s)
        finally:
            channel.close()

    def _open_live_stream(self) -> None:
        """Open the stream of the live run, if another driver started it, so that its end can be waited for."""
        latest = self.latest
        with contextlib.suppress(RaySGDError, RayError):
            if (latest.stream is None or not latest.stream.is_live) and latest.is_live:
                latest.stream = None
                latest.open_stream()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TrainerClosedError("this Trainer was shut down; make a new one.")


def is_interrupt(error: BaseException | None) -> TypeGuard[BaseException]:
    """Return whether an error is Ctrl-C, or the exit for which Ray's handler of SIGTERM asks."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == signal.SIGTERM)


#: The leases of this process. A Trainer that was dropped is no longer among them, unless it is part of cyclic garbage.
_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


class Lease:
    """Keeps a TrainerActor and its workers. The Trainer refers to it, and each stream of a run that is live.

    When nothing refers to it any more, a thread ends the run, if one is live, and the TrainerActor.
    """

    def __init__(self, channel: Channel) -> None:
        self._finalizer = weakref.finalize(self, _release_in_thread, channel, os.getpid())
        self._finalizer.atexit = False  # Ray ends the actors of a program that exits
        _leases.add(self)

    def end(self) -> None:
        """Keep nothing any more, because the TrainerActor is ended by other means."""
        self._finalizer.detach()
        _leases.discard(self)


#: Locked while a thread releases what a Trainer held.
_releasing: set[_thread.LockType] = set()
_is_exiting = False


def _release_in_thread(channel: Channel, pid: int) -> None:
    if os.getpid() != pid or _is_exiting:  # this is a copy in a process that was forked, or Ray ends the actors now
        return
    lock = _thread.allocate_lock()
    lock.acquire()
    _releasing.add(lock)
    # The garbage collector may call this anywhere, also where this thread holds a lock of Ray or of `threading`.
    _thread.start_new_thread(_release_dropped, (channel, lock))


def _release_dropped(channel: Channel, lock: _thread.LockType) -> None:
    """End the TrainerActor of a Trainer that nobody can use any more."""
    try:
        if channel.has_lost_cluster:  # calls would start Ray again
            return
        with contextlib.suppress(Exception):  # there is nobody to raise it to
            why = "its Trainer and its results were dropped"
            if channel.cancel_live_run(why, INTERRUPT_PATIENCE_S):
                get_logger().warning(
                    "a run was cancelled, because %s; keep its Trainer or its ResultStream, or give RunConfig(detached=True)",
                    why,
                )
            channel.fetch_returned()
        with contextlib.suppress(Exception):
            channel.close()
    finally:
        _releasing.discard(lock)
        lock.release()


@atexit.register  # after Ray's own function, so it is called before that
def _wait_for_releases() -> None:
    """Let no thread call Ray while the interpreter exits: after Ray's end, a call would start Ray again."""
    global _is_exiting
    _is_exiting = True
    for lock in list(_releasing):
        lock.acquire(timeout=INTERRUPT_PATIENCE_S)
