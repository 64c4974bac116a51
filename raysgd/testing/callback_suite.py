"""A conformance suite for callbacks, third-party ones included. Needs no Ray.

In a test module of your own::

    class TestMyCallback(CallbackSuite):
        def make_callback(self) -> Callback:
            return MyCallback()

It calls the hooks as raysgd does. Test in your own tests what your callback writes, and where.
"""

from __future__ import annotations

import hashlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle

from raysgd._util.logs import get_logger
from raysgd.callbacks.base import Callback, check_callbacks
from raysgd.callbacks.runner import CallbackRunner
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.result import Event, Result, RunInfo

CONFIG = {"lr": 1e-3, "optimizer": "adam", "layers": [64, 64], "nested": {"dropout": None}, "half": False}


def make_info(run_dir: Path) -> RunInfo:
    """Return the description of a run of two workers."""
    rows = [{"rank": rank, "CPU": 1} for rank in range(2)]
    return RunInfo(run_dir.name, str(run_dir), CONFIG, num_workers=2, backend="none", resources=rows)


def make_result(iteration: int, attempt: int = 1, **metrics: Any) -> Result:
    """Return the result of a round of two workers, with the automatic keys."""
    metrics = {"loss": 1.0 / iteration, **metrics}
    automatic = {
        "training_iteration": iteration,
        "timestamp": 1_700_000_000.0 + iteration,
        "time_this_iter_s": 1.0,
        "time_total_s": float(iteration),
        "world_size": 2,
        "attempt": attempt,
    }
    return Result({**metrics, **automatic}, workers=[dict(metrics), dict(metrics)], ranks=(0, 1))


def make_events() -> list[Event]:
    """Return one event of each kind that callbacks may get."""
    sample = {"rank": 0, "node": "host (10.0.0.1)", "pid": 1, "cpu_percent": 98.0, "rss_bytes": 10**9}
    idle = {"gpu_memory_bytes": None, "gpu_percent": None, "reports_per_s": 0.0, "time_per_report_s": None}
    kinds: dict[str, dict[str, Any]] = {
        "run_start": {},
        "attempt_start": {"attempt": 1, "world_size": 2},
        "worker_up": {"rank": 0, "node": "host (10.0.0.1)", "pid": 1},
        "sample": {**sample, **idle},
        "checkpoint": {"number": 1, "uri": None, "iteration": 2, "metrics": {}},
        "stop": {"why": "enough"},
        "failure": {"ranks": [1], "error": "died", "action": "re-entering"},
        "straggler": {"rank": 1, "node": "host (10.0.0.1)", "cause": "data", "share": 0.4, "text": "rank 1 waits."},
        "warning": {"message": "two\nlines"},
        "attempt_end": {"attempt": 1},
        "of_a_later_version": {"unknown": [1, 2]},
    }
    return [Event(kind, 1_700_000_000.0, data) for kind, data in kinds.items()]


ODD_METRICS: dict[str, Any] = {
    "none": None,
    "nan": math.nan,
    "infinite": -math.inf,
    "text": 'two\nlines, "quoted" | ünïcödé',
    "flag": True,
    "big": 10**30,
    "list": [1, 2.5, None, math.nan],
    "nested": {"deep": {"value": 1, "nan": math.nan}, "empty": {}},
    "odd name @ 5%/[x]": 1.0,
}


class CallbackSuite:
    """Subclass it as ``Test...`` with `make_callback`; pytest runs its tests."""

    #: The number of results in the test of linear cost; give fewer for a callback that needs milliseconds per result.
    num_results = 5000

    def make_callback(self) -> Callback:
        """Return a new callback, as a user would create it."""
        raise NotImplementedError

    def files_of(self, run_dir: Path) -> dict[str, str]:
        """Return a digest of each file of a run that a later run must not change."""
        return digests(run_dir)

    def test_callback_is_accepted(self) -> None:
        callback = self.make_callback()
        assert check_callbacks([callback]) == [callback]

    def test_constructor_opens_and_writes_nothing(self, tmp_path: Path) -> None:
        self.make_callback()
        assert not list(tmp_path.iterdir())

    def test_accepts_events_checkpoints_and_unusual_metrics(self, tmp_path: Path) -> None:
        drive(self.make_callback(), tmp_path / "run", odd=True)

    def test_accepts_a_run_without_results(self, tmp_path: Path) -> None:
        drive(self.make_callback(), tmp_path / "run", num_results=0)

    def test_accepts_errors_of_the_run(self, tmp_path: Path) -> None:
        for number, error in enumerate((ValueError("two\nlines"), KeyboardInterrupt(), SystemExit(3), Exception())):
            drive(self.make_callback(), tmp_path / f"run_{number}", error=error)

    def test_accepts_an_end_without_a_start(self) -> None:
        # This happens if on_run_start raises in its first line.
        callback = self.make_callback()
        callback.on_run_end(None)
        callback.on_run_end(ValueError("never started"))

    def test_pickles_before_the_start(self, tmp_path: Path) -> None:
        copy = cloudpickle.loads(cloudpickle.dumps(self.make_callback()))
        drive(copy, tmp_path / "run")

    def test_pickles_again_after_a_run(self, tmp_path: Path) -> None:
        callback = self.make_callback()
        drive(callback, tmp_path / "run_1")
        drive(cloudpickle.loads(cloudpickle.dumps(callback)), tmp_path / "run_2")

    def test_second_run_does_not_change_files_of_the_first(self, tmp_path: Path) -> None:
        callback = self.make_callback()
        drive(callback, tmp_path / "run_1", num_results=8)
        before = self.files_of(tmp_path / "run_1")
        drive(callback, tmp_path / "run_2", num_results=8)
        assert self.files_of(tmp_path / "run_1") == before

    def test_works_after_a_run_that_failed_to_start(self, tmp_path: Path) -> None:
        callback = self.make_callback()
        file = tmp_path / "file"
        file.write_text("a file where a folder is wanted")
        runner = CallbackRunner([callback], on_failure=lambda text: None, rank=0)
        runner.start(make_info(file / "run"))
        runner.end(None)
        drive(callback, tmp_path / "run")

    def test_accepts_repeated_rounds(self, tmp_path: Path) -> None:
        with running(self.make_callback(), tmp_path / "run") as runner:
            for attempt, iterations in ((1, range(1, 6)), (2, range(3, 9))):
                for iteration in iterations:
                    runner.call("on_result", make_result(iteration, attempt))

    def test_does_not_change_results(self, tmp_path: Path) -> None:
        result, untouched = make_result(1, **ODD_METRICS), make_result(1, **ODD_METRICS)
        with running(self.make_callback(), tmp_path / "run") as runner:
            runner.call("on_result", result)
        assert repr(result) == repr(untouched)
        assert repr(result.workers) == repr(untouched.workers)

    def test_restores_standard_streams_and_ends_its_threads(self, tmp_path: Path) -> None:
        streams, threads = (sys.stdout, sys.stderr), set(threading.enumerate())
        drive(self.make_callback(), tmp_path / "run", error=RuntimeError("failed"))
        assert (sys.stdout, sys.stderr) == streams
        assert not [thread for thread in set(threading.enumerate()) - threads if not thread.daemon]

    def test_cost_is_linear_in_the_number_of_results(self, tmp_path: Path) -> None:
        few, many = self.num_results // 5, self.num_results
        drive(self.make_callback(), tmp_path / "warm", num_results=2)  # imports and caches
        small = self._cost(tmp_path / "few", few)
        large = self._cost(tmp_path / "many", many)
        for what, at_few in small.items():
            assert large[what] <= 5 * 1.2 * at_few + 10_000, f"{what}: {at_few} for {few}, {large[what]} for {many}"

    def _cost(self, folder: Path, num_results: int) -> dict[str, int]:
        """Return calls made and bytes written, which unlike seconds are the same on every machine."""
        callback = self.make_callback()
        written = bytes_written()
        calls = count_calls(lambda: drive(callback, folder, num_results=num_results))
        return {"calls": calls, "bytes": bytes_written() - written}


@contextmanager
def running(callback: Callback, run_dir: Path, error: BaseException | None = None) -> Iterator[CallbackRunner]:
    """Start a run, yield what calls the callback, and end the run; a problem of the callback is an error."""
    problems: list[str] = []
    run_dir.mkdir(parents=True, exist_ok=True)
    runner = CallbackRunner([callback], problems.append, rank=0, on_warning=get_logger().warning)
    runner.start(make_info(run_dir))
    try:
        yield runner
    except BaseException as raised:
        error = raised
        raise
    finally:
        runner.end(error)
        assert not problems, "\n".join(problems)


def drive(
    callback: Callback, run_dir: Path, *, num_results: int = 5, odd: bool = False, error: BaseException | None = None
) -> None:
    """Drive a callback through one run; with ``odd`` also with events, a checkpoint and unusual metrics."""
    with running(callback, run_dir, error) as runner:
        for event in make_events() if odd else ():
            runner.call("on_event", event)
        for iteration in range(1, num_results + 1):
            runner.call("on_result", make_result(iteration, **(ODD_METRICS if odd and iteration > 2 else {})))
        if odd:
            for path in (None, str(run_dir / "checkpoints" / "1")):
                runner.call("on_checkpoint", Checkpoint(path, {"loss": 0.5}, iteration=2))


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file below the folder."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def count_calls(function: Callable[[], object]) -> int:
    """Return the number of Python and C calls that the function makes in this thread."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        if event.endswith("call"):
            count += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def bytes_written() -> int:
    """Return the bytes that this process has written to files so far; 0 if the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))
