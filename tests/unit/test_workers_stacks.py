"""The stacks of a process are read by py-spy, or by its own faulthandler."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

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

#: A process that is delayed between two lines, like one that gets no CPU.
WRITES_SLOWLY = """
import os, signal, time
from raysgd.workers.liveness import stacks

file = os.memfd_create("stacks")

def write(*_):
    os.write(file, b"first\\n")
    time.sleep(0.1)
    os.write(file, b"last\\n")

signal.signal(stacks.SIGNAL, write)
print(file, flush=True)
while True:
    time.sleep(600)
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
    yield
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
    for _ in range(2):  # the second time without the text of the first
        assert stacks.read_stacks(*sleeping).count("in sleep_here") == 1


def test_reader_waits_for_a_process_that_writes_slowly(start_program: StartProgram, no_py_spy: None) -> None:
    assert stacks.read_stacks(*start_program(WRITES_SLOWLY)) == "first\nlast\n"


def test_message_says_why_stacks_cannot_be_read(
    sleeping: tuple[int, int], no_py_spy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "WRITE_TIMEOUT_S", 0.05)
    pid, file = sleeping
    assert "py-spy is not installed" in stacks.read_stacks(pid, -1)
    with stopped(pid):
        assert "it is stopped, and py-spy" in stacks.read_stacks(pid, file)
    assert "cannot be read" in stacks.read_stacks(2**22, file)
