"""The results of a run as they come. Driver side.

A reader thread receives the frames from the TrainerActor, whether or not anybody iterates: it calls the driver's callbacks,
logs the run's warnings and learns how the run ends. Frames that the user has not iterated over yet wait in a bounded buffer.
What does not fit stays in the TrainerActor's journal and is fetched when the iteration gets there.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError, RayTaskError

from raysgd._util.logs import get_logger
from raysgd._util.tracebacks import leaves_raysgd, prepare_for_user
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.controller import frames
from raysgd.controller.commands import StopRequested
from raysgd.controller.frames import Frame
from raysgd.controller.journal.callback_reader import CallbackReader, describe_started, warning_in
from raysgd.controller.journal.outcome import outcome_error
from raysgd.controller.rounds import Reduce, RoundMerger
from raysgd.errors import MissingMetricError, RaySGDError, RunCancelledError, TrainerClosedError, WorkerError
from raysgd.goodput.ledger import Ledger, now_event
from raysgd.result import Event, Result, RunInfo
from raysgd.trainer.channel import CLUSTER_IS_GONE, Channel, ReturnedValues
from raysgd.trainer.last_words import LastWords
from raysgd.workers.liveness.death_reasons import explain_failed_start

#: Frames held for an iteration that is behind.
BUFFER_BYTES = 64 << 20
#: Marks the warnings of a driver's callbacks, which the driver has logged itself.
_SOURCE = "driver"
#: A warning of the last minute is about what happens now, and not one of a run that is read once more.
_NEW_S = 60.0
#: Samples of a rank that the ledger of a driver keeps: what is left out changes no sum, only when it was.
_MAX_READINGS = 16
#: What an iteration needs to see.
_OF_ROUNDS = {
    frames.ATTEMPT,
    frames.REPORTS,
    frames.RANK_DONE,
    frames.ATTEMPT_END,
    frames.RUN_END,
    frames.RUN_CLOSED,
}


class ResultStream:
    """The results of a run, in order, each once; also for ``async for``.

    Leaving the loop does not stop the run; `cancel` does. The iteration raises an exception of the run after the results that
    came before it; `get_returns` raises it too.

    Attributes:
        run_dir: The run's folder; None before the run has begun.
        run_info: The description of the run. Its list ``warnings`` grows during the run.
    """

    def __init__(
        self,
        channel: Channel,
        run_id: str,
        *,
        reduce: Reduce,
        returns: str,
        make_reader: Callable[[ResultStream], CallbackReader | None] = lambda stream: None,
        buffer_bytes: int = BUFFER_BYTES,
        from_iteration: int = 0,
        lease: object = None,
        info: RunInfo | None = None,
        logs_warnings: bool = True,
    ) -> None:
        """Begin to read a run.

        Args:
            channel: The channel to the TrainerActor.
            run_id: The run.
            reduce: As for `raysgd.Trainer.run`.
            returns: As for `raysgd.Trainer.run`.
            make_reader: Makes what calls the callbacks of this process, or returns None.
            buffer_bytes: Size of the frames held for an iteration that is behind.
            from_iteration: The ``training_iteration`` of the first result.
            lease: Held as long as this stream: the workers are not released meanwhile.
            info: What is known of the run before it begins.
            logs_warnings: Whether to log the run's warnings; one stream of a process does.
        """
        self._channel = channel
        self._lease = lease  # the workers are not released while this is held: see `raysgd.trainer.run_manager.Lease`
        self._run_id = run_id
        self._returns = returns
        self._from_iteration = from_iteration
        self._merger = RoundMerger(reduce)
        self._results: deque[Result] = deque()
        self._buffer = _Buffer(buffer_bytes)
        self._changed = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._outcome: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._is_error_of_outcome = False
        self._is_cancelled = False
        self._is_closed = False
        self._is_iterated = False
        self._checkpoints: dict[int, Checkpoint] = {}
        self._saving: set[int] = set()
        self._rounds: dict[int, int] = {}
        self._values: ReturnedValues | None = None
        self._values_lost: WorkerError | None = None
        self.run_dir: str | None = None
        ledger = Ledger(max_readings=_MAX_READINGS)

        def read_goodput() -> float | None:
            if thread.is_alive():  # the run may be live, and have no event now
                ledger.add(now_event())
            return ledger.goodput()

        self.run_info = replace(RunInfo("", "", {}, 0, "") if info is None else info, read_goodput=read_goodput)
        log = _WarningLog(channel, run_id, self.run_info.warnings, is_logged=logs_warnings)
        self.warn = log.add
        reader = make_reader(self)
        log.has_callbacks = reader is not None
        # It refers to this object weakly: a stream that nobody holds any more does not live on in its thread.
        arguments = (weakref.ref(self), channel, run_id, reader, log, ledger)
        self._thread = thread = threading.Thread(target=_read, args=arguments, name="raysgd-reader", daemon=True)
        thread.start()

    # -- for the user ---------------------------------------------------------------------------------------------

    def __iter__(self) -> ResultStream:
        return self

    def __next__(self) -> Result:
        if self._results:  # most calls: a batch brings many
            return self._results.popleft()
        try:
            while (result := self._take()) is None:
                if self._is_iterated:
                    raise StopIteration
                if self._buffer.is_behind:
                    self._catch_up()
                    continue
                with self._changed:
                    if not self._has_more():
                        self._changed.wait()
            return result
        except BaseException as error:
            del self  # an interrupted loop must not hold the run
            prepare_for_user(error)
            raise

    def __aiter__(self) -> ResultStream:
        return self

    async def __anext__(self) -> Result:
        while (result := self._take()) is None:
            if self._is_iterated:
                raise StopAsyncIteration
            if self._buffer.is_behind:
                await asyncio.to_thread(self._catch_up)  # it waits for the TrainerActor, which the loop must not
            else:
                await self._wait_async()
        return result

    def is_finished(self) -> bool:
        """Return whether the run has ended and every result was taken."""
        return self._outcome is not None and self._is_iterated and not self._results

    @leaves_raysgd
    def get_returns(self) -> Any:
        """Wait for the end of the run and return what train_func returned (``returns="all"``: the list by rank).

        Raises:
            Exception: What train_func raised, as its own type.
            RunCancelledError: The run was cancelled.
            WorkerError: The run was lost, or what train_func returned was.
        """
        self.wait()
        if self._error is not None:
            raise self._take_error()
        if self._values_lost is not None:
            raise self._values_lost
        assert self._values is not None
        return self._open_values(self._values)

    def cancel(self, why: str = "ResultStream.cancel() was called") -> None:
        """Request the end of the run; returns at once. Its checkpoints stay.

        Args:
            why: The reason that the run's files have.
        """
        self._is_cancelled = True
        self._channel.stop(self._run_id, StopRequested(why, cancel=True))

    def __repr__(self) -> str:
        state = "running" if self._outcome is None else self._outcome["kind"]
        return f"ResultStream({self.run_dir or 'starting'}, {state})"

    # -- for the Trainer ------------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether the run's outcome is still open."""
        return self._outcome is None

    def wait(self) -> None:
        """Wait for the outcome; for a success also until everything is durable and the callbacks have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._outcome is not None and (self._error is not None or self._is_closed))

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until the run is closed: nothing of it continues. Return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed, timeout_s)

    def wait_save_or_next(self, iteration: int, timeout_s: float) -> None:
        """Wait until a save of this round has begun, or the next result or the end is there."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    bool(self._results) or self._has_more() or max(list(self._rounds.values()), default=0) >= iteration
                ),
                timeout_s,
            )

    def wait_saved(self, numbers: Collection[int], timeout_s: float) -> None:
        """Wait until these checkpoints are on storage or have failed, or the run is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._saving.isdisjoint(numbers), timeout_s)

    @property
    def saving(self) -> dict[int, int]:
        """The checkpoints that are being saved: their rounds, by number."""
        rounds = self.rounds
        return {number: rounds[number] for number in list(self._saving)}

    @property
    def rounds(self) -> dict[int, int]:
        """The rounds that checkpoints belong to, by number; also of checkpoints that are being saved."""
        return dict(self._rounds)

    def stop(self, why: str, error: BaseException | None = None, grace_s: float | None = None) -> None:
        """End the run.

        Args:
            why: The reason, for the user.
            error: The error of a callback: the run ends at once, and with it.
            grace_s: As for `raysgd.controller.commands.StopRequested`.
        """
        if error is not None:
            self._error = error
        self._channel.stop(self._run_id, StopRequested(why, cancel=error is not None, grace_s=grace_s))

    def give(self, number: int, piece: Any, kept_from: int) -> None:
        """Give a piece to the workers, which take it by its number.

        Args:
            number: Its number.
            piece: The pickle of it, or a reference to that.
            kept_from: The lowest number that workers may take again after a failure.

        Raises:
            WorkerError: The TrainerActor is gone.
        """
        self._channel.give(self._run_id, number, [piece], kept_from)

    @property
    def is_drained(self) -> bool:
        """Whether the run is closed and every result was taken."""
        with self._changed:
            return self._is_closed and not self._results and not self._buffer.has_results

    @property
    def error(self) -> BaseException | None:
        """The exception that `get_returns` raises, or None."""
        return self._error

    @property
    def checkpoints(self) -> dict[int, Checkpoint]:
        """The checkpoints of the run that are on storage, by number."""
        return dict(self._checkpoints)

    def forget_checkpoint(self, number: int) -> None:
        """Forget a checkpoint that was deleted after the end of the run."""
        self._checkpoints.pop(number, None)

    # -- the reader thread ----------------------------------------------------------------------------------------

    def _add(self, batch: list[Frame]) -> None:
        """Take a batch of frames that `_update` has seen."""
        is_closed = any(frame.kind == frames.RUN_CLOSED for frame in batch)
        if is_closed and self._error is None:  # now: the Trainer may do another run before they are asked for
            try:
                self._values = self._channel.values(self._run_id, first_only=self._returns == "first")
            except WorkerError as error:
                self._values_lost = error
        with self._changed:
            for frame in batch:
                self._buffer.add(frame)
            if is_closed:
                self._is_closed = True
            self._wake()

    def _close(self) -> None:
        """Note that nothing more is received."""
        with self._changed:
            self._is_closed = True
            self._wake()
        self._drop_lease()

    def _drop_lease(self) -> None:
        """Let the workers be released, unless frames of the run must still be fetched."""
        if self._is_closed and not self._buffer.is_behind:
            self._lease = None

    def _update(self, frame: Frame) -> None:
        """Update what the stream knows of the run by a frame other than reports."""
        data = frame.data
        if frame.kind == frames.RUN_END:
            self._end(data)
        elif frame.kind == frames.ATTEMPT:
            self._saving.clear()
        elif frame.kind == frames.SAVING:
            self._rounds[data["number"]] = data["iteration"]
            self._saving.add(data["number"])
        elif frame.kind == frames.NOT_SAVED:
            self._saving.discard(data["number"])
        elif frame.kind in (frames.CHECKPOINT, frames.CHECKPOINT_SCORED):
            self._saving.discard(data["number"])
            self._checkpoints[data["number"]] = Checkpoint(data["uri"], data["metrics"], data["iteration"])
        elif frame.kind == frames.CHECKPOINT_DELETED:
            self._checkpoints.pop(data["number"], None)
        elif frame.kind == frames.EVENT and data["kind"] == "run_start":
            self.run_info = describe_started(self.run_info, Event(**data))
            self.run_dir = self.run_info.run_dir

    def _open_values(self, values: ReturnedValues) -> Any:
        opened = values.open()
        return opened[0] if self._returns == "first" else opened

    def _make_error(self, data: dict[str, Any]) -> BaseException | None:
        """Return a new object of the error that an outcome means, or None."""
        error = outcome_error(data)
        if isinstance(error, MissingMetricError):  # training itself has succeeded
            with contextlib.suppress(Exception):  # the values are lost, or cannot be unpickled here
                if self._values is None:
                    self._values = self._channel.values(self._run_id, first_only=self._returns == "first")
                error.returned = self._open_values(self._values)
        return error

    def _end(self, data: dict[str, Any]) -> None:
        error = self._make_error(data)
        with self._changed:
            if self._error is None:
                self._error, self._is_error_of_outcome = error, error is not None
            self._outcome = data
            self._wake()

    def _lost(self, error: BaseException) -> None:
        with self._changed:
            is_cancelled = self._outcome is None and self._is_cancelled
            self._error = self._error or (RunCancelledError("the run was cancelled") if is_cancelled else error)
            self._outcome = self._outcome or {"kind": "error"}
            self._buffer.frames.append(Frame(-1, frames.RUN_END, 0))

    def _wake(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            loop.call_soon_threadsafe(_set_done, future)

    # -- the iterating thread -------------------------------------------------------------------------------------

    def _take(self) -> Result | None:
        """Return the next result that is here, or None. Raises the run's error after its last result."""
        while not self._results:
            if self._is_iterated:
                return None
            with self._changed:
                if not self._buffer.frames:
                    return None
                frame = self._buffer.pop()
            found = self._merger.feed(frame)
            self._results.extend(result for result in found if result["training_iteration"] >= self._from_iteration)
            # An error is raised at once; a success is one when the callbacks had their end.
            if frame.kind == frames.RUN_CLOSED or (frame.kind == frames.RUN_END and self._error is not None):
                self._finish()
        return self._results.popleft()

    def _finish(self) -> None:
        self._is_iterated = True
        if self._error is not None and not (self._is_cancelled and isinstance(self._error, RunCancelledError)):
            raise self._take_error()

    def _take_error(self) -> BaseException:
        """Return the run's error to raise it, and keep another object of it.

        A raised error refers to the frames that it passes, and through them to the Trainer and this stream.
        """
        assert self._error is not None
        error = self._error
        if self._is_error_of_outcome and self._outcome is not None:
            self._error = self._make_error(self._outcome)
        return error

    def _catch_up(self) -> None:
        """Fetch frames that were not buffered."""
        fetched = self._channel.frames(self._run_id, self._buffer.next_seq)
        with self._changed:
            self._buffer.add_fetched(fetched)
        self._drop_lease()

    def _has_more(self) -> bool:
        return bool(self._buffer.frames) or self._buffer.is_behind or self._is_iterated

    async def _wait_async(self) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._changed:
            if self._has_more():
                return
            self._waiters.append((loop, future))
        await future


class _WarningLog:
    """The warnings of a run, in one process: each is kept and logged once. It lives as long as the reader thread.

    Args:
        kept: Where to keep their texts.
        is_logged: Whether to log them.

    Attributes:
        has_callbacks: Whether callbacks of the run are called here; their warnings come back from the TrainerActor, too.
    """

    def __init__(self, channel: Channel, run_id: str, kept: list[str], *, is_logged: bool) -> None:
        self._channel = channel
        self._run_id = run_id
        self._kept = kept
        self._is_logged = is_logged
        self.has_callbacks = False
        self._last_words: LastWords | None = None

    def add(self, message: str) -> None:
        """Add a warning of a callback in this process, also to the run's files, and even after the end of the run."""
        self._keep(message)
        self._channel.warn(self._run_id, message, _SOURCE)

    def take(self, frame: Frame) -> None:
        """Take the next event of the run."""
        warning = warning_in(frame)
        if warning is not None and not (self.has_callbacks and frame.data["data"].get("source") == _SOURCE):
            self._keep(warning)
        run_dir = None if warning is None else frame.data["data"].get("run_dir")  # Ray may be about to end this process
        if run_dir and self._last_words is None and time.time() - frame.data["timestamp"] < _NEW_S:
            self._last_words = LastWords(run_dir)

    def close(self) -> None:
        """Nothing more comes, and this process knows it."""
        if self._last_words is not None:
            self._last_words.withdraw()

    def _keep(self, message: str) -> None:
        self._kept.append(message)
        if self._is_logged:
            get_logger().warning(message)


def _read(  # noqa: C901  (each frame goes to three that may be missing)
    stream_of: Callable[[], ResultStream | None],
    channel: Channel,
    run_id: str,
    reader: CallbackReader | None,
    log: _WarningLog,
    ledger: Ledger,
) -> None:
    """Receive the frames of a run, for the callbacks and for its stream, which is None once nobody holds it any more."""
    problem: BaseException | None = None
    try:
        for batch in channel.stream(run_id):
            stream = stream_of()
            for frame in batch:
                if frame.kind == frames.EVENT:
                    log.take(frame)
                    ledger.add(Event(**frame.data))
                if stream is not None and frame.kind != frames.REPORTS:
                    stream._update(frame)
                if reader is not None:
                    reader.feed(frame)
            if stream is not None:
                stream._add(batch)
            del stream  # or it would live on while this thread waits
    except Exception as error:  # also a bug: the user must not wait for ever
        problem = _explain(error, channel, getattr(stream_of(), "run_dir", None))
    log.close()
    stream = stream_of()
    if stream is not None and problem is not None and not stream._is_closed:
        stream._lost(problem)
    if reader is not None:
        reader.end(problem if stream is None else stream.error)
    if stream is not None:
        stream._close()


def _explain(error: Exception, channel: Channel, run_dir: str | None) -> BaseException:
    """Return what to raise for an error of the TrainerActor, or of the way to it."""
    if channel.has_lost_cluster:
        return TrainerClosedError(CLUSTER_IS_GONE)
    if isinstance(error, RayTaskError):  # the run could not even be made
        return error.cause if isinstance(error.cause, RaySGDError) else error
    if isinstance(error, RayError):
        how = "" if run_dir is None else f"; raysgd.Trainer.restore({run_dir!r}) resumes it from its newest checkpoint"
        lost = f"the Trainer's controller process is gone, and the run with it{how}: {error}"
        return WorkerError(explain_failed_start(error) or lost)
    return error


class _Buffer:
    """The frames that wait for the iteration, up to some bytes. Used under the lock of the stream.

    When it is full, the iteration is behind: nothing is added until the iteration has fetched all frames that were received
    meanwhile. Then the next ones are added again.

    Attributes:
        frames: The frames, oldest first.
        next_seq: The number of the next frame to add.
        is_behind: Whether frames are missing that were received.
    """

    def __init__(self, max_bytes: int) -> None:
        self.frames: deque[Frame] = deque()
        self.next_seq = 0
        self.is_behind = False
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._last_seen_seq = -1

    def add(self, frame: Frame) -> None:
        """Add a frame that was received, unless the iteration does not need it or is behind."""
        self._last_seen_seq = frame.seq
        if frame.kind not in _OF_ROUNDS or self.is_behind or frame.seq < self.next_seq:
            return
        if self._num_bytes > self._max_bytes:
            self.is_behind = True
            return
        self.frames.append(frame)
        self._num_bytes += frame.size_bytes
        self.next_seq = frame.seq + 1

    def add_fetched(self, fetched: list[Frame]) -> None:
        for frame in fetched:
            if frame.seq < self.next_seq:  # of another fetch, whose task was cancelled
                continue
            self.next_seq = frame.seq + 1
            if frame.kind in _OF_ROUNDS:
                self.frames.append(frame)
                self._num_bytes += frame.size_bytes
        self.is_behind = self.next_seq <= self._last_seen_seq

    def pop(self) -> Frame:
        """Return the oldest frame."""
        frame = self.frames.popleft()
        self._num_bytes -= frame.size_bytes
        return frame

    @property
    def has_results(self) -> bool:
        """Whether results are still to come out of these frames."""
        return self.is_behind or any(frame.kind in (frames.REPORTS, frames.ATTEMPT_END) for frame in self.frames)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
