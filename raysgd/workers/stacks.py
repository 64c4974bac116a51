"""The stacks of a process that may not answer any more: of py-spy where it is installed, else of its own faulthandler.

The faulthandler writes at a signal, without the interpreter's lock, into a file in memory that ends with the process and
that its node's agent reads through /proc. It cannot show a process that is stopped; py-spy can.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time

#: None of those that programs use.
_SIGNAL = signal.SIGRTMIN + 7
#: Seconds for py-spy, and for the faulthandler after it: together less than the caller waits, see `controller.watch`.
_PY_SPY_TIMEOUT_S = 2.0
_WRITE_TIMEOUT_S = 0.8
#: Seconds without another line after which the faulthandler has written its last: it writes many, and may be held up.
_SETTLED_S = 0.2


def make_readable() -> int:
    """Let the agent have this process's stacks; returns the file descriptor where they will be, or -1."""
    with contextlib.suppress(OSError, AttributeError, ValueError):  # not on Linux
        file = os.memfd_create("raysgd-stacks")
        faulthandler.register(_SIGNAL, file=file, all_threads=True)
        return file
    return -1


def read_stacks(pid: int, file: int) -> str:
    """Where each thread of a process stands; a sentence where that is not to be had.

    Args:
        pid: The process, on this node.
        file: What `make_readable` returned in it.
    """
    beside = os.path.dirname(sys.executable)  # of the environment that runs this, which need not be on the path
    py_spy = shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    told = _ask_py_spy(py_spy, pid) if py_spy is not None else None
    return told or _ask_faulthandler(pid, file)


def _ask_py_spy(py_spy: str, pid: int) -> str | None:
    # A process that runs is read while it is held; one that is stopped already cannot be stopped again.
    deadline = time.monotonic() + _PY_SPY_TIMEOUT_S
    for how in ((), ("--nonblocking",)):
        command = [py_spy, "dump", *how, "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=deadline - time.monotonic())
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0:
            return done.stdout
    return None


def _ask_faulthandler(pid: int, file: int) -> str:
    if file < 0:
        return "py-spy is not installed, and the process cannot show its stacks itself"
    place = f"/proc/{pid}/fd/{file}"
    try:
        before = size = os.stat(place).st_size
        os.kill(pid, _SIGNAL)
        grown = time.monotonic()
        deadline = grown + _WRITE_TIMEOUT_S
        while (now := time.monotonic()) < deadline and (size == before or now < grown + _SETTLED_S):
            time.sleep(0.02)
            if (latest := os.stat(place).st_size) > size:
                size, grown = latest, time.monotonic()
        with open(place, "rb") as stacks:
            stacks.seek(before)
            text = stacks.read().decode(errors="replace")
    except OSError as error:
        return f"its stacks cannot be read: {error}"
    return text or "it shows no stacks: it is stopped, and py-spy, which could tell, is not installed"
