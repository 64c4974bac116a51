"""Run the gate, or the tests of areas, and say what failed twice, what was unstable, and how long each phase took.

    python tools/run_tests.py gate                  # `make test`, which is what continuous integration runs
    python tools/run_tests.py rest [AREA ...]       # `make test-rest`
    python tools/run_tests.py nightly               # `make nightly`

Arguments after `--` are passed on to pytest.

A test that fails runs once more, after all others, in a pytest process of its own. One that passes then is unstable: it is
named at the end, and its first failure is kept in build/unstable/. The status is 1 if a test failed twice, or if more than
three were unstable, and 124 if the gate ran out of time; then the tests that were running are printed, with their stacks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import leftovers  # noqa: E402
from support.areas import AREAS  # noqa: E402
from support.records import Records, read_records  # noqa: E402
from support.watchdog import stacks  # noqa: E402

MAX_UNSTABLE = 3
#: More failures than these are not repeated: the run has failed whatever they do.
MAX_REPEATED = 10
OUT_OF_TIME = 124
#: pytest's own statuses: all passed, some failed, no test was found.
_PASSED, _FAILED, _NO_TEST = 0, 1, 5
_PROCESSES = ["tests/integration", "tests/fault", "tests/conformance", "tests/docs"]
#: Tests that start no cluster.
_UNIT = [
    "tests/unit",
    "tests/architecture",
    "tests/conformance/test_callbacks.py",
    "tests/conformance/test_storages.py",
    "tests/docs/test_commands.py",
    "tests/docs/test_reading.py",
]
#: What `make nightly` runs.
_NIGHTLY = "not alone and not benchmark and not nightly"


class OutOfTimeError(Exception):
    """The limit of all phases has passed."""


@dataclass
class Phase:
    """One part of a run and what came of it."""

    name: str
    duration_s: float = 0.0
    records: Records = field(default_factory=Records)
    #: What failed that is not a test, such as a linter or the collection of tests.
    error: str = ""
    failed_twice: list[str] = field(default_factory=list)
    unstable: list[str] = field(default_factory=list)

    @property
    def is_failed(self) -> bool:
        return bool(self.error or self.failed_twice)


class Run:
    """Phases one after the other, within one limit of time."""

    def __init__(
        self, jobs: int = 2, arguments: Sequence[str] = (), deadline: float = float("inf"), root: Path = ROOT
    ) -> None:
        self.phases: list[Phase] = []
        self._jobs = jobs
        self._arguments = arguments
        self._deadline = deadline
        self._root = root
        self._unstable = root / "build" / "unstable"
        shutil.rmtree(self._unstable, ignore_errors=True)

    def command(self, name: str, command: list[str]) -> Phase:
        """Run a command whose status says whether the phase passed."""
        phase = self._begin(name)
        status = self._wait(phase, command, None)
        if status != 0:
            phase.error = f"`{' '.join(command)}` ended with status {status}"
        return phase

    def tests(self, name: str, selection: list[str], has_processes: bool = False) -> Phase:
        """Run tests in several processes: one more for those that mostly wait for processes of their own."""
        phase = self._begin(name)
        several = ["-n", str(self._jobs + has_processes), "--dist", "loadfile", "--no-loadscope-reorder"]
        status, phase.records = self._pytest(phase, [*several, *selection, *self._arguments])
        # A run that ends with another status than its tests' has not run all of them.
        if status not in (_PASSED, _FAILED, _NO_TEST) or (status == _FAILED and not phase.records.failures):
            phase.error = f"pytest ended with status {status}"
        return phase

    def repeat_failures(self, phase: Phase) -> None:
        """Run each test that failed once more, by itself, and keep the first failure of those that pass now."""
        failures = phase.records.failures
        if len(failures) > MAX_REPEATED:
            print(f"{len(failures)} tests of {phase.name} failed: they are not run again", flush=True)
            phase.failed_twice = list(failures)
            return
        for test, text in failures.items():
            print(f"again, by itself: {test}", flush=True)
            status, _ = self._pytest(phase, ["-n", "0", test])
            if status != _PASSED:
                phase.failed_twice.append(test)
                continue
            phase.unstable.append(test)
            self._unstable.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^A-Za-z0-9]+", "-", test)[-150:]
            (self._unstable / f"{name}.txt").write_text(f"{test}\n\n{text}\n", encoding="utf-8")

    def _begin(self, name: str) -> Phase:
        print(f"\n=== {name}", flush=True)
        self.phases.append(Phase(name))
        return self.phases[-1]

    def _pytest(self, phase: Phase, selection: list[str]) -> tuple[int, Records]:
        record = self._root / "build" / "tests" / f"{phase.name}.jsonl"
        record.parent.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", f"--record={record}", *selection]
        status = self._wait(phase, command, record)
        return status, _read(record)

    def _wait(self, phase: Phase, command: list[str], record: Path | None) -> int:
        begin = time.monotonic()
        process = subprocess.Popen(command, cwd=self._root, stdin=subprocess.DEVNULL)
        try:
            return process.wait(max(self._deadline - time.time(), 0.1))
        except subprocess.TimeoutExpired:
            phase.error = "out of time"
            _print_state(process.pid, record)
            raise OutOfTimeError from None
        finally:
            phase.duration_s += time.monotonic() - begin
            _end(process)


def _read(record: Path) -> Records:
    if not record.exists():
        return Records()
    with record.open(encoding="utf-8") as lines:
        return read_records(lines)


def _print_state(pid: int, record: Path | None) -> None:
    """Print which tests run, and the stacks of their processes."""
    print("\nout of time; these tests were running:", flush=True)
    for test in _read(record).running if record else ():
        print(f"  {test}", flush=True)
    for process in _tree(pid):
        if (text := stacks(process)).count("\n"):
            print(text, flush=True)


def _tree(pid: int) -> list[psutil.Process]:
    """Return a process, its descendants, and what descendants that have ended left behind."""
    try:
        main = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return []
    processes = [main, *main.children(recursive=True)]
    return [*processes, *leftovers.processes_marked_by({process.pid for process in processes} - {os.getpid()})]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that was interrupted, with all that it started."""
    if process.poll() is not None:
        return
    for one in _tree(process.pid):
        try:
            one.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait()


def run_gate(run: Run, set_up_s: float) -> None:
    run.phases.append(Phase("set-up", set_up_s))
    run.command("lint", ["make", "--no-print-directory", "lint"])
    tests = [
        run.tests("unit", ["-m", f"not tensorflow and {_NIGHTLY}", *_UNIT]),
        run.tests("promises", ["-m", f"smoke and not tensorflow and {_NIGHTLY}", *_PROCESSES], True),
    ]
    for phase in tests:
        run.repeat_failures(phase)


def run_areas(run: Run, areas: Sequence[str]) -> None:
    for area in areas:
        files = [str(path.relative_to(ROOT)) for path in AREAS[area].files()]
        # The gate runs the tests of promises, but not those with TensorFlow.
        run.repeat_failures(run.tests(area, ["-m", f"(not smoke or tensorflow) and {_NIGHTLY}", *files], True))


def run_nightly(run: Run) -> None:
    """Run what takes long, one after the other, also after a failure."""
    # The gate runs these only where Horovod was built before.
    run.repeat_failures(run.tests("horovod", ["-k", "horovod or Horovod", *_PROCESSES], True))
    for target in (
        "alone",
        "slow",
        "schedules",
        "loops",
        "wheel",
        "bench-check",
        "soak",
        "kills",
        "cuts",
        "matrix",
        "mutations",
    ):
        run.command(target, ["make", "--no-print-directory", target])


def summary(run: Run) -> Iterator[str]:
    """Yield the lines that end a run."""
    width = max(len(phase.name) for phase in run.phases)
    yield f"{'':{width}}  passed  failed twice  unstable  minutes"
    for phase in run.phases:
        counts = f"{phase.records.num_passed:6}  {len(phase.failed_twice):12}  {len(phase.unstable):8}"
        yield f"{phase.name:{width}}  {counts}  {phase.duration_s / 60:7.1f}"
    yield f"{'all':{width}}  {'':28}  {sum(phase.duration_s for phase in run.phases) / 60:9.1f}"
    for phase in run.phases:
        if phase.error:
            yield f"{phase.name} failed: {phase.error}"
    for phase in run.phases:
        yield from (f"failed twice: {test}" for test in phase.failed_twice)
    for phase in run.phases:
        yield from (f"unstable (passed by itself; see build/unstable): {test}" for test in phase.unstable)


def status_of(run: Run, is_gate: bool) -> int:
    num_unstable = sum(len(phase.unstable) for phase in run.phases)
    return int(any(phase.is_failed for phase in run.phases) or (is_gate and num_unstable > MAX_UNSTABLE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("gate", "rest", "nightly"))
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"all of them, unless named: {', '.join(AREAS)}")
    parser.add_argument("--jobs", type=int, default=2, help="processes of pytest")
    parser.add_argument("--since", type=float, default=time.time(), help="when the set-up began, in seconds since 1970")
    parser.add_argument("--limit-min", type=float, default=30, help="minutes of the gate, with its set-up")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    options, arguments = parser.parse_intermixed_args(given[:end]), given[end + 1 :]
    if unknown := [area for area in options.areas if area not in AREAS]:
        parser.error(f"there is no area {unknown[0]}: give one of {', '.join(AREAS)}")
    is_gate = options.what == "gate"
    deadline = options.since + 60 * options.limit_min if is_gate else float("inf")
    run = Run(options.jobs, arguments, deadline)
    try:
        if is_gate:
            run_gate(run, time.time() - options.since)
        elif options.what == "nightly":
            run_nightly(run)
        else:
            run_areas(run, options.areas or list(AREAS))
        status = status_of(run, is_gate)
    except OutOfTimeError:
        status = OUT_OF_TIME
    print("\n" + "\n".join(summary(run)), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
