"""One attempt in a worker: what it begins and ends with, and the stream of what train_func does in it. Worker side."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raysgd._util.redact import redact_text, secret_values
from raysgd.backends.base import Backend
from raysgd.errors import AttemptEnded, TrainFuncError
from raysgd.session import context
from raysgd.session.events import Ended, Entered, Failed, Parked, Preempted, Returned, Sample, Warned, WorkerEvent
from raysgd.session.outbox import Outbox
from raysgd.session.progress import Pulse
from raysgd.session.saving import CheckpointWriter
from raysgd.session.worker import WorkerSession
from raysgd.workers import entry
from raysgd.workers.entry import Entry
from raysgd.workers.orders import AttemptOrder, RunOrder
from raysgd.workers.pickling import dumps, dumps_error
from raysgd.workers.returned import check_returned, dumps_returned, user_part
from raysgd.workers.sampler import SAMPLE_INTERVAL_S, Sampler
from raysgd.workers.worker_callbacks import WorkerCallbacks

#: Return values above this travel as an item of their own, which the controller hands on without looking.
MAX_INLINE_BYTES = 64 * 1024
#: What an item of a Ray stream costs the controller, in messages over a connection.
RAY_ITEM_COST = 5
#: Seconds a thread has to leave an ended attempt by itself, as by the error of the collective it is in, which is worth
#: telling; then it is interrupted.
INTERRUPT_AFTER_S = 0.1


class Attempt:
    """One attempt of train_func's. `events` is drained by the stream's thread; `end`, `stop_from` and the like come from others.

    Args:
        entry: train_func, which is entered for the attempt, or goes on in it.
        code: ``train_func`` and its ``config``, this attempt's own copies.
        session: What train_func's calls act on.
        callbacks: Callbacks that run in workers.
        on_resize: Gives the user's ``on_resize``.

    Attributes:
        is_preempted: The process was told to end.
        has_returned: train_func has returned: the process is still in its group, since others may need it there.
    """

    def __init__(
        self,
        run: RunOrder,
        order: AttemptOrder,
        *,
        entry: Entry,
        code: Callable[[], tuple[Callable[..., Any], Any]],
        backend: Backend,
        session: WorkerSession,
        outbox: Outbox,
        writer: CheckpointWriter,
        callbacks: WorkerCallbacks,
        node: str,
        on_resize: Callable[[], Callable[[Any, int], Any]] | None = None,
    ) -> None:
        self.number = order.attempt
        self.is_preempted = False
        self.has_returned = False
        self._run = run
        self._order = order
        self._entry = entry
        self._code = code
        self._backend = backend
        self._session = session
        self._outbox = outbox
        self._writer = writer
        self._callbacks = callbacks
        self._node = node
        self._on_resize = on_resize
        self._in_setup = False
        self._done = threading.Event()
        self._large_value: bytes | None = None
        self._secrets: frozenset[str] = frozenset()

    # -- the stream's thread ----------------------------------------------------------------------------------

    def events(self) -> Iterator[Any]:
        """Batches of events, as they come; after a batch that ends in ``Returned(None, ...)`` the value, as an array."""
        member = self._order.member
        sampler = Sampler({"rank": member.rank, "node": self._node, "run": self._run.info.name})
        self._entry.begin(self)
        while True:
            was_done = self._done.is_set()
            batch = self._outbox.drain(0 if was_done else SAMPLE_INTERVAL_S)
            if was_done and not batch:
                break
            if sampler.due():
                batch.append(Sample(sampler.sample(self._session.num_reports)))
            if batch:
                yield batch
        if self._large_value is not None:
            import numpy as np

            yield np.frombuffer(self._large_value, np.uint8)

    # -- other threads ----------------------------------------------------------------------------------------

    def end(self, why: str, *, goes_on: bool = False) -> None:
        """End the attempt: the next session call raises, and a Python loop is interrupted where it stands.

        Args:
            why: For the error's text.
            goes_on: There will be another one. Where train_func can get over that, it is not interrupted, and its session calls
                raise what it expects of a broken group.
        """
        error = self._backend.broken_group(why) if goes_on else None
        self._session.end(why, error)
        self._backend.abort()
        if error is not None:
            return
        if not goes_on:
            self._entry.let_go(why)
        if not self._done.wait(INTERRUPT_AFTER_S):
            self._entry.interrupt(self)

    def go_through_ray(self, problem: str | None) -> None:
        """Events cost the controller ten times as much from now on: make fewer, larger batches."""
        self._outbox.flush_interval_s *= RAY_ITEM_COST
        if problem is not None:
            self._outbox.put(Warned(problem))

    def payloads(self) -> Iterator[Any]:
        """What this rank saves, as arrays of bytes: a stream of its own."""
        return self._writer.payloads()

    def pulse(self) -> Pulse:
        """How far train_func has come."""
        return self._session.progress.pulse(is_inside=self._entry.is_inside(self), has_gpu=self._order.member.has_gpu)

    def hold(self) -> tuple[int, int]:
        return self._session.hold()

    def stop_from(self, look: int, last_report: int | None) -> None:
        self._session.stop_from(look, last_report)

    def preempt(self, why: str) -> bool:
        """Tell the controller that this process was told to end; False where it has been told before.

        Called by a signal's handler: it takes no lock that the main thread could hold.
        """
        if self.is_preempted:
            return False
        self.is_preempted = True
        self._outbox.put(Preempted(why), urgent=True)
        return True

    def hold_saves(self) -> int:
        return self._session.hold_saves()

    def leave_after(self, last_save: int | None) -> None:
        self._session.leave_after(last_save)

    # -- train_func's thread ------------------------------------------------------------------------------------

    def open(self) -> tuple[Callable[..., Any], Any]:
        """``train_func`` and its ``config``."""
        function, config = self._code()
        self._secrets = frozenset(secret_values(config))
        return function, config

    def go_on_from(self, before: Attempt) -> None:
        """In place of `open`, where train_func was entered in an attempt before."""
        self._secrets = before._secrets

    def join_group(self) -> None:
        """Join the group, and become what train_func's calls act on."""
        if self._backend.waits_for_members:
            self._session.wait_for_others()
        self._in_setup = True
        self._backend.set_up(self._order.member)
        self._in_setup = False
        context.install(self._session)
        self._callbacks.start()
        self._tell_resize()

    def check_live(self) -> None:
        """Raises `AttemptEnded` if it is over."""
        if self._session.is_ended:
            raise AttemptEnded("the attempt ended before train_func was entered")

    def entered(self) -> None:
        """train_func runs."""
        self._session.progress.enter()
        self.tell(Entered(time.time()))

    def tell(self, event: WorkerEvent) -> None:
        """The controller hears of it at once."""
        self._outbox.put(event, urgent=True)

    def is_left_by(self, error: BaseException) -> bool:
        """Whether the exception is the attempt's end in another guise."""
        return self._session.is_ended and _tells_of_the_end(error)

    def drop(self, error: BaseException | None) -> None:
        """train_func has left with ``error``, or without one."""
        if not self._done.is_set():  # it may have left the attempt before
            self._callbacks.end(error)

    def finish(self, outcome: Returned | Ended | Failed | Parked, before: Sequence[threading.Thread] = ()) -> None:
        """The end of all that the attempt does in this thread, and of its stream.

        Args:
            outcome: How train_func left, if it has not been told yet.
            before: The threads there were before train_func was entered, if it has been left for good.
        """
        if before:
            context.leave_behind(before)
        if self._done.is_set():  # train_func had left it for one that did not come
            return
        self.has_returned = isinstance(outcome, Returned)
        if not self.has_returned:
            self._leave_group()
        self._session.close()
        # Saves are to be durable, however train_func left; who is waited for by others does not wait for memory.
        is_own = isinstance(outcome, Returned) or (isinstance(outcome, Failed) and not outcome.in_collective)
        self._writer.close(wait_held=is_own)
        # The session stays installed, closed, so that a thread left behind gets its error.
        if not isinstance(outcome, Failed):  # that one has left already
            self.tell(outcome)
        self._done.set()
        self._outbox.wake()

    def _tell_resize(self) -> None:
        """Call the user's ``on_resize``, if the group has another size than before."""
        old, new = self._order.previous_size, self._order.member.world_size
        if self._on_resize is not None and old not in (None, new):
            self._on_resize()(old, new)

    def returned(self, value: Any) -> Returned:
        """train_func has returned; all that it has reported can be read.

        Raises:
            MetricError, ReturnValueError: Something cannot.
        """
        self._outbox.settle()
        returned = self._dumped(value)
        self._callbacks.end(None)  # a critical one may make a failure of it
        return returned

    def _dumped(self, value: Any) -> Returned:
        if self._run.returns == "first" and self._order.member.rank != 0:
            check_returned(value, "train_func")
            return Returned(dumps(None), 0, self._session.saw_stop)
        rank = self._order.member.rank if self._run.returns == "all" else None
        data = dumps_returned(value, "train_func", self._backend.reducers(), rank)
        if len(data) <= MAX_INLINE_BYTES:
            return Returned(data, len(data), self._session.saw_stop)
        self._large_value = data
        return Returned(None, len(data), self._session.saw_stop)

    def failed(self, error: BaseException) -> Failed:
        """What is told of an exception that left train_func, or kept it from being entered."""
        timestamp, rank = time.time(), self._order.member.rank
        error.__traceback__ = user_part(error.__traceback__, (entry.__file__, __file__))
        text = redact_text("".join(traceback.format_exception(error)), self._secrets)
        carried = _carriable(error, rank)
        line = _last_line(carried)
        if (advice := self._backend.explain(error)) is not None:
            text, carried.__notes__ = f"{text}{advice}\n", [*getattr(carried, "__notes__", ()), advice]
        return Failed(
            exception=dumps_error(carried),  # its text and type arrive in any case
            type_name=f"{type(carried).__module__}.{type(carried).__qualname__}",
            summary=redact_text(line, self._secrets),
            traceback=text,
            timestamp=timestamp,
            in_collective=self._backend.is_collective_error(error),
            # What a peer or the network can cause; another error there is a mistake, which a retry would repeat.
            in_setup=self._in_setup and isinstance(error, (RuntimeError, OSError)),
        )

    def _leave_group(self) -> None:
        try:
            self._backend.tear_down()
        except Exception as error:
            self._outbox.put(Warned(f"leaving the process group failed: {type(error).__name__}: {error}"))


def _tells_of_the_end(error: BaseException) -> bool:
    """Whether it is what TensorFlow makes of an `AttemptEnded` that was raised where it reads data."""
    return type(error).__module__.startswith("tensorflow.") and AttemptEnded.__name__ in str(error)


def _last_line(error: BaseException) -> str:
    """Type and text, as below a traceback; without the notes that may come after them."""
    shown: Any = traceback.TracebackException(type(error), error, None)
    shown.__notes__ = None
    return str(list(shown.format_exception_only())[-1]).strip()


def _carriable(error: BaseException, rank: int) -> BaseException:
    """The exception that is to be raised in the driver for ``error``."""
    if isinstance(error, SystemExit):
        return TrainFuncError(
            f"train_func called sys.exit({json.dumps(error.code, default=str)}) on rank {rank}; return instead, "
            "or raise an exception that says what is wrong.",
            type_name="SystemExit",
        )
    if isinstance(error, Exception):
        return error
    return TrainFuncError(
        f"{type(error).__name__} in train_func on rank {rank}: {error}", type_name=type(error).__name__
    )
