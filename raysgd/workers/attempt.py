"""One attempt in a worker: the thread that runs train_func, and the stream of what it does. Worker side."""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raysgd._util.redact import redact_text, secret_values
from raysgd.backends.base import Backend
from raysgd.callbacks.base import Callback, Stop
from raysgd.callbacks.runner import CallbackRunner
from raysgd.errors import AttemptEnded, TrainFuncError
from raysgd.result import Result
from raysgd.session import context
from raysgd.session.events import Ended, Entered, Failed, Preempted, Returned, Sample, StopWanted, Warned
from raysgd.session.metrics import read_deferred
from raysgd.session.outbox import Outbox
from raysgd.session.progress import Pulse
from raysgd.session.saving import CheckpointWriter
from raysgd.session.worker import WorkerSession
from raysgd.workers.orders import AttemptOrder, RunOrder
from raysgd.workers.pickling import dumps, dumps_error
from raysgd.workers.returned import check_returned, dumps_returned, user_part
from raysgd.workers.sampler import SAMPLE_INTERVAL_S, Sampler

#: Return values above this travel as an item of their own, which the controller hands on without looking.
MAX_INLINE_BYTES = 64 * 1024
#: What an item of a Ray stream costs the controller, in messages over a connection.
RAY_ITEM_COST = 5
#: Seconds a thread has to leave an ended attempt by itself, as by the error of the collective it is in, which is worth
#: telling; then it is interrupted.
INTERRUPT_AFTER_S = 0.1


class Attempt:
    """Runs train_func once. `events` is drained by the stream's thread; `end`, `stop_from` and the like come from others.

    Args:
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
        self._code = code
        self._backend = backend
        self._session = session
        self._outbox = outbox
        self._writer = writer
        self._callbacks = callbacks
        self._node = node
        self._on_resize = on_resize
        self._thread = threading.Thread(target=self._main, name="raysgd-train", daemon=True)
        self._lock = threading.Lock()
        self._is_inside = False
        self._done = threading.Event()
        self._large_value: bytes | None = None
        self._secrets: frozenset[str] = frozenset()

    # -- the stream's thread ----------------------------------------------------------------------------------

    def events(self) -> Iterator[Any]:
        """Batches of events, as they come; after a batch that ends in ``Returned(None, ...)`` the value, as an array."""
        member = self._order.member
        sampler = Sampler({"rank": member.rank, "node": self._node, "run": self._run.info.name})
        self._thread.start()
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

    def end(self, why: str) -> None:
        """End the attempt: the next session call raises, and a Python loop is interrupted where it stands."""
        self._session.end(why)
        self._backend.abort()
        if self._done.wait(INTERRUPT_AFTER_S):
            return
        with self._lock:  # proves that the thread is still in train_func: it would hit whatever runs next otherwise
            if self._is_inside and self._thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(AttemptEnded)
                )

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
        return self._session.progress.pulse(is_inside=self._is_inside, has_gpu=self._order.member.has_gpu)

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

    def join(self, timeout_s: float) -> bool:
        """Wait for train_func to have left; whether it has."""
        return self._done.wait(timeout_s)

    # -- the training thread ----------------------------------------------------------------------------------

    def _main(self) -> None:
        threads = threading.enumerate()
        try:
            outcome = self._train()
        except AttemptEnded:  # an injected exception that arrived just after train_func had left
            outcome = Ended()
        except BaseException as error:  # one that cannot even be shown; nobody must wait for this rank for ever
            outcome = _shown_by_name(error)
            self._outbox.put(outcome, urgent=True)
        self.has_returned = isinstance(outcome, Returned)
        if not self.has_returned:
            self._leave_group()
        self._session.close()
        context.leave_behind(threads)
        # Saves are to be durable, however train_func left; who is waited for by others does not wait for memory.
        is_own = isinstance(outcome, Returned) or (isinstance(outcome, Failed) and not outcome.in_collective)
        self._writer.close(wait_held=is_own)
        # The session stays installed, closed, so that a thread left behind gets its error.
        if not isinstance(outcome, Failed):  # that one has left already
            self._outbox.put(outcome, urgent=True)
        self._done.set()
        self._outbox.wake()

    def _train(self) -> Returned | Ended | Failed:
        error: BaseException | None = None
        in_setup = False
        try:
            function, config = self._code()
            self._secrets = frozenset(secret_values(config))
            if self._backend.waits_for_members:
                self._session.wait_for_others()
            in_setup = True
            self._backend.set_up(self._order.member)
            in_setup = False
            context.install(self._session)
            self._callbacks.start()
            self._tell_resize()
            value = self._call(function, config)
            self._outbox.settle()
            returned = self._returned(value)
            self._callbacks.end(None)  # a critical one may make a failure of it
            return returned
        except AttemptEnded:
            error = AttemptEnded()
            return Ended()
        except BaseException as caught:
            if self._session.is_ended and _tells_of_the_end(caught):
                error = AttemptEnded()
                return Ended()
            error = caught
            failed = self._failed(caught, in_setup)
            # First in time is what the driver raises, so it leaves before this rank's sockets close and others fail.
            self._outbox.put(failed, urgent=True)
            return failed
        finally:
            self._callbacks.end(error)
            self._forget(error)

    def _call(self, function: Callable[..., Any], config: Any) -> Any:
        with self._lock:
            if self._session.is_ended:
                raise AttemptEnded("the attempt ended before train_func was entered")
            self._session.progress.enter()
            self._is_inside = True
        self._outbox.put(Entered(time.time()), urgent=True)
        try:
            return function(config) if takes_config(function) else function()
        finally:
            with self._lock:
                self._is_inside = False

    def _tell_resize(self) -> None:
        """Call the user's ``on_resize``, if the group has another size than before."""
        old, new = self._order.previous_size, self._order.member.world_size
        if self._on_resize is not None and old not in (None, new):
            self._on_resize()(old, new)

    def _returned(self, value: Any) -> Returned:
        if self._run.returns == "first" and self._order.member.rank != 0:
            check_returned(value, "train_func")
            return Returned(dumps(None), 0, self._session.saw_stop)
        rank = self._order.member.rank if self._run.returns == "all" else None
        data = dumps_returned(value, "train_func", self._backend.reducers(), rank)
        if len(data) <= MAX_INLINE_BYTES:
            return Returned(data, len(data), self._session.saw_stop)
        self._large_value = data
        return Returned(None, len(data), self._session.saw_stop)

    def _failed(self, error: BaseException, in_setup: bool) -> Failed:
        timestamp, rank = time.time(), self._order.member.rank
        error.__traceback__ = user_part(error.__traceback__, __file__)
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
            in_setup=in_setup and isinstance(error, (RuntimeError, OSError)),
        )

    def _leave_group(self) -> None:
        try:
            self._backend.tear_down()
        except Exception as error:
            self._outbox.put(Warned(f"leaving the process group failed: {type(error).__name__}: {error}"))

    def _forget(self, error: BaseException | None) -> None:
        """Drop what the exception holds: frames hold tensors, modules and the process group, whose sockets stay open."""
        if error is not None and error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
        gc.collect()


class WorkerCallbacks:
    """The callbacks that run in this worker, in the training thread.

    Args:
        outbox: Where what they have to say goes.
    """

    def __init__(self, callbacks: Sequence[Callback], run: RunOrder, order: AttemptOrder, outbox: Outbox) -> None:
        self._runner = CallbackRunner(callbacks, lambda text: outbox.put(Warned(text)), rank=order.member.rank)
        self._info = run.info  # not the order: this outlives the run, whose data it refers to
        self._order = order
        self._outbox = outbox
        self._count = order.iterations_before
        self.hooks = [self._on_report] if callbacks else []

    def start(self) -> None:
        self._want(self._runner.start(self._info))

    def end(self, error: BaseException | None) -> None:
        self._runner.end(error)

    def _on_report(self, metrics: dict[str, Any]) -> None:
        """Each report of this rank, as a result of this rank alone."""
        self._count += 1
        member = self._order.member
        result = Result(read_deferred(metrics), ranks=(member.rank,))
        result["training_iteration"] = self._count
        result["attempt"] = self._order.attempt
        result["world_size"] = member.world_size
        self._want(self._runner.result(result))

    def _want(self, stop: Stop | None) -> None:
        if stop is not None:
            self._outbox.put(StopWanted(str(stop)), urgent=True)


def takes_config(function: Callable[..., Any]) -> bool:
    """Whether ``function`` has a parameter for the config. Its signature was checked in the driver."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C tell nothing
        return True
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def _tells_of_the_end(error: BaseException) -> bool:
    """Whether it is what TensorFlow makes of an `AttemptEnded` that was raised where it reads data."""
    return type(error).__module__.startswith("tensorflow.") and AttemptEnded.__name__ in str(error)


def _shown_by_name(error: BaseException) -> Failed:
    """What can be said of an exception whose text cannot be had; ``error`` is what trying to get it raised."""
    error = error.__context__ or error
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    places = "".join(traceback.format_tb(error.__traceback__))
    return Failed(None, name, f"{name}, whose text cannot be shown", places, time.time())


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
