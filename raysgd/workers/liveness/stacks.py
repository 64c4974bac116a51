"""Reads the stacks of a worker process that does not answer any more, with py-spy or the process's own faulthandler.

At a signal the faulthandler writes, without the interpreter's lock, into a file in memory that ends with the process. The
node's agent reads that file through /proc. py-spy can also show a stopped process, which the faulthandler cannot.
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

#: A signal that programs do not use.
SIGNAL = signal.SIGRTMIN + 7
#: The time for py-spy, and for the faulthandler after it; together less than `raysgd.controller.run.worker_watch` waits.
PY_SPY_TIMEOUT_S = 2.0
WRITE_TIMEOUT_S = 0.8
#: The faulthandler has finished if no line was added for this long: it writes many, and may be delayed.
_SETTLED_S = 0.2
_POLL_S = 0.02


def expose_stacks() -> int:
    """Let the node's agent read this process's stacks; return the file descriptor to read them from, or -1."""
    with contextlib.suppress(OSError, AttributeError, ValueError):  # not on Linux
        file = os.memfd_create("raysgd-stacks")
        faulthandler.register(SIGNAL, file=file, all_threads=True)
        return file
    return -1


def read_stacks(pid: int, file: int) -> str:
    """Return the stacks of all threads of a process, or a sentence that says why they cannot be read.

    Args:
        pid: The process, on this node.
        file: The value that `expose_stacks` returned in the process.
    """
    own_folder = os.path.dirname(sys.executable)  # of this environment, which need not be on the path
    py_spy = shutil.which("py-spy", path=os.pathsep.join([own_folder, os.environ.get("PATH", "")]))
    stacks = _run_py_spy(py_spy, pid) if py_spy is not None else None
    return stacks or _ask_faulthandler(pid, file)


def _run_py_spy(py_spy: str, pid: int) -> str | None:
    # py-spy pauses the process while it reads. A process that is stopped already cannot be paused: hence the second try.
    deadline = time.monotonic() + PY_SPY_TIMEOUT_S
    for options in ((), ("--nonblocking",)):
        command = [py_spy, "dump", *options, "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=deadline - time.monotonic())
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0:
            return done.stdout
    return None


def _ask_faulthandler(pid: int, file: int) -> str:
    if file < 0:
        return "its stacks cannot be read: py-spy is not installed, and the process has no faulthandler"
    path = f"/proc/{pid}/fd/{file}"
    try:
        before = size = os.stat(path).st_size
        os.kill(pid, SIGNAL)
        grown_at = time.monotonic()
        deadline = grown_at + WRITE_TIMEOUT_S
        while (now := time.monotonic()) < deadline and (size == before or now < grown_at + _SETTLED_S):
            time.sleep(_POLL_S)
            if (latest := os.stat(path).st_size) > size:
                size, grown_at = latest, time.monotonic()
        with open(path, "rb") as stacks:
            stacks.seek(before)
            text = stacks.read().decode(errors="replace")
    except OSError as error:
        return f"its stacks cannot be read: {error}"
    return (
        text
        or "its stacks cannot be read: it is stopped, and py-spy, which can read a stopped process, is not installed"
    )
