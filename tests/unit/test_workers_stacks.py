"""The stacks of a process are read by py-spy, or by its own faulthandler."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from raysgd.workers.liveness import stacks

SLEEPS = """
import time
from raysgd.workers.liveness.stacks import expose_stacks

def sleep_here():
    print(expose_stacks(), flush=True)
    time.sleep(600)

sleep_here()
"""

StartProgram = Callable[[str], tuple[int, int]]


@pytest.fixture(scope="module")
def start_program() -> Iterator[StartProgram]:
    """Return a function that starts a program; it returns the process id and the descriptor that the program prints."""
    processes: list[subprocess.Popen[str]] = []

    def start(program: str) -> tuple[int, int]:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process.pid, int(process.stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def sleeping(start_program: StartProgram) -> tuple[int, int]:
    """Return the id and the stacks descriptor of a process that sleeps."""
    return start_program(SLEEPS)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_py_spy_reads_the_stacks(sleeping: tuple[int, int], is_stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "PY_SPY_TIMEOUT_S", 60.0)  # for a busy machine
    with stopped(sleeping[0]) if is_stopped else contextlib.nullcontext():
        assert "sleep_here" in stacks.read_stacks(*sleeping)


def test_process_writes_its_stacks_itself_without_py_spy(
    sleeping: tuple[int, int], no_py_spy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "WRITE_TIMEOUT_S", 20.0)  # for a busy machine
    monkeypatch.setattr(stacks, "_SETTLED_S", 1.0)
    for _ in range(2):  # the second time without the text of the first
        assert stacks.read_stacks(*sleeping).count("in sleep_here") == 1


def test_reader_waits_for_a_process_that_writes_slowly(no_py_spy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    file, now, due = os.memfd_create("stacks"), 0.0, {0.1: b"first\n", 0.25: b"last\n"}

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        for at in [at for at in due if at <= now]:
            os.write(file, due.pop(at))

    monkeypatch.setattr(stacks, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(stacks.os, "kill", lambda *_: None)
    try:
        assert stacks.read_stacks(os.getpid(), file) == "first\nlast\n"
    finally:
        os.close(file)


def test_message_says_why_stacks_cannot_be_read(
    sleeping: tuple[int, int], no_py_spy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "WRITE_TIMEOUT_S", 0.05)
    pid, file = sleeping
    assert "py-spy is not installed" in stacks.read_stacks(pid, -1)
    with stopped(pid):
        assert "it is stopped, and py-spy" in stacks.read_stacks(pid, file)
    assert "cannot be read" in stacks.read_stacks(2**22, file)
