"""Worker processes seen from outside, on their own node: are they alive, what do they use, where do they stand.

The TrainerActor is the agent of its own node; on each other node with workers there is one as an actor without a CPU.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from raysgd.workers.stacks import read_stacks

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class ProcessLook:
    """One look at a process.

    Attributes:
        cpu_s: CPU time of all its threads so far.
        is_stopped: It was sent SIGSTOP, or a debugger holds it.
    """

    cpu_s: float
    is_stopped: bool


class NodeAgent:
    """What is done to processes by their ids. Plain calls, quick but for `stacks`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(thread_name_prefix="raysgd-stacks")

    def look(self, pids: Sequence[int]) -> list[ProcessLook | None]:
        """How each process stands; None for one that is gone."""
        return [_look(pid) for pid in pids]

    def kill(self, pid: int) -> None:
        """End a process with SIGKILL, a stopped one too, for which Ray needs 5 s."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def stacks(self, processes: Sequence[tuple[int, int]]) -> list[str]:
        """Where processes stand, each given by its id and the descriptor of its stacks; see `read_stacks`."""
        return list(self._pool.map(lambda process: read_stacks(*process), processes))


def _look(pid: int) -> ProcessLook | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            status, times = process.status(), process.cpu_times()
            if status == psutil.STATUS_ZOMBIE:
                return None
            return ProcessLook(times.user + times.system, status in _STOPPED)
    except psutil.NoSuchProcess:
        return None
