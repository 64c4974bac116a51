"""The session of one attempt in a worker process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raysgd.data.plan import NO_DATASETS, DatasetPlan
from raysgd.errors import (
    AttemptEnded,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    SessionError,
)
from raysgd.result import DATA_WAIT_FRACTION
from raysgd.session import rank_state
from raysgd.session.base import Identity, Session
from raysgd.session.context import LEFT_BEHIND
from raysgd.session.events import AtSavePoint, Saved, Scored, StartUnusable
from raysgd.session.metrics import copy_metrics
from raysgd.session.outbox import Outbox
from raysgd.session.savegate import SaveGate
from raysgd.session.saving import CheckpointWriter
from raysgd.session.stopping import StopGate


class Link(Protocol):
    """What a session asks of its controller. Each call waits for the answer and may raise `AttemptEnded`."""

    def meet(self, what: str, index: int, payload: bytes | None) -> bytes | None:
        """Wait until every rank that has not returned came to the ``index``-th meeting of kind ``what``.

        Returns rank 0's payload; empty where rank 0 was not there.
        """

    def newest_checkpoint(self, index: int, num_saves: int) -> Any:
        """The newest committed checkpoint of the run, as `StartingPoint.load` takes it, or None.

        All ranks get the same answer to their ``index``-th question, for which each has saved ``num_saves`` times.
        """


class StartingPoint(Protocol):
    """The state an attempt starts from."""

    def load(
        self, rank: int, world_size: int, *, trusted: bool, on_unusable: Callable[[Exception], None]
    ) -> tuple[Any, dict[str, Any]]:
        """This rank's state, and its small state (generators, data position; may be empty).

        ``on_unusable`` is told of what is found wrong when an array of the state is read, later.
        """


@dataclass(frozen=True)
class Codec:
    """How objects cross to other ranks: the worker gives pickling, so that this layer needs none of its own."""

    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]


class WorkerSession(Session):
    """One attempt, seen from train_func. See `Session` for the threads that may call what.

    Args:
        broken_group: What train_func expects of a broken group, where it can get over that; see `Backend.broken_group`.

    Attributes:
        iterations_before: Rounds of the run before it.
    """

    in_worker = True

    def __init__(
        self,
        identity: Identity,
        *,
        outbox: Outbox,
        writer: CheckpointWriter,
        link: Link,
        codec: Codec,
        start: StartingPoint | None,
        load_path: Callable[[Any, int, int, bool], Any],
        time_before_s: float,
        seed: int | None,
        deterministic: bool,
        plan: DatasetPlan = NO_DATASETS,
        fetch: Callable[[Any], Any] = lambda block: block,
        on_report: Sequence[Callable[[dict[str, Any]], None]] = (),
        attempt: int = 1,
        iterations_before: int = 0,
        broken_group: Callable[[str], BaseException | None] = lambda why: None,
    ) -> None:
        self.iterations_before = iterations_before
        super().__init__(identity, seed=seed, deterministic=deterministic, plan=plan, fetch=fetch, attempt=attempt)
        self._outbox = outbox
        self._writer = writer
        self._link = link
        self._codec = codec
        self._start = start
        self._load_path = load_path
        self._on_report = on_report
        self._broken_group = broken_group
        self._clock_zero = time.monotonic() - time_before_s
        self._num_reports = 0
        self._num_saves = 0
        self._num_loads = 0  # since the first save
        self._meetings: dict[str, int] = {}
        self._last_metrics: dict[str, Any] | None = None
        self._saves_first = False
        self._unscored: tuple[int, bool] | None = None  # a save whose round is to come; whether that scores it
        self._ended: BaseException | None = None
        self._is_closed = False
        self._gate = StopGate()
        self._save_gate = SaveGate()

    # -- what train_func calls --------------------------------------------------------------------------------

    def report(self, metrics: Mapping[str, Any]) -> None:
        if self._ended is not None or self._is_closed or self._outbox.unreadable is not None:
            self._check_live()
        if self._gate.is_closed_for_reports and not self._gate.takes_report(self._num_reports):
            raise AttemptEnded("the run was asked to stop")
        copied = copy_metrics(metrics)
        if (share := self.progress.data_wait_fraction()) is not None:
            copied[DATA_WAIT_FRACTION] = share
        self._outbox.put_report((time.time(), time.monotonic() - self._clock_zero, copied))
        self._num_reports += 1
        self.progress.mark("report")
        self._last_metrics = copied
        if self._unscored is not None:
            self._score(copied)
        for hook in self._on_report:
            hook(copied)
        if self._save_gate.last_save is not None:
            self._leave_after_last_save()

    def save_checkpoint(
        self, state: Any, *, files: bool, metrics: Mapping[str, Any] | None, all_ranks: bool, trusted: bool
    ) -> None:
        self._check_live()
        self.progress.mark("save_checkpoint")
        self._unscored = None  # no report came since the save before: it belongs to no round
        self._leave_after_last_save()
        self._save_gate.begin()
        self._check_live()
        call, self._num_saves = self._num_saves, self._num_saves + 1
        if call == 0:
            self._saves_first = self._num_reports == 0
        gives_state = all_ranks or self.world_rank == 0
        if gives_state and state is None:
            raise CheckpointError(
                f"save_checkpoint(None) on rank {self.world_rank}, whose state it is; "
                + ("with all_ranks=True every rank gives its part." if all_ranks else "rank 0 gives the state.")
            )
        saved, score = self._describe_save(call, files, metrics, all_ranks, trusted)
        with self.progress.checkpoint:
            small = rank_state.capture(self._datasets)
            if not gives_state:
                self._writer.save_nothing(call, small)
            elif files:
                self._writer.save_files(call, state, small)
            else:
                shared_by = self.world_size if all_ranks else None
                self._writer.save(call, state, small, trusted=trusted, shared_by=shared_by)
        # Only now: a state that cannot be saved has raised, and makes no checkpoint.
        self._outbox.put_with_metrics(saved, score)
        if self._saves_first:
            self._unscored = call, metrics is None
        self._leave_after_last_save()

    def load_checkpoint(self, path: Any, *, trusted: bool) -> Any:
        self._check_live()
        if path is not None:
            return self._load_path(path, self.world_rank, self.world_size, trusted)
        start = self._start if self._num_saves == 0 else self._newest() or self._start
        if start is None:
            return None
        tell = self._tell_of_start if start is self._start else _nothing
        try:
            state, small = start.load(self.world_rank, self.world_size, trusted=trusted, on_unusable=tell)
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            tell(error)
            raise
        rank_state.restore(small, self._datasets)
        return state

    def should_stop(self) -> bool:
        is_found = self._gate.look()
        if self._ended is not None and not isinstance(self._ended, AttemptEnded):
            self._check_live()  # train_func gets over the attempt's end, and is not to be left for it
        return is_found or self._ended is not None

    def wait_for_others(self) -> None:
        """Wait until every rank is about to enter train_func.

        Raises:
            AttemptEnded: One of them has died.
        """
        if self.world_size > 1:
            self._check_live()
            self._link.meet("enter", 0, None)

    def barrier(self) -> None:
        self._meet("barrier", None)

    def broadcast(self, obj: Any) -> Any:
        payload = self._meet("broadcast", self._codec.dumps(obj) if self.world_rank == 0 else None)
        if not payload:  # no pickle is empty
            raise SessionError(
                f"broadcast() on rank {self.world_rank} gives what rank 0 has, but rank 0 has returned without calling it; "
                "a rank that has returned is not waited for. Every rank calls it, equally often."
            )
        return obj if self.world_rank == 0 else self._codec.loads(payload)

    # -- what the worker calls, from other threads ------------------------------------------------------------

    def hold(self) -> tuple[int, int]:
        """How many times this rank looked at `should_stop` and reported; it waits at the next of either."""
        return self._gate.hold(self._num_reports)

    def stop_from(self, look: int, last_report: int | None) -> None:
        """The stop all ranks agreed on; see `StopGate`."""
        self._gate.release(look, last_report)

    def hold_saves(self) -> int:
        """How many saves this rank has begun; it waits at the next."""
        return self._save_gate.hold()

    def leave_after(self, last_save: int | None) -> None:
        """The save all ranks agreed to leave after; see `SaveGate`."""
        self._save_gate.release(last_save)

    def end(self, why: str, error: BaseException | None = None) -> None:
        """End the attempt: every later call raises `AttemptEnded`, or ``error`` where that is given."""
        self._ended = error or AttemptEnded(why)
        self._gate.open()
        self._save_gate.open()

    @property
    def iteration(self) -> int:
        return self.iterations_before + self._num_reports

    def hand_on(self) -> None:
        self._check_live()
        self._outbox.hand_on()

    @property
    def num_reports(self) -> int:
        """Reports made so far in this attempt."""
        return self._num_reports

    @property
    def is_ended(self) -> bool:
        return self._ended is not None

    @property
    def saw_stop(self) -> bool:
        """Whether train_func has found ``should_stop()`` true, as all ranks do at that look."""
        return self._gate.was_found

    def close(self) -> None:
        """train_func has left: every later call is an error."""
        self._is_closed = True
        self._datasets.close()

    # -- inside -----------------------------------------------------------------------------------------------

    def _leave_after_last_save(self) -> None:
        """Wait for the end, if this rank has made the save that all leave after, and the round that belongs to it.

        In a loop that saves and does not report there is no such round.
        """
        last_save = self._save_gate.last_save
        if last_save is None or self._num_saves <= last_save:
            return
        if self._unscored is not None and (self._num_reports > 0 or self._num_saves == 1):
            return
        self._outbox.put(AtSavePoint(last_save), urgent=True)
        with self.progress.waiting:
            self._save_gate.wait(lambda: self.progress.mark("save_checkpoint"))
        self._check_live()

    def _check_live(self) -> None:
        if self._ended is not None:
            raise type(self._ended)(*self._ended.args)
        if self._outbox.unreadable is not None:
            raise self._outbox.unreadable
        if self._is_closed:
            raise SessionError(LEFT_BEHIND)

    def _describe_save(
        self,
        call: int,
        files: bool,
        metrics: Mapping[str, Any] | None,
        all_ranks: bool,
        trusted: bool,
    ) -> tuple[Saved, dict[str, Any] | None]:
        """What there is to say of a save, and the metrics that go with it."""
        score = copy_metrics(metrics) if metrics is not None else None if self._saves_first else self._last_metrics
        saved = Saved(
            call=call,
            reports=self._num_reports,
            time_total_s=time.monotonic() - self._clock_zero,
            all_ranks=all_ranks,
            is_files=files,
            trusted=trusted,
            metrics=None,
        )
        return saved, score

    def _tell_of_start(self, error: Exception) -> None:
        self._outbox.put(StartUnusable(str(error)), urgent=True)

    def _newest(self) -> Any:
        index, self._num_loads = self._num_loads, self._num_loads + 1
        newest = self._link.newest_checkpoint(index, self._num_saves)
        self._check_live()  # an attempt that has ended gets no answer
        return newest

    def _score(self, metrics: dict[str, Any]) -> None:
        assert self._unscored is not None
        (call, is_score), self._unscored = self._unscored, None
        scored = Scored(call, None, time.monotonic() - self._clock_zero)
        self._outbox.put_with_metrics(scored, metrics if is_score else None)

    def _meet(self, what: str, payload: bytes | None) -> bytes | None:
        self._check_live()
        self.progress.mark(what)
        index = self._meetings.get(what, 0)
        self._meetings[what] = index + 1
        with self.progress.waiting:
            try:
                return self._link.meet(what, index, payload)
            except AttemptEnded as ended:  # before this rank was told of it
                raise self._broken_group(str(ended)) or ended from None


def _nothing(error: Exception) -> None:
    pass
