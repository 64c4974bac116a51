"""The session of one attempt in a worker process."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raysgd.checkpoint.checkpoint import Checkpoint, load_state
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import read_manifest
from raysgd.data.plan import NO_DATASETS, DatasetPlan
from raysgd.errors import (
    AttemptEnded,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    SessionError,
    UsageError,
)
from raysgd.result import DATA_WAIT_FRACTION
from raysgd.session import rank_state
from raysgd.session.base import Identity, Session
from raysgd.session.context import OUTLIVED
from raysgd.session.event_queue import EventQueue
from raysgd.session.events import HeldStep, HoldsState, Mark, Saved, StartUnusable, StepId
from raysgd.session.gates import SaveGate, StopGate
from raysgd.session.generators import GeneratorText
from raysgd.session.live.state import LiveState
from raysgd.session.metrics import copy_metrics
from raysgd.session.saving import CheckpointWriter


class Link(Protocol):
    """What a session asks its controller. Each call waits for the answer and may raise `AttemptEnded`."""

    def join_barrier(self, what: str, index: int, payload: bytes | None) -> bytes | None:
        """Wait until every rank that has not returned made the ``index``-th call of kind ``what``.

        Returns rank 0's payload, empty where rank 0 did not call; for ``"gather"`` a pickle of all payloads by rank.
        """

    def take(self, number: int) -> Any:
        """Return a piece that the driver gives to the run, or None if it does not come within some seconds."""

    def newest_checkpoint(self, index: int, num_saves: int) -> Any:
        """Return the newest committed checkpoint of the run, as `StartingPoint.load` takes it, or None.

        All ranks get the same answer to their ``index``-th question, before which each has saved ``num_saves`` times.
        """

    def list_checkpoints(self, index: int, num_saves: int) -> list[Checkpoint]:
        """Return the committed checkpoints of the run, oldest first; arguments as for `newest_checkpoint`."""


class StartingPoint(Protocol):
    """The state that an attempt starts from."""

    def load(
        self, rank: int, world_size: int, *, allow_pickle: bool, on_unusable: Callable[[Exception], None]
    ) -> tuple[Any, dict[str, Any]]:
        """Return this rank's state, and its small state (generators, data positions; may be empty).

        ``on_unusable`` is called with what is found wrong later, when an array of the state is read.
        """


@dataclass(frozen=True)
class Codec:
    """How objects travel to other ranks: the worker process provides pickling, so this layer does not depend on it."""

    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]


class WorkerSession(Session):
    """One attempt, seen from train_func. See `Session` for the threads that may call what.

    Attributes:
        iterations_before: Rounds of the run before this attempt.
        num_reports: Reports made so far in this attempt.
        stop_gate: Where this rank finds the stop that all ranks agreed on.
        save_gate: Where it waits for the save that all ranks leave after.
        expects_save: train_func has asked for a checkpoint to continue from, so it probably saves some.
        live: What ``live_state`` has returned, if it was called; or that of a loop of raysgd.
        live_problem: Why a loop of raysgd has none.
        was_settled: The marks of the attempts before were settled, see `raysgd.session.events.Mark`.
        known_pieces: Which ranks hold the same piece of the live state that the attempt starts from, see
            `raysgd.session.events.HeldStep`; None if it starts from no such state.
    """

    in_worker = True

    def __init__(
        self,
        identity: Identity,
        *,
        event_queue: EventQueue,
        writer: CheckpointWriter,
        link: Link,
        codec: Codec,
        start: StartingPoint | None,
        time_before_s: float,
        seed: int | None,
        deterministic: bool,
        plan: DatasetPlan = NO_DATASETS,
        fetch: Callable[[Any], Any] = lambda block: block,
        on_report: Sequence[Callable[[dict[str, Any]], None]] = (),
        attempt: int = 1,
        iterations_before: int = 0,
        logical_workers: int | None = None,
        gather: Callable[[bytes], list[bytes] | None] = lambda payload: None,
        send_mark: Callable[[Mark], None] = lambda mark: None,
        release_start: Callable[[], None] = lambda: None,
        was_settled: bool = False,
        known_pieces: tuple[int, ...] | None = None,
    ) -> None:
        self.iterations_before = iterations_before
        self.live: LiveState | None = None
        self.live_problem: str | None = None
        self.send_mark = send_mark
        self._release_start = release_start
        self.was_settled = was_settled
        self.known_pieces = known_pieces
        self._is_state_announced = False
        self._generator_text = GeneratorText()
        self.expects_save = False
        super().__init__(
            identity,
            seed=seed,
            deterministic=deterministic,
            plan=plan,
            fetch=fetch,
            attempt=attempt,
            logical_workers=logical_workers,
        )
        self._event_queue = event_queue
        self._writer = writer
        self._link = link
        self._codec = codec
        self._gather_in_group = gather
        self._start = start
        self._on_report = on_report
        self._clock_zero = time.monotonic() - time_before_s
        self.num_reports = 0
        self._num_saves = 0
        self._num_loads = 0  # since the first save
        self._num_lists = 0
        self._barriers: dict[str, int] = {}
        self._waits_in: tuple[str, int] | None = None  # what, and since when in nanoseconds since the epoch
        self._last_metrics: dict[str, Any] | None = None
        self._saves_first = False
        self._unscored: int | None = None  # the save whose round is not reported yet
        self._ended: AttemptEnded | None = None
        self._is_closed = False
        self.stop_gate = StopGate()
        self.save_gate = SaveGate()

    # -- what train_func calls --------------------------------------------------------------------------------

    def report(self, metrics: Mapping[str, Any]) -> None:
        if self._ended is not None or self._is_closed or self._event_queue.unreadable is not None:
            self.check_live(ends_step=True)
        if self.logical is not None:
            self.logical.check_outside("report()")
        if self.stop_gate.is_closed_for_reports and not self.stop_gate.takes_report(self.num_reports):
            raise AttemptEnded("the run was asked to stop")
        copied = copy_metrics(metrics)
        if self.progress.data.seconds:
            copied[DATA_WAIT_FRACTION] = self.progress.data_wait_fraction()
        closes, self._unscored = self._unscored, None
        self._event_queue.put_report((time.time(), time.monotonic() - self._clock_zero, copied), closes)
        self.num_reports += 1
        self.progress.mark("report")
        self._last_metrics = copied
        if self._on_report:
            with self.progress.callbacks:
                for hook in self._on_report:
                    hook(copied)
        if self.save_gate.limit is not None:
            self._leave_after_last_save()

    def save_checkpoint(
        self, state: Any, *, files: bool, metrics: Mapping[str, Any] | None, all_ranks: bool, allow_pickle: bool
    ) -> None:
        self.check_live()
        if self.logical is not None:
            self.logical.check_outside("save_checkpoint()")
        self.progress.mark("save_checkpoint")
        self._unscored = None  # no report came since the previous save: that one belongs to no round
        self._leave_after_last_save()
        self.save_gate.begin()
        self.check_live()
        call, self._num_saves = self._num_saves, self._num_saves + 1
        if call == 0:
            self._saves_first = self.num_reports == 0
        has_no_files = files and all_ranks and state is None
        gives_state = (all_ranks or self.world_rank == 0) and not has_no_files
        if gives_state and state is None:
            raise CheckpointError(
                f"save_checkpoint(None) on rank {self.world_rank}: "
                + ("with all_ranks=True every rank gives its part." if all_ranks else "rank 0 must give the state.")
            )
        score = copy_metrics(metrics) if metrics is not None else None if self._saves_first else self._last_metrics
        saved = Saved(
            call=call,
            reports=self.num_reports,
            time_total_s=time.monotonic() - self._clock_zero,
            all_ranks=all_ranks,
            is_files=files,
            allow_pickle=allow_pickle,
            metrics=None,
            awaits_round=self._saves_first,
        )
        with self.progress.checkpoint:
            small = rank_state.capture(self._datasets, self.logical)
            if not gives_state:
                self._writer.save_nothing(call, small)
            elif files:
                self._writer.save_files(call, state, small)
            else:
                shared_by = self.world_size if all_ranks else None
                self._writer.save(call, state, small, allow_pickle=allow_pickle, shared_by=shared_by)
        # Only now: a state that cannot be saved has raised, and makes no checkpoint.
        self._event_queue.put_with_metrics(saved, score)
        if self._saves_first:
            self._unscored = call
        self._leave_after_last_save()

    def load_checkpoint(self, path: Any, *, allow_pickle: bool) -> Any:
        self.check_live()
        self.expects_save = self.expects_save or path is None
        if path is not None:
            folder = Storage.from_uri(Checkpoint.from_path(path).path or "")
            return load_state(
                folder, read_manifest(folder), self.world_rank, world_size=self.world_size, allow_pickle=allow_pickle
            )
        start = self._start if self._num_saves == 0 else self._newest() or self._start
        if start is None:
            return None
        on_unusable = self._report_unusable_start if start is self._start else lambda error: None
        try:
            state, small = start.load(
                self.world_rank, self.world_size, allow_pickle=allow_pickle, on_unusable=on_unusable
            )
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            on_unusable(error)
            raise
        rank_state.restore(small, self._datasets, self.logical)
        return state

    def live_state(self, objects: Mapping[str, Any]) -> LiveState:
        self.check_live()
        if self.live is not None:
            raise UsageError("live_state() was called before in this attempt: give all parts of the state to one call.")
        if self.logical is not None:
            raise UsageError("live_state() does not work with Trainer(logical_workers=...): use save_checkpoint().")
        for name, given in objects.items():
            if type(given).__name__ == "EngineOptimizer":
                raise UsageError(
                    f"live_state({name}=...) got the engine's optimizer, whose state_dict() lacks master weights: give "
                    "live_state(engine=engine), or use engine.save_checkpoint()."
                )
        self.live = LiveState(self, objects)
        return self.live

    def own_live_state(
        self, objects: Mapping[str, Any], *, has_own_state: bool = True, problem: str | None = None
    ) -> LiveState | None:
        if self.live is not None or self.logical is not None:
            return None
        if problem is None:
            live = LiveState(self, objects, has_own_state=has_own_state)
            if live.is_copied and not self._writer.is_held:
                problem = "the run keeps no copies of the state in memory (CheckpointConfig(keep_in_memory=True))"
                live.close()
            else:
                self.live = live
        self.live_problem = problem
        return self.live

    def list_checkpoints(self) -> list[Checkpoint]:
        self.check_live()
        index, self._num_lists = self._num_lists, self._num_lists + 1
        listed = self._link.list_checkpoints(index, self._num_saves)
        self.check_live()  # an attempt that has ended gets no answer
        return listed

    def should_stop(self) -> bool:
        return self.stop_gate.check() or (self._ended is not None and not self._is_in_changes)

    def wait_for_others(self) -> None:
        """Wait until every rank is about to enter train_func.

        Raises:
            AttemptEnded: A rank has died.
        """
        if self.world_size > 1:
            self.check_live()
            self._link.join_barrier("enter", 0, None)

    def barrier(self) -> None:
        self._join_barrier("barrier", None)

    def broadcast(self, obj: Any) -> Any:
        payload = self._join_barrier("broadcast", self._codec.dumps(obj) if self.world_rank == 0 else None)
        if not payload:  # no pickle is empty
            raise SessionError(
                f"broadcast() on rank {self.world_rank} has no value, because rank 0 returned without calling broadcast(). "
                "Call it on every rank, equally often."
            )
        return obj if self.world_rank == 0 else self._codec.loads(payload)

    def take(self, number: int) -> Any:
        """Wait for a piece that the driver gives to the run; every rank may take each, and again after a failure."""
        with self.progress.script:
            while True:
                self.check_live()
                self.progress.mark("take")
                if (found := self._link.take(number)) is not None:
                    return found

    def gather(self, obj: Any) -> list[Any]:
        self.check_live()
        payload = self._codec.dumps(obj)
        self.progress.mark("gather")
        if self.world_size == 1:
            return [self._codec.loads(payload)]
        with self.progress.waiting:
            by_group = self._gather_in_group(payload)
        if by_group is None:
            answer = self._join_barrier("gather", payload)
            assert answer is not None
            by_group = [each for _, each in sorted(pickle.loads(answer).items())]
        return [self._codec.loads(each) for each in by_group]

    # -- what a `LiveState` calls -----------------------------------------------------------------------------

    def own_state(self) -> bytes:
        """Return the small state that belongs to this rank alone: all but the positions that the ranks share."""
        return rank_state.capture_own(self._generator_text.read(), self._datasets)

    def held_step(self, step: int) -> HeldStep:
        """Return the record of a step that is complete now."""
        self.check_savable()
        return HeldStep(
            StepId(self.attempt, step),
            self.iterations_before + self.num_reports,
            time.monotonic() - self._clock_zero,
            self._num_saves,
            self._datasets.positions(),
        )

    def copy_to_memory(self, step: int, state: Any) -> None:
        """Copy the state after a step to the cluster's memory. All ranks call it.

        Raises:
            UsageError: Nothing is kept in memory.
        """
        if not self._writer.is_held:
            raise UsageError(
                "live_state(...): each rank holds a piece of the state that no other rank holds, and the run keeps no copies in "
                "memory: give CheckpointConfig(keep_in_memory=True), or use save_checkpoint alone."
            )
        call = StepId(self.attempt, step).copy_call
        seconds = time.monotonic() - self._clock_zero
        with self.progress.checkpoint:
            small = rank_state.capture(self._datasets)
            self._writer.save(call, state, small, allow_pickle=False, shared_by=self.world_size)
        self._event_queue.put(Saved(call, self.num_reports, seconds, True, False, False, None))

    def on_complete_step(self, *, needs_start: bool, is_whole: bool) -> None:
        """A step is complete.

        Args:
            needs_start: Some rank may still need the state that this attempt started from.
            is_whole: Each rank holds the whole state, from which a group of another size can continue.

        Raises:
            AttemptEnded: The attempt is over.
        """
        if not needs_start and not self._is_state_announced:
            self._is_state_announced = True
            self._release_start()
            if is_whole:
                self._event_queue.put(HoldsState(), urgent=True)
        self.progress.mark("live_state")
        self.check_live()

    # -- what the worker calls, from other threads ------------------------------------------------------------

    def end(self, why: str) -> None:
        """End the attempt: every later call raises `AttemptEnded`."""
        self._ended = AttemptEnded(why)
        self.stop_gate.open()
        self.save_gate.open()

    @property
    def is_ended(self) -> bool:
        return self._ended is not None

    @property
    def saw_stop(self) -> bool:
        """Whether train_func has found ``should_stop()`` true, as all ranks do at that check."""
        return self.stop_gate.was_found

    def barriers(self) -> list[tuple[str, int, int | None]]:
        """Return for ``barrier`` and ``broadcast`` how often this rank has called it, and since when it waits there.

        In nanoseconds since the epoch; None if it does not wait.
        """
        waits_in, since_ns = self._waits_in or ("", None)
        return [(what, count, since_ns if what == waits_in else None) for what, count in list(self._barriers.items())]

    def close(self) -> None:
        """Close the session, because train_func has left: every later call is an error."""
        self._is_closed = True
        if self.logical is not None:
            self.logical.kept.clear()
        self._datasets.close()

    # -- inside -----------------------------------------------------------------------------------------------

    def _leave_after_last_save(self) -> None:
        """Wait for the end of the attempt, if this rank has made the last save, and the report that belongs to it.

        A loop that saves and does not report has no such report.
        """
        limit = self.save_gate.limit
        if limit is None or self._num_saves <= limit.call:
            return
        if self._unscored is not None and (self.num_reports > 0 or self._num_saves == 1):
            return
        self._event_queue.put(limit, urgent=True)
        with self.progress.waiting:
            self.save_gate.wait(lambda: self.progress.mark("save_checkpoint"))
        self.check_live()

    @property
    def _is_in_changes(self) -> bool:
        return self.live is not None and self.live.is_changing

    def check_live(self, *, ends_step: bool = False) -> None:
        """Raise `AttemptEnded` if the attempt is over.

        Args:
            ends_step: Do not, while the changes of a step are made that the live state then holds.
        """
        if self._ended is not None and not (ends_step and self._is_in_changes):
            raise AttemptEnded(*self._ended.args)
        if self._event_queue.unreadable is not None:
            raise self._event_queue.unreadable
        if self._is_closed:
            raise SessionError(OUTLIVED)

    def _report_unusable_start(self, error: Exception) -> None:
        self._event_queue.put(StartUnusable(str(error)), urgent=True)

    def _newest(self) -> Any:
        index, self._num_loads = self._num_loads, self._num_loads + 1
        newest = self._link.newest_checkpoint(index, self._num_saves)
        self.check_live()  # an attempt that has ended gets no answer
        return newest

    def _join_barrier(self, what: str, payload: bytes | None) -> bytes | None:
        self.check_live()
        self.progress.mark(what)
        index = self._barriers.get(what, 0)
        self._barriers[what] = index + 1
        self._waits_in = what, time.time_ns()
        try:
            with self.progress.waiting:
                return self._link.join_barrier(what, index, payload)
        finally:
            self._waits_in = None
