"""A conformance suite for callbacks: what every one must bear, third-party ones too. Runs anywhere, without Ray.

In a test module of your own::

    class TestMyCallback(CallbackSuite):
        def make_callback(self) -> Callback:
            return MyCallback()

It calls the hooks as raysgd does. What your callback writes, and where, is for tests of your own.
"""

from __future__ import annotations

import hashlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from raysgd.callbacks.base import Callback
from raysgd.callbacks.checks import check_callbacks
from raysgd.callbacks.runner import CallbackRunner
from raysgd.checkpoint import Checkpoint
from raysgd.result import Event, Result, RunInfo

CONFIG = {"lr": 1e-3, "optimizer": "adam", "layers": [64, 64], "nested": {"dropout": None}, "half": False}


def make_info(run_dir: Path) -> RunInfo:
    """A run of two workers."""
    rows = [{"rank": rank, "CPU": 1} for rank in range(2)]
    return RunInfo(run_dir.name, str(run_dir), CONFIG, num_workers=2, backend="none", resources=rows)


def make_result(iteration: int, attempt: int = 1, **metrics: Any) -> Result:
    """A round of two workers with the automatic keys."""
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
    """One event of each kind that callbacks may see."""
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
        "straggler": {"rank": 1, "node": "host (10.0.0.1)", "phase": "data", "own_s": 0.3, "others_s": 0.1},
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

    #: Results of the test that growth is linear; fewer for a callback whose results take milliseconds each.
    num_results = 5000

    def make_callback(self) -> Callback:
        """A new callback, as a user would make it."""
        raise NotImplementedError

    def files_of(self, run_dir: Path) -> dict[str, str]:
        """A digest of each file of a run that another run must leave as it is."""
        return digests(run_dir)

    def test_is_accepted(self) -> None:
        callback = self.make_callback()
        assert check_callbacks([callback]) == [callback]

    def test_constructor_opens_and_writes_nothing(self, tmp_path: Path) -> None:
        self.make_callback()
        assert not list(tmp_path.iterdir())

    def test_survives_a_run_with_everything(self, tmp_path: Path) -> None:
        drive(self.make_callback(), tmp_path / "run", odd=True)

    def test_survives_a_run_without_results(self, tmp_path: Path) -> None:
        drive(self.make_callback(), tmp_path / "run", num_results=0)

    def test_survives_errors_of_the_run(self, tmp_path: Path) -> None:
        for number, error in enumerate((ValueError("two\nlines"), KeyboardInterrupt(), SystemExit(3), Exception())):
            drive(self.make_callback(), tmp_path / f"run_{number}", error=error)

    def test_an_end_without_a_start_is_no_error(self) -> None:
        # What it amounts to when on_run_start raised in its first line.
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

    def test_serves_two_runs_and_leaves_the_first_alone(self, tmp_path: Path) -> None:
        callback = self.make_callback()
        drive(callback, tmp_path / "run_1", num_results=8)
        before = self.files_of(tmp_path / "run_1")
        drive(callback, tmp_path / "run_2", num_results=8)
        assert self.files_of(tmp_path / "run_1") == before

    def test_serves_a_run_after_one_that_failed_to_start(self, tmp_path: Path) -> None:
        callback = self.make_callback()
        file = tmp_path / "file"
        file.write_text("a file where a folder is wanted")
        runner = CallbackRunner([callback], on_problem=lambda text: None, rank=0)
        runner.start(make_info(file / "run"))
        runner.end(None)
        drive(callback, tmp_path / "run")

    def test_takes_rounds_that_are_made_again(self, tmp_path: Path) -> None:
        with running(self.make_callback(), tmp_path / "run") as runner:
            for attempt, iterations in ((1, range(1, 6)), (2, range(3, 9))):
                for iteration in iterations:
                    runner.result(make_result(iteration, attempt))

    def test_changes_no_result(self, tmp_path: Path) -> None:
        result, untouched = make_result(1, **ODD_METRICS), make_result(1, **ODD_METRICS)
        with running(self.make_callback(), tmp_path / "run") as runner:
            runner.result(result)
        assert repr(result) == repr(untouched)
        assert repr(result.workers) == repr(untouched.workers)

    def test_restores_the_standard_streams_and_ends_its_threads(self, tmp_path: Path) -> None:
        streams, threads = (sys.stdout, sys.stderr), set(threading.enumerate())
        drive(self.make_callback(), tmp_path / "run", error=RuntimeError("failed"))
        assert (sys.stdout, sys.stderr) == streams
        assert not [thread for thread in set(threading.enumerate()) - threads if not thread.daemon]

    def test_work_grows_no_faster_than_the_results(self, tmp_path: Path) -> None:
        few, many = self.num_results // 5, self.num_results
        drive(self.make_callback(), tmp_path / "warm", num_results=2)  # imports and caches
        small = self._cost(tmp_path / "few", few)
        large = self._cost(tmp_path / "many", many)
        for what, at_few in small.items():
            assert large[what] <= 5 * 1.2 * at_few + 10_000, f"{what}: {at_few} for {few}, {large[what]} for {many}"

    def _cost(self, folder: Path, num_results: int) -> dict[str, int]:
        """Calls made and bytes written: unlike seconds, the same on every machine."""
        callback = self.make_callback()
        written = bytes_written()
        calls = count_calls(lambda: drive(callback, folder, num_results=num_results))
        return {"calls": calls, "bytes": bytes_written() - written}


class running:  # noqa: N801 - reads as a statement
    """A run around its block: ``with running(callback, run_dir) as runner``. Any problem of the callback is an error."""

    def __init__(self, callback: Callback, run_dir: Path, error: BaseException | None = None) -> None:
        self._problems: list[str] = []
        self._runner = CallbackRunner([callback], self._problems.append, rank=0)
        self._run_dir = run_dir
        self._error = error

    def __enter__(self) -> CallbackRunner:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._runner.start(make_info(self._run_dir))
        return self._runner

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._runner.end(self._error if error is None else error)
        assert not self._problems, "\n".join(self._problems)


def drive(
    callback: Callback, run_dir: Path, *, num_results: int = 5, odd: bool = False, error: BaseException | None = None
) -> None:
    """One whole run: results, with ``odd`` also events, a checkpoint and odd metrics."""
    with running(callback, run_dir, error) as runner:
        for event in make_events() if odd else ():
            runner.event(event)
        for iteration in range(1, num_results + 1):
            runner.result(make_result(iteration, **(ODD_METRICS if odd and iteration > 2 else {})))
        if odd:
            for path in (None, str(run_dir / "checkpoints" / "1")):
                runner.checkpoint(Checkpoint(path, {"loss": 0.5}, iteration=2))


def digests(folder: Path) -> dict[str, str]:
    """A digest of each file below the folder."""
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in _files(folder)}


def count_calls(function: Callable[[], object]) -> int:
    """Calls of Python and C functions that the function makes in this thread."""
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
    """Bytes this process has written to files so far; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*")) if file.is_file())
