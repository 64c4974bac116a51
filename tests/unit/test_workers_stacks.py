"""Where a process stands, of py-spy and of its own faulthandler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from raysgd.workers import stacks

STANDS = """
import time
from raysgd.workers.stacks import make_readable

def stands_here():
    print(make_readable(), flush=True)
    time.sleep(600)

stands_here()
"""

#: A process that is held up between two lines, as one that gets no processor.
WRITES_SLOWLY = """
import os, signal, time
from raysgd.workers import stacks

file = os.memfd_create("stacks")

def write(*_):
    os.write(file, b"first\\n")
    time.sleep(0.1)
    os.write(file, b"last\\n")

signal.signal(stacks._SIGNAL, write)
print(file, flush=True)
while True:
    time.sleep(600)
"""

Begin = Callable[[str], tuple[int, int]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts a program; returns its process id and the descriptor that it prints."""
    begun: list[subprocess.Popen[str]] = []

    def start(program: str) -> tuple[int, int]:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        begun.append(process)
        assert process.stdout is not None
        return process.pid, int(process.stdout.readline())

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_py_spy_shows_where_a_process_stands(begin: Begin, is_stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_PY_SPY_TIMEOUT_S", 60.0)  # on a busy machine too
    pid, file = begin(STANDS)
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    assert "stands_here" in stacks.read_stacks(pid, file)


def test_without_it_the_process_shows_it_itself(begin: Begin, no_py_spy: None) -> None:
    pid, file = begin(STANDS)
    for _ in range(2):  # the second time without what was written before
        assert stacks.read_stacks(pid, file).count("in stands_here") == 1


def test_a_process_held_up_while_it_writes_is_waited_for(begin: Begin, no_py_spy: None) -> None:
    assert stacks.read_stacks(*begin(WRITES_SLOWLY)) == "first\nlast\n"


def test_where_nothing_can_be_had_it_says_why(begin: Begin, no_py_spy: None) -> None:
    pid, file = begin(STANDS)
    assert "py-spy is not installed" in stacks.read_stacks(pid, -1)
    os.kill(pid, signal.SIGSTOP)
    assert "it is stopped, and py-spy" in stacks.read_stacks(pid, file)
    assert "cannot be read" in stacks.read_stacks(2**22, file)
