"""One attempt in a worker process: train_func from its call to its end, and the events of the attempt. Worker side."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from raysgd._util.imports import imported
from raysgd._util.logs import get_logger
from raysgd._util.redact import redact_text, secret_values
from raysgd._util.tracebacks import hide_own_frames
from raysgd.backends.base import Backend, is_collective_error
from raysgd.callbacks.base import Callback, Stop
from raysgd.callbacks.runner import CallbackRunner
from raysgd.errors import AttemptEnded, TrainFuncError
from raysgd.result import Result
from raysgd.session import context
from raysgd.session.event_queue import EventQueue
from raysgd.session.events import (
    Ended,
    Entered,
    Failed,
    Left,
    Preempted,
    Returned,
    Sample,
    StopRequested,
    Unsynchronized,
    Warned,
    WorkerEvent,
)
from raysgd.session.metrics import read_deferred
from raysgd.session.progress import Heartbeat, NodeClock, Spent
from raysgd.session.saving import CheckpointWriter
from raysgd.session.worker import WorkerSession
from raysgd.transport import shorten_retransmissions
from raysgd.workers.orders import AttemptOrder, RunOrder
from raysgd.workers.pickling import check_returned, dumps, dumps_error, dumps_returned, last_line, user_part
from raysgd.workers.process import train_thread
from raysgd.workers.process.first_snapshot import FirstSnapshot
from raysgd.workers.process.output import find_output
from raysgd.workers.process.position_finder import PositionFinder
from raysgd.workers.process.pressure import Pressure
from raysgd.workers.process.step_file import StepFile
from raysgd.workers.process.train_thread import TrainThread, clear_frames, describe_unprintable

#: A larger return value is an item of its own in the Ray stream, which the controller passes on unread.
MAX_INLINE_BYTES = 64 * 1024
#: An item of a Ray stream costs the controller as much as this many messages over a connection.
RAY_ITEM_COST = 5
#: Seconds in which train_func can leave an ended attempt by itself, before it is interrupted. The error of a broken
#: collective says more than an interrupt.
INTERRUPT_AFTER_S = 0.1
#: Seconds in which the changes of a step that have begun are not interrupted, where train_func has a live state.
FINISH_STEP_S = 2.0
FINISH_POLL_S = 0.005
#: The report by which a rank has exchanged gradients, if it does so at all; fewer if train_func returns before.
SYNCHRONIZED_BY_REPORT = 10
#: Seconds between two samples of the process.
SAMPLE_INTERVAL_S = 2.0
#: The values of a sample that are exported as metrics of Ray, named ``raysgd_worker_`` and this.
EXPORTED = (
    "cpu_percent",
    "rss_bytes",
    "gpu_memory_bytes",
    "gpu_percent",
    "reports_per_s",
    "time_per_report_s",
    "steps_per_s",
    "data_wait_fraction",
)


class Attempt:
    """One attempt. The stream's thread drains `events`; other threads call `end`, `preempt` and the session's gates.

    Args:
        code: Returns this attempt's own copies of ``train_func`` and its ``config``.
        first_snapshot: Prepares the first checkpoint while train_func runs.
        node: This process's node, as users see it.
        step_file: Keeps the steps in detail on storage.
        on_left: Called in train_func's thread when it has left, before its objects are released.
        on_resize: Calls the user's ``on_resize`` with the old and the new world size.
        load_retry_on: Returns the classes of exceptions that the user has retried.

    Attributes:
        positions: Finds where train_func is, and in which collectives.
        is_preempted: The process got SIGTERM.
        has_returned: train_func has returned. The process is still in its group, since other ranks may need it there.
    """

    def __init__(
        self,
        run: RunOrder,
        order: AttemptOrder,
        *,
        code: Callable[[], tuple[Callable[..., Any], Any]],
        backend: Backend,
        session: WorkerSession,
        event_queue: EventQueue,
        writer: CheckpointWriter,
        callbacks: WorkerCallbacks,
        first_snapshot: FirstSnapshot,
        node: str,
        step_file: StepFile,
        on_left: Callable[[], None] = lambda: None,
        on_resize: Callable[[int, int], Any] | None = None,
        load_retry_on: Callable[[], tuple[type[Exception], ...]] = tuple,
    ) -> None:
        self.number = order.attempt
        self.is_preempted = False
        self.has_returned = False
        self._run = run
        self._order = order
        self._thread = TrainThread(self._main)
        self._code = code
        self._backend = backend
        self.session = session
        self.writer = writer
        self._event_queue = event_queue
        self._callbacks = callbacks
        self._first_snapshot = first_snapshot
        self._node = node
        self._step_file = step_file
        self._on_left = on_left
        self._on_resize = on_resize
        self._load_retry_on = load_retry_on
        self._retry_on: tuple[type[Exception], ...] = ()
        self._in_setup = False
        self._training = TrainingCheck(backend, session)
        self.positions = PositionFinder(self._thread, backend, session, has_gpu=order.member.has_gpu)
        self._done = threading.Event()
        self._large_value: bytes | None = None
        self._secrets: frozenset[str] = frozenset()
        self._uses: dict[str, float] = {}
        self._after: dict[str, float] = {}

    # -- the stream's thread ----------------------------------------------------------------------------------

    def events(self) -> Iterator[Any]:
        """Run train_func; yield batches of its events, and at the end its return value as an array, if that is large."""
        member = self._order.member
        info = self._run.info
        sampler = Sampler({"rank": member.rank, "node": self._node, "run": info.name}, info.label)
        self._thread.start()
        while True:
            was_done = self._done.is_set()
            batch = self._event_queue.drain(0 if was_done else SAMPLE_INTERVAL_S)
            if was_done and not batch:
                break
            if self._training.can_change:
                self._warn_unsynchronized(is_over=False)
            if time.monotonic() >= sampler.due_at:
                batch.append(Sample(sampler.sample(self.session)))
                self._step_file.write_if_due()
            if batch:
                yield batch
        if self._large_value is not None:
            import numpy as np

            yield np.frombuffer(self._large_value, np.uint8)

    # -- other threads ----------------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """End the attempt: the next session call raises `AttemptEnded` with this text, and a Python loop is interrupted."""
        self.session.end(why)
        self._backend.abort_process_group()
        if not self._done.wait(INTERRUPT_AFTER_S):
            live, until = self.session.live, time.monotonic() + FINISH_STEP_S

            def is_changing() -> bool:
                """Changes of the live state that have begun come to their end, so that they are not lost."""
                return live is not None and live.is_changing and time.monotonic() < until

            while is_changing() and not self._done.wait(FINISH_POLL_S):
                pass
            self._thread.interrupt(is_changing)

    def use_ray_stream(self, problem: str | None) -> None:
        """Make fewer and larger batches from now on, because events travel as items of a Ray stream.

        Args:
            problem: The failure that is the reason, for a warning; None if there is no connection by design.
        """
        self._event_queue.flush_interval_s *= RAY_ITEM_COST
        if problem is not None:
            self._event_queue.put(Warned(problem))

    def heartbeat(self, clock: NodeClock | None) -> Heartbeat:
        """Return how far train_func has come; ``clock`` is what the controller knows of this node's clock."""
        self.session.progress.node_clock = clock
        return self.session.progress.heartbeat(is_inside=self._thread.is_inside)

    def preempt(self, why: str) -> bool:
        """Report to the controller that this process got SIGTERM; return False if that was reported before.

        A signal handler calls this method, so it takes no lock that the main thread could hold.
        """
        if self.is_preempted:
            return False
        self.is_preempted = True
        self._event_queue.put(Preempted(why), urgent=True)
        return True

    # -- train_func's thread ------------------------------------------------------------------------------------

    def _main(self) -> None:
        threads_before = threading.enumerate()
        try:
            outcome = self._run_train_func()
        except AttemptEnded:  # an interrupt that arrived just after train_func had returned
            outcome = Ended()
        except BaseException as error:
            # The text of train_func's exception cannot be made; the rank must report its end all the same.
            outcome = describe_unprintable(error)
            self._send(outcome)
        self._finish(outcome, threads_before)

    def _run_train_func(self) -> Returned | Ended | Failed:
        error: BaseException | None = None
        progress = self.session.progress
        try:
            function, config = self._set_up()
            with progress.timed_garbage_collection():
                try:
                    value = self._thread.call(function, config, self._enter)
                finally:
                    self._uses, self._after = progress.uses(), progress.since_last_step()
                    self._step_file.write(is_over=True)
            self._warn_unsynchronized(is_over=True)
            return self._make_returned(value)
        except AttemptEnded:
            error = AttemptEnded()
            return Ended()
        except BaseException as caught:
            if self.session.is_ended and _is_attempt_ended_of_tensorflow(caught):
                error = AttemptEnded()
                return Ended()
            error = caught
            failed = self._make_failed(caught)
            # The driver raises the first error in time: send it before this rank's sockets close and others fail.
            self._send(failed)
            return failed
        finally:
            self._first_snapshot.close()
            self._callbacks.end(error)
            self._on_left()
            clear_frames(error)

    def _set_up(self) -> tuple[Callable[..., Any], Any]:
        """Return train_func and its config, which can be called now: this rank is in the process group, with its session."""
        function, config = self._code()
        self._retry_on = self._load_retry_on()
        self._secrets = frozenset(secret_values(config))
        if self._backend.waits_for_members:
            self.session.wait_for_others()
        self._in_setup = True
        self._backend.init_process_group(self._order.member)
        self._in_setup = False
        shorten_retransmissions()
        context.install(self.session)
        self._first_snapshot.begin()
        self._callbacks.start()
        old, new = self._order.previous_size, self._order.member.world_size
        if self._on_resize is not None and old is not None and old != new:
            self._on_resize(old, new)
        return function, config

    def _enter(self) -> None:
        if self.session.is_ended:
            raise AttemptEnded("the attempt ended before train_func was entered")
        self.session.progress.enter()
        self._send(Entered(time.time(), find_output()))

    def _warn_unsynchronized(self, *, is_over: bool) -> None:
        if (message := self._training.find_unsynchronized(is_over=is_over)) is not None:
            self._event_queue.put(Unsynchronized(message))

    def _send(self, event: WorkerEvent) -> None:
        self._event_queue.put(event, urgent=True)

    def _finish(self, outcome: Returned | Ended | Failed, threads_before: Sequence[threading.Thread]) -> None:
        """Leave the group if train_func failed, wait for pending saves, and end the event stream."""
        context.block_threads_started_since(threads_before)
        self.has_returned = isinstance(outcome, Returned)
        if not self.has_returned:
            self._leave_group()
        progress = self.session.progress
        self._event_queue.put(Left(find_output(), progress.spent.steps, self._uses, progress.work(), self._after))
        self.session.close()
        # Saves must become durable however train_func ended. A rank that others wait for does not wait for memory copies.
        is_cause = isinstance(outcome, Returned) or (isinstance(outcome, Failed) and not outcome.in_collective)
        self.writer.close(wait_held=is_cause)
        if is_cause:  # others do not wait for this rank
            self._step_file.wait()
        # The closed session stays installed: a thread that train_func did not join gets the session's error.
        if not isinstance(outcome, Failed):  # an error was sent before
            self._send(outcome)
        self._done.set()
        self._event_queue.wake()

    def _make_returned(self, value: Any) -> Returned:
        """Pickle what train_func returned, when all its metrics have been read; raise an error if either fails."""
        self._event_queue.settle()
        returned = self._dump(value)
        self._callbacks.end(None)  # before it is sent: a critical callback may raise
        return returned

    def _dump(self, value: Any) -> Returned:
        if self._run.task.returns == "first" and self._order.member.rank != 0:
            check_returned(value, "train_func")
            return Returned(dumps(None), 0, self.session.saw_stop)
        rank = self._order.member.rank if self._run.task.returns == "all" else None
        data = dumps_returned(value, "train_func", self._backend.get_reducers(), rank)
        if len(data) <= MAX_INLINE_BYTES:
            return Returned(data, len(data), self.session.saw_stop)
        self._large_value = data
        return Returned(None, len(data), self.session.saw_stop)

    def _make_failed(self, error: BaseException) -> Failed:
        """Describe an exception that left train_func, or kept it from being entered."""
        timestamp, rank = time.time(), self._order.member.rank
        error.__traceback__ = user_part(error.__traceback__, (train_thread.__file__, __file__))
        hide_own_frames(error)
        text = redact_text("".join(traceback.format_exception(error)), self._secrets)
        raised = _exception_for_driver(error, rank)
        line = last_line(raised)
        if (advice := self._backend.explain_error(error)) is not None:
            text, raised.__notes__ = f"{text}{advice}\n", [*getattr(raised, "__notes__", ()), advice]
        return Failed(
            exception=dumps_error(raised),  # None if it does not pickle; its type and text arrive all the same
            type_name=f"{type(raised).__module__}.{type(raised).__qualname__}",
            summary=redact_text(line, self._secrets),
            traceback=text,
            timestamp=timestamp,
            in_collective=is_collective_error(self._backend, error),
            # A peer or the network can cause these. A retry would repeat any other error there.
            in_setup=self._in_setup and isinstance(error, (RuntimeError, OSError)),
            can_retry=isinstance(error, self._retry_on),
        )

    def _leave_group(self) -> None:
        try:
            self._backend.destroy_process_group()
        except Exception as error:
            self._event_queue.put(Warned(f"leaving the process group failed: {type(error).__name__}: {error}"))


def _is_attempt_ended_of_tensorflow(error: BaseException) -> bool:
    """Return True for TensorFlow's error in place of an `AttemptEnded` that was raised where TensorFlow reads data."""
    return type(error).__module__.startswith("tensorflow.") and AttemptEnded.__name__ in str(error)


def _exception_for_driver(error: BaseException, rank: int) -> BaseException:
    """Return the exception that the driver raises for ``error``: one that is not an `Exception` would end the driver."""
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


class TrainingCheck:
    """Asks the backend whether this rank trains a model of its own: at the first reports, and when train_func has returned.

    Attributes:
        can_change: The next report may change the answer.
    """

    def __init__(self, backend: Backend, session: WorkerSession) -> None:
        self._backend = backend
        self._session = session
        self._lock = threading.Lock()
        self._num_asked = 0
        self._is_found = False
        self.can_change = True

    def find_unsynchronized(self, *, is_over: bool) -> str | None:
        """Return the backend's warning, once: not before the tenth report, unless train_func ``is_over``."""
        num_reports = self._session.num_reports
        if not is_over and not self._num_asked < min(num_reports, SYNCHRONIZED_BY_REPORT):
            return None
        with self._lock:
            if self._is_found:
                return None
            self._num_asked = num_reports
            # Also before the tenth report: the backend finds early exchanges, of which it may have no record later.
            try:
                message = self._backend.find_unsynchronized_training()
            except Exception:  # a run must not fail because it is examined
                get_logger().debug("the backend could not say whether ranks train alone", exc_info=True)
                return None
            self._is_found = message is not None and (is_over or num_reports >= SYNCHRONIZED_BY_REPORT)
            self.can_change = num_reports < SYNCHRONIZED_BY_REPORT
            return message if self._is_found else None


class WorkerCallbacks:
    """The callbacks that run in this worker, in the training thread.

    Args:
        event_queue: Receives their warnings, and their requests to stop.
    """

    def __init__(
        self, callbacks: Sequence[Callback], run: RunOrder, order: AttemptOrder, event_queue: EventQueue
    ) -> None:
        self._runner = CallbackRunner(callbacks, lambda text: event_queue.put(Warned(text)), rank=order.member.rank)
        self._info = run.info  # not the whole order, which refers to the run's data
        self._order = order
        self._event_queue = event_queue
        self._count = order.iterations_before
        self._has_callbacks = bool(callbacks)

    @property
    def hooks(self) -> list[Callable[[dict[str, Any]], None]]:
        """What to call with each report of this rank."""
        return [self._on_report] if self._has_callbacks else []

    def start(self) -> None:
        self._request_stop(self._runner.start(self._info))

    def end(self, error: BaseException | None) -> None:
        self._runner.end(error)

    def _on_report(self, metrics: dict[str, Any]) -> None:
        """Call the callbacks with a report of this rank, as a `Result` of this rank only."""
        self._count += 1
        member = self._order.member
        result = Result(read_deferred(metrics), ranks=(member.rank,))
        result["training_iteration"] = self._count
        result["attempt"] = self._order.attempt
        result["world_size"] = member.world_size
        self._request_stop(self._runner.call("on_result", result))

    def _request_stop(self, stop: Stop | None) -> None:
        if stop is not None:
            self._event_queue.put(StopRequested(str(stop)), urgent=True)


class Sampler:
    """Measures this process: CPU, memory, GPU, rate of reports.

    Args:
        identity: What each sample has in addition.
        run: The label ``run`` of the exported metrics.

    Attributes:
        due_at: The time of the next sample, in seconds that only grow.
    """

    def __init__(self, identity: dict[str, Any], run: str = "") -> None:
        self._identity = identity
        self._run = run
        self._process = psutil.Process()
        self._process.cpu_percent()  # each call measures since the one before
        self._reports = 0
        self._spent = Spent()
        self._sampled_at = time.monotonic()
        self.due_at = self._sampled_at + SAMPLE_INTERVAL_S
        self._export: Any = None
        self._pressure = Pressure()

    def sample(self, session: WorkerSession) -> dict[str, Any]:
        """Return the values since the last sample, and what train_func's time was used for since it was entered."""
        now = time.monotonic()
        num_reports, spent = session.num_reports, session.progress.spent
        elapsed, self._sampled_at, self.due_at = now - self._sampled_at, now, now + SAMPLE_INTERVAL_S
        made, self._reports = num_reports - self._reports, num_reports
        before, self._spent = self._spent, spent
        trained_s = spent.total_s - before.total_s
        values = {
            **self._identity,
            "cpu_percent": self._process.cpu_percent(),
            "rss_bytes": self._process.memory_info().rss,
            **_gpu(),
            "reports_per_s": made / elapsed,
            "time_per_report_s": elapsed / made if made else None,
            "steps_per_s": (spent.steps - before.steps) / elapsed,
            # Of the time up to the last step; None without a step, or without data of raysgd.
            "data_wait_fraction": (spent.data_s - before.data_s) / trained_s if spent.data_s and trained_s else None,
            "output_bytes": [file.size for file in find_output()],
            "steps": spent.steps,
            "uses": session.progress.uses(),
            **session.progress.work(),
            **self._pressure.read(session.progress.cpu_wait_s(), elapsed),
        }
        self._publish(values)
        return values

    def _publish(self, values: dict[str, Any]) -> None:
        """Export the values through Ray's metrics, which its dashboard and Prometheus read."""
        if self._export is None:
            from ray.util.metrics import Gauge

            self._export = {
                key: Gauge(f"raysgd_worker_{key}", f"{key} of a raysgd worker", tag_keys=("run", "rank"))
                for key in EXPORTED
            }
        tags = {"run": self._run, "rank": str(values["rank"])}
        for key, gauge in self._export.items():
            if values[key] is not None:
                gauge.set(float(values[key]), tags=tags)


def _gpu() -> dict[str, Any]:
    torch = imported("torch")
    if torch is None or not torch.cuda.is_initialized():
        return _gpu_by_nvml()
    given = os.environ.get("RAYSGD_DEVICE_INDEX")
    device = int(given) if given else None  # by default this thread's device, which is not the training thread's
    try:
        percent: int | None = torch.cuda.utilization(device)
    except Exception:  # needs NVIDIA's management library, which some machines do not have
        percent = None
    return {"gpu_memory_bytes": torch.cuda.memory_reserved(device), "gpu_percent": percent}


def _gpu_by_nvml() -> dict[str, Any]:
    """Measure the first GPU of this process, all of it, where a framework other than torch uses it."""
    used = percent = None
    if name := os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]:
        with contextlib.suppress(Exception):  # there is no such GPU, or no library
            nvml, handle = _nvml_device(name)
            used, percent = nvml.nvmlDeviceGetMemoryInfo(handle).used, nvml.nvmlDeviceGetUtilizationRates(handle).gpu
    return {"gpu_memory_bytes": used, "gpu_percent": percent}


@functools.cache
def _nvml_device(name: str) -> tuple[Any, Any]:
    """Return NVIDIA's management library (the package nvidia-ml-py) and its handle of a GPU, by number or by ``GPU-...``."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    by_number = name.isdigit()
    return nvml, nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else nvml.nvmlDeviceGetHandleByUUID(name)
