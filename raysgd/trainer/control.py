"""What can be done with a Trainer's run, from the driver that began it and from any other that has hold of the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.config.checks import check_choice, check_count
from raysgd.errors import UsageError
from raysgd.result import RunStatus
from raysgd.trainer.assembly import TrainerSpec
from raysgd.trainer.channel import OVER, Channel
from raysgd.trainer.stream import ResultStream

#: Seconds a Ctrl-C waits for pending checkpoints and for workers to leave.
INTERRUPT_PATIENCE_S = 30.0


class RunControl:
    """The part of a `raysgd.Trainer` that needs its TrainerActor alone."""

    _spec: TrainerSpec
    _channel: Channel | None
    _stream: ResultStream | None

    def status(self) -> RunStatus:
        """How the latest run stands.

        Raises:
            WorkerError: The controller is gone.
        """
        if self._channel is None or self._channel.is_gone:
            return RunStatus()
        found = self._channel.call("status")
        return RunStatus() if found is None else RunStatus(**found)

    def stream(self, from_iteration: int = 0) -> ResultStream:
        """The results of the latest run: those so far, and what comes.

        Args:
            from_iteration: The first that is wanted, by its ``training_iteration``.

        Raises:
            UsageError: There was no run.
            WorkerError: The controller is gone.
        """
        check_count("stream(from_iteration)", from_iteration, minimum=0)
        channel, latest = self._latest("stream()")
        stream = ResultStream(channel, **latest, from_iteration=from_iteration)
        if self._stream is None:
            self._stream = stream
        return stream

    def pause(self) -> RunStatus:
        """Have the latest run rest at its next checkpoint, with its workers given back; waits until it does.

        Nothing is done twice: all ranks leave train_func out of the same ``save_checkpoint``. A run that ends before it saves
        again does not rest, which the status tells. Counts no failure.

        Raises:
            UsageError: There was no run.
            WorkerError: The controller is gone.
        """
        channel, latest = self._latest("pause()")
        channel.call("pause", latest["run_id"])
        return self.status()

    def resume(self) -> None:
        """Go on with a run that rests; returns at once. One that has not come to rest yet goes on as if nothing had been asked.

        Raises:
            UsageError: There was no run.
            WorkerError: The controller is gone.
        """
        channel, latest = self._latest("resume()")
        channel.call("resume", latest["run_id"])

    def cancel(self) -> None:
        """Have the latest run end now; returns at once. Its checkpoints stay.

        Raises:
            UsageError: There was no run.
            WorkerError: The controller is gone.
        """
        channel, latest = self._latest("cancel()")
        channel.call("stop", latest["run_id"], "Trainer.cancel() was called", True)

    # -- what it left --------------------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> str | None:
        """The folder of the latest run, or None."""
        if self._spec.run.detached and self._channel is not None:  # it may be another driver's
            return self.status().run_dir or None
        return None if self._stream is None else self._stream.run_dir

    def get_last_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of the latest run, or None."""
        checkpoints = self._latest_checkpoints()
        return checkpoints[max(checkpoints)] if checkpoints else None

    def get_best_checkpoint(self, metric: str | None = None, mode: str | None = None) -> Checkpoint | None:
        """The best checkpoint on storage of the latest run, or None.

        Args:
            metric: Metric to rank by; by default ``CheckpointConfig.score_attribute``, without which it is the newest.
            mode: ``"max"`` or ``"min"``; by default ``CheckpointConfig.score_order``.
        """
        config = self._spec.checkpoint
        order = check_choice("mode", mode or config.score_order, ("max", "min"))
        policy = RetentionPolicy(None, metric or config.score_attribute, order)
        best = policy.best([_Scored(number, c.metrics, c) for number, c in self._latest_checkpoints().items()])
        return None if best is None else best.checkpoint

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def _is_live(self) -> bool:
        """Whether a run is not over, whoever began it."""
        if not self._spec.run.detached or self._channel is None:
            return self._stream is not None and self._stream.is_live
        return self.status().state not in ("idle", *OVER)

    def _latest(self, wanted: str) -> tuple[Channel, dict[str, Any]]:
        channel = self._channel
        latest = None if channel is None or channel.is_gone else channel.call("latest")
        if channel is None or latest is None:
            raise UsageError(f"{wanted} is for a run, and this Trainer has had none; begin one with run_generator().")
        return channel, latest

    def _latest_checkpoints(self) -> dict[int, Checkpoint]:
        if self._stream is not None and not self._stream.is_live:  # an error is raised before pending writes are done
            self._stream.wait_closed(INTERRUPT_PATIENCE_S)
        run_dir = self.run_dir
        if run_dir is None:
            return {}
        if self._stream is not None and self._stream.run_dir == run_dir:
            return self._stream.checkpoints
        store = CheckpointStore(Storage.from_uri(run_dir).child("checkpoints"))
        return {found.number: Checkpoint.of_manifest(store.path(found.number), found) for found in store.list()}


@dataclass(frozen=True)
class _Scored:
    number: int
    metrics: Mapping[str, Any]
    checkpoint: Checkpoint
