"""The runs of one Trainer, driver side: the latest run, and the TrainerActor that runs them.

`RunHandle` asks about the latest run and controls it. `RunManager` starts the TrainerActor when it is first needed, begins
runs, and releases everything. `raysgd.Trainer` and the trials of Ray Tune are built on these two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from raysgd._util.logs import get_logger
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.config.checks import check_choice, check_count
from raysgd.controller.requests import TrainerSpec
from raysgd.errors import RaySGDError, TrainerBusyError, TrainerClosedError, UsageError
from raysgd.result import RunStatus
from raysgd.trainer import assembly
from raysgd.trainer.arguments import RunArguments
from raysgd.trainer.channel import OVER, Channel
from raysgd.trainer.stream import ResultStream

#: Seconds that an interrupted run has to write pending checkpoints and to let its workers leave.
INTERRUPT_PATIENCE_S = 30.0


class RunHandle:
    """The latest run of a Trainer, whichever driver started it.

    Args:
        spec: The settings of the Trainer.
        channel: The channel to its TrainerActor, if it is started.

    Attributes:
        channel: As above; set by the `RunManager`.
        stream: The stream of the latest run that this driver started or first asked for.
    """

    def __init__(self, spec: TrainerSpec, channel: Channel | None = None) -> None:
        self._spec = spec
        self.channel = channel
        self.stream: ResultStream | None = None

    @property
    def is_live(self) -> bool:
        """Whether the run has not ended."""
        if not self._spec.run_config.detached or self.channel is None:
            return self.stream is not None and self.stream.is_live
        return self.status().state not in ("idle", *OVER)

    @property
    def run_dir(self) -> str | None:
        if self._spec.run_config.detached and self.channel is not None:  # another driver may have started the run
            return self.status().run_dir or None
        return None if self.stream is None else self.stream.run_dir

    def status(self) -> RunStatus:
        if self.channel is None or self.channel.is_gone:
            return RunStatus()
        found = self.channel.call("status")
        return RunStatus() if found is None else RunStatus(**found)

    def open_stream(self, from_iteration: int = 0) -> ResultStream:
        check_count("stream(from_iteration)", from_iteration, minimum=0)
        channel, latest = self._latest("stream()")
        stream = ResultStream(channel, **latest, from_iteration=from_iteration)
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
        channel.call("stop", latest["run_id"], "Trainer.cancel() was called", True)

    def newest_checkpoint(self) -> Checkpoint | None:
        checkpoints = self._checkpoints()
        return checkpoints[max(checkpoints)] if checkpoints else None

    def best_checkpoint(self, metric: str | None, mode: str | None) -> Checkpoint | None:
        config = self._spec.checkpoint_config
        order = check_choice("mode", mode or config.score_order, ("max", "min"))
        policy = RetentionPolicy(None, metric or config.score_attribute, order)
        best = policy.best([_Scored(number, found.metrics, found) for number, found in self._checkpoints().items()])
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
        resume_from: Checkpoint | None = None,
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
        if channel is None or channel.is_gone:
            assembly.connect_ray()
            if self.spec.run_config.detached and assembly.owns_cluster():
                get_logger().warning(
                    "this program started the Ray cluster, so the cluster and the detached run end with it; "
                    "start a cluster with `ray start` first"
                )
            channel = self.latest.channel = Channel.start(assembly.make_settings(self.spec))
        return channel

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
        channel = self.connect()
        runs_uri = self._runs_uri or assembly.runs_folder(self.spec, run.train_func)
        if run.resume_from is None:
            run = replace(run, resume_from=self._resume_from)
        self.latest.stream = stream = assembly.begin_run(channel, self.spec, run, runs_uri)
        self._resume_from = None
        self._runs_uri = runs_uri  # not before: a train_func that was refused must not name the folder
        return stream

    def interrupt(self, stream: ResultStream | None) -> None:
        """Handle Ctrl-C during a run: end the run and keep its checkpoints. A detached run continues.

        Args:
            stream: The run that was started; None if the interrupt came before.
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
            get_logger().info("interrupted: ending the run and keeping its checkpoints (Ctrl-C again to kill)")
            try:
                stream.cancel()
                stream.wait_closed(INTERRUPT_PATIENCE_S)
            finally:
                self.release(patience_s=0)

    def detach(self) -> None:
        """Close this driver's Trainer; the TrainerActor and its run continue."""
        self.latest.channel, self._is_closed = None, True

    def leave(self) -> None:
        """End the ``with`` block of a Trainer: detach from a live detached run, shut down otherwise."""
        if self.spec.run_config.detached and not self._is_closed and self.latest.is_live:
            self.detach()
        else:
            self.shutdown()

    def shutdown(self) -> None:
        """End everything for good. May be called again."""
        self._is_closed = True
        self.release()

    def release(self, patience_s: float = INTERRUPT_PATIENCE_S) -> None:
        """End a live run and the TrainerActor with its workers; a later run starts new ones."""
        if self.spec.run_config.detached and ray.is_initialized():
            self._open_live_stream()
        channel, self.latest.channel = self.latest.channel, None
        if channel is None or not ray.is_initialized():
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
