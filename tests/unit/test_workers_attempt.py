"""One attempt in a worker: train_func is called, returns, raises, or is interrupted."""

from __future__ import annotations

import gc
import importlib
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import raysgd
from raysgd.backends.base import Member
from raysgd.checkpoint.snapshot import StagingPool
from raysgd.checkpoint.storage.storage import Storage
from raysgd.config import CheckpointConfig
from raysgd.errors import AttemptEnded, StorageError
from raysgd.result import RunInfo
from raysgd.session import context
from raysgd.session.events import Ended, Entered, Failed, Left, Returned, Sample, WorkerEvent
from raysgd.session.progress import Progress
from raysgd.workers.orders import AttemptOrder, RunOrder, WorkerTask
from raysgd.workers.pickling import loads
from raysgd.workers.process.attempt import Attempt, Sampler, TrainingCheck, WorkerCallbacks
from raysgd.workers.process.first_snapshot import FirstSnapshot
from raysgd.workers.process.step_file import StepFile
from raysgd.workers.process.train_thread import TrainThread
from support.poll import until
from support.sessions import Worker

PATIENCE_S = 30


class FakeBackend:
    """A backend without a process group; ``init_error`` is raised while the group forms."""

    waits_for_members = False

    def __init__(self, init_error: BaseException | None = None) -> None:
        self._init_error = init_error

    def init_process_group(self, member: Member) -> None:
        if self._init_error is not None:
            raise self._init_error

    def destroy_process_group(self) -> None: ...

    def abort_process_group(self) -> None: ...

    def get_reducers(self) -> dict[type, Any]:
        return {}

    def explain_error(self, error: BaseException) -> str | None:
        return None

    def find_unsynchronized_training(self) -> str | None:
        return None

    def is_collective_error(self, error: BaseException) -> bool:
        return "connection reset" in str(error)


def make_attempt(
    train_func: Callable[..., Any],
    *,
    init_error: BaseException | None = None,
    retry_on: tuple[type[Exception], ...] = (),
    callbacks: list[raysgd.Callback] | None = None,
) -> Attempt:
    worker = Worker(world_size=1)
    run = RunOrder(WorkerTask("id", b""), RunInfo("", "", {}, 1, "none"), "checkpoints", CheckpointConfig())
    order = AttemptOrder(
        attempt=1,
        member=Member(0, 1, 0, 1, 0, rendezvous="", node_ip="127.0.0.1", has_gpu=False),
        checkpoint=None,
        first_number=1,
        iterations_before=0,
        time_before_s=0.0,
        flush_interval_s=0.0,
    )
    return Attempt(
        run,
        order,
        code=lambda: (train_func, {"lr": 1}),
        backend=FakeBackend(init_error),  # type: ignore[arg-type]
        session=worker.session,
        event_queue=worker.event_queue,
        writer=worker.writer,  # type: ignore[arg-type]
        callbacks=WorkerCallbacks(callbacks or [], run, order, worker.event_queue),
        first_snapshot=FirstSnapshot(StagingPool(), rank=0, num_local=1, expects_save=lambda: False),
        node="here",
        step_file=StepFile(
            Storage.from_uri("trace"), worker.session.progress, attempt=1, rank=0, node="here", iterations_before=0
        ),
        load_retry_on=lambda: retry_on,
    )


def events_of(attempt: Attempt) -> list[WorkerEvent]:
    """Return what the attempt sends about train_func.

    Left out are the end of its output, and samples of CPU and memory: on a slow machine it takes long enough for one.
    """
    return [event for batch in attempt.events() for event in batch if not isinstance(event, (Left, Sample))]


@pytest.fixture(autouse=True)
def no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # attempts with steps write a file
    yield
    context.uninstall()


def test_train_func_is_called_with_its_config_and_its_value_is_sent() -> None:
    entered, returned = events_of(make_attempt(lambda config: config["lr"] + 1))
    assert isinstance(entered, Entered)
    assert isinstance(returned, Returned) and returned.value is not None and loads(returned.value) == 2


def test_events_say_where_the_output_of_train_func_begins_and_ends(capfd: pytest.CaptureFixture[str]) -> None:
    """Output of earlier runs in the same process is before it."""
    print("earlier")
    sent = [event for batch in make_attempt(lambda: print("12345")).events() for event in batch]
    entered = next(event for event in sent if isinstance(event, Entered))
    left = next(event for event in sent if isinstance(event, Left))
    assert sent.index(left) < [isinstance(event, Returned) for event in sent].index(True)
    assert [file.path for file in entered.output] == [file.path for file in left.output]
    assert [after.size - before.size for before, after in zip(entered.output, left.output, strict=True)] == [6, 0]
    assert entered.output[0].size == len("earlier\n")


def test_train_func_is_not_called_if_the_attempt_has_ended_before() -> None:
    attempt = make_attempt(lambda: pytest.fail("called"))
    attempt.end("a rank died")
    assert events_of(attempt) == [Ended()]


def test_error_of_train_func_is_sent() -> None:
    def train_func() -> None:
        raise LookupError("no data")

    entered, failed = events_of(make_attempt(train_func))
    assert isinstance(entered, Entered)
    assert isinstance(failed, Failed) and failed.summary == "LookupError: no data" and not failed.in_setup


@pytest.mark.parametrize(("kind", "expected"), [(RuntimeError, True), (StorageError, False)])
def test_raysgds_own_errors_are_never_taken_for_errors_of_a_collective(kind: type[Exception], expected: bool) -> None:
    def train_func() -> None:
        raise kind("connection reset by the storage server")

    _, failed = events_of(make_attempt(train_func))
    assert isinstance(failed, Failed) and failed.in_collective is expected


def test_error_while_the_group_forms_is_sent_without_a_call() -> None:
    (failed,) = events_of(make_attempt(lambda: pytest.fail("called"), init_error=OSError("no such interface")))
    assert isinstance(failed, Failed) and failed.summary == "OSError: no such interface" and failed.in_setup


def test_end_interrupts_a_python_loop() -> None:
    is_inside, may_end = threading.Event(), threading.Event()

    def train_func() -> None:
        is_inside.set()
        while not may_end.wait(0.001):
            pass

    attempt = make_attempt(train_func)
    ending = threading.Thread(target=lambda: is_inside.wait(PATIENCE_S) and attempt.end("a rank died"))
    ending.start()
    assert events_of(attempt)[1:] == [Ended()]
    ending.join()


class SlowToDie:
    """An object whose end takes until an exception comes, which Python ignores there."""

    def __init__(self, began: threading.Event) -> None:
        self.began = began

    def __del__(self) -> None:
        self.began.set()
        while True:
            time.sleep(0.001)


def test_interrupt_that_python_ignores_is_raised_again() -> None:
    is_inside = threading.Event()

    def train_func() -> None:
        SlowToDie(is_inside)
        while True:
            time.sleep(0.001)

    attempt = make_attempt(train_func)
    ending = threading.Thread(target=lambda: is_inside.wait(PATIENCE_S) and attempt.end("a rank died"))
    ending.start()
    assert events_of(attempt)[1:] == [Ended()]
    ending.join()


def compute_for_ever() -> None:
    while True:
        time.sleep(0.001)


def start_interruptible(train_func: Callable[[], None], look: Callable[[], Any]) -> tuple[TrainThread, list[Any]]:
    """Start train_func in a training thread; the list gets what ``look`` returns when it was interrupted."""
    seen: list[Any] = []

    def main() -> None:
        try:
            thread.call(train_func, {}, lambda: None)
        except AttemptEnded:
            seen.append(look())

    thread = TrainThread(main)
    thread.start()
    return thread, seen


def test_interrupt_waits_while_what_train_func_does_is_kept() -> None:
    """Also if that begins after the attempt has ended: it is asked for at the moment of the interrupt."""
    asked: list[bool] = []
    thread, num_asked_at_end = start_interruptible(compute_for_ever, lambda: len(asked))

    def is_kept() -> bool:
        asked.append(True)
        return len(asked) < 5

    assert until(lambda: thread.is_inside, PATIENCE_S)
    thread.interrupt(is_kept)
    thread.join()
    assert num_asked_at_end == [5]


INTERRUPTED_IMPORT = """
import _imp, sys, threading, time
from raysgd.errors import AttemptEnded
from raysgd.workers.process.train_thread import TrainThread

began, ended = threading.Event(), []

def train_func():
    began.set()
    import colorsys
    while True:
        time.sleep(0.001)

def main():
    try:
        thread.call(train_func, {}, lambda: None)
    except AttemptEnded:
        ended.append(True)

thread, interrupter = TrainThread(main), threading.Thread(target=lambda: thread.interrupt())
_imp.acquire_lock()
thread.start()
began.wait()
def is_importing():
    frames = [frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()]
    return any(frame.f_code.co_name == "_get_module_lock" for frame in frames)

while not is_importing():
    time.sleep(0.001)
interrupter.start()
interrupter.join(0.2)  # an interrupt that does not wait has happened by then
_imp.release_lock()
interrupter.join()
while not ended:
    time.sleep(0.001)
print(_imp.lock_held())
"""


def test_interrupt_in_an_import_leaves_no_lock_taken() -> None:
    """In a process of its own, which could import nothing any more otherwise."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_interrupt_waits_for_the_end_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "takes_its_time.py").write_text("import builtins\nbuiltins.take_time()\nis_whole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    began = threading.Event()

    def take_time() -> None:
        began.set()
        for _ in range(100):  # an exception would be raised here
            time.sleep(0.002)

    monkeypatch.setattr("builtins.take_time", take_time, raising=False)

    def train_func() -> None:
        importlib.import_module("takes_its_time")
        compute_for_ever()

    thread, is_whole = start_interruptible(train_func, lambda: hasattr(sys.modules.get("takes_its_time"), "is_whole"))
    assert began.wait(PATIENCE_S)
    thread.interrupt()
    thread.join()
    assert is_whole == [True]


IMPORTED_AGAIN = """
import _imp, sys, threading, time
import numpy
from raysgd.errors import AttemptEnded
from raysgd.workers.process.train_thread import TrainThread

def train_func():
    import pandas
    while not is_over.is_set():
        time.sleep(0.001)

def main():
    try:
        thread.call(train_func, {}, lambda: None)
    except AttemptEnded:
        pass

is_over = threading.Event()
thread = TrainThread(main)
thread.start()
while "pandas.core.arrays" not in sys.modules:
    time.sleep(0.0001)
thread.interrupt()
thread.join()
is_over.set()
thread = TrainThread(main)
thread.start()
thread.join()
print("pandas" in sys.modules, _imp.lock_held())
"""


@pytest.mark.parametrize("number", range(4))
def test_interrupt_in_an_import_of_pandas_does_not_lose_the_import_lock(number: int) -> None:
    """Extension modules that are left half-initialized fail at their next import in the process; half of the times."""
    done = subprocess.run([sys.executable, "-c", IMPORTED_AGAIN], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True False\n", "")


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupt_does_nothing_outside_of_train_func(when: str) -> None:
    values: queue.Queue[Any] = queue.Queue()
    thread = TrainThread(lambda: values.put(thread.call(lambda: "value", {}, lambda: None)))
    if when == "before":
        thread.interrupt()
    thread.start()
    assert values.get(timeout=PATIENCE_S) == "value" and not thread.is_inside
    if when == "after":
        thread.interrupt()


@pytest.mark.parametrize(("index", "memory", "percent"), [("2", 200, 20), (None, 1, 1)])
def test_sample_is_of_the_workers_own_gpu(
    monkeypatch: pytest.MonkeyPatch, index: str | None, memory: int, percent: int
) -> None:
    """The thread that samples is not the training thread, so its current device is another one."""
    monkeypatch.delenv("RAYSGD_DEVICE_INDEX", raising=False)
    if index is not None:
        monkeypatch.setenv("RAYSGD_DEVICE_INDEX", index)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 if device is None else 100 * device)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 1 if device is None else 10 * device)
    monkeypatch.setattr("ray.util.metrics.Gauge", lambda *args, **settings: Mock())
    sample = Sampler({"rank": 0}).sample(Mock(num_reports=0, progress=Progress()))
    assert (sample["gpu_memory_bytes"], sample["gpu_percent"]) == (memory, percent)


class DroppedConnection(ConnectionError):
    """An error of the user's."""


@pytest.mark.parametrize(
    ("retry_on", "can_retry"), [((), False), ((ValueError,), False), ((ValueError, ConnectionError), True)]
)
def test_exception_is_retried_if_its_class_or_a_base_is_given(
    retry_on: tuple[type[Exception], ...], can_retry: bool
) -> None:
    def train_func() -> None:
        raise DroppedConnection("reset")

    _, failed = events_of(make_attempt(train_func, retry_on=retry_on))
    assert isinstance(failed, Failed) and failed.can_retry is can_retry


def test_nothing_of_an_attempt_needs_a_garbage_collection() -> None:
    """Objects that are alive at a freeze are in no later collection: those of the attempt must not form cycles."""

    class Callback(raysgd.Callback):
        runs_in = "worker"

    def train_func() -> None:
        raysgd.report(step=1)
        with pytest.raises(raysgd.errors.ConfigError, match="has no dataset"):
            raysgd.get_dataset()

    gc.disable()
    try:
        attempt = make_attempt(train_func, callbacks=[Callback()])
        events_of(attempt)
        attempt._thread.join(PATIENCE_S)  # its last frames hold the attempt
        left = {name: weakref.ref(value) for name, value in vars(attempt).items() if hasattr(value, "__weakref__")}
        assert {"session", "writer", "_callbacks"} <= set(left)
        kept = (attempt._run, attempt._order)
        del attempt
        context.uninstall()
        assert [name for name, ref in left.items() if ref() is not None and ref() not in kept] == []
    finally:
        gc.enable()


class Training(FakeBackend):
    """A backend that finds what the test says, and counts the questions."""

    def __init__(self, *answers: str | Exception | None) -> None:
        self.answers = list(answers)

    def find_unsynchronized_training(self) -> str | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def check_of(backend: Training, num_reports: int) -> TrainingCheck:
    worker = Worker()
    for step in range(num_reports):
        worker.report(step=step)
    return TrainingCheck(backend, worker.session)  # type: ignore[arg-type]


def test_training_is_checked_at_first_reports_but_not_judged_before_the_tenth() -> None:
    backend = Training("alone", "alone")
    check = check_of(backend, 9)
    assert [check.find_unsynchronized(is_over=False) for _ in range(2)] == [None, None]
    assert check.find_unsynchronized(is_over=True) == "alone" and backend.answers == []


def test_training_is_judged_once_at_the_tenth_report() -> None:
    backend = Training("alone")
    check = check_of(backend, 10)
    assert check.find_unsynchronized(is_over=False) == "alone"
    assert [check.find_unsynchronized(is_over=is_over) for is_over in (False, True)] == [None, None]


def test_training_that_begins_late_is_judged_at_the_end() -> None:
    backend = Training(None, "alone")
    check = check_of(backend, 50)
    assert [check.find_unsynchronized(is_over=is_over) for is_over in (False, False, True)] == [None, None, "alone"]


def test_failing_check_of_training_does_not_end_the_run() -> None:
    backend = Training(RuntimeError("no record"))
    assert check_of(backend, 0).find_unsynchronized(is_over=True) is None


@pytest.mark.parametrize("name", ["3", "GPU-8932f937"])
def test_sample_has_the_gpu_of_a_process_without_torch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    nvml = Mock()
    nvml.nvmlDeviceGetHandleByIndex.side_effect = lambda number: {3: "handle"}[number]
    nvml.nvmlDeviceGetHandleByUUID.side_effect = lambda uuid: {"GPU-8932f937": "handle"}[uuid]
    nvml.nvmlDeviceGetMemoryInfo.side_effect = lambda handle: {"handle": Mock(used=5)}[handle]
    nvml.nvmlDeviceGetUtilizationRates.side_effect = lambda handle: {"handle": Mock(gpu=70)}[handle]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{name},9")
    sample = Sampler({"rank": 0}).sample(Mock(num_reports=0, progress=Progress()))
    assert (sample["gpu_memory_bytes"], sample["gpu_percent"]) == (5, 70)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sample = Sampler({"rank": 0}).sample(Mock(num_reports=0, progress=Progress()))
    assert (sample["gpu_memory_bytes"], sample["gpu_percent"]) == (None, None)
    assert len(sample["output_bytes"]) in (0, 2)
