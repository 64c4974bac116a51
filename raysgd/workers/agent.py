"""Worker processes seen from outside, on their own node: are they alive, what do they use, where do they stand.

The TrainerActor is the agent of its own node; on each other node with workers there is one as an actor without a CPU.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from raysgd.workers.memory_watch import MemoryWatch
from raysgd.workers.out_of_memory import MemoryEvidence
from raysgd.workers.stacks import read_stacks

#: Seconds between two looks at what processes use of memory.
_MEMORY_INTERVAL_S = 0.5
#: Seconds for a copy of a checkpoint to arrive.
_COPY_S = 30.0

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class ProcessLook:
    """One look at a process.

    Attributes:
        cpu_s: CPU time of all its threads so far.
        is_stopped: It was sent SIGSTOP, or a debugger holds it.
        waited_s: Time so far that its threads were ready to run and waited for a CPU; 0 where the kernel does not tell.
    """

    cpu_s: float
    is_stopped: bool
    waited_s: float = 0.0


class NodeAgent:
    """What is done to processes by their ids, and for their checkpoints. Plain calls, quick but for `stacks`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(thread_name_prefix="raysgd-stacks")
        self._memory = MemoryWatch()
        self._looking: threading.Thread | None = None
        self._closing = threading.Event()
        self._wanted: list[Any] = []
        self._held: list[Any] = []
        self._is_fetching = False
        self._lock = threading.Lock()

    def look(self, pids: Sequence[int]) -> list[ProcessLook | None]:
        """How each process stands; None for one that is gone."""
        return [_look(pid) for pid in pids]

    def kill(self, pid: int) -> None:
        """End a process with SIGKILL, a stopped one too, for which Ray needs 5 s."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def hold(self, parts: Sequence[Any]) -> None:
        """Have copies of these parts of a checkpoint on this node, instead of those held before; returns at once."""
        with self._lock:
            self._wanted = list(parts)
            if not self._is_fetching:  # else it goes on with these: one copy at a time
                self._is_fetching = True
                self._pool.submit(self._fetch_wanted)

    def _fetch_wanted(self) -> None:
        while True:
            with self._lock:
                wanted = self._wanted
                if wanted is self._held:
                    self._is_fetching = False
                    return
            if wanted:
                # Whatever it raises, as when Ray ends, is no reason to never fetch again.
                with contextlib.suppress(Exception):
                    ray.wait(wanted, num_returns=len(wanted), timeout=_COPY_S, fetch_local=True)
            self._held = wanted

    def stacks(self, processes: Sequence[tuple[int, int]]) -> list[str]:
        """Where processes stand, each given by its id and the descriptor of its stacks; see `read_stacks`."""
        return list(self._pool.map(lambda process: read_stacks(*process), processes))

    def watch_memory(self, pids: Sequence[int]) -> None:
        """Look at what these processes use from now on, and at no others."""
        self._memory.watch(pids)
        if self._looking is None:
            self._looking = threading.Thread(target=self._look_on, name="raysgd-memory", daemon=True)
            self._looking.start()

    def memory(self, pid: int) -> MemoryEvidence | None:
        """What was seen of a process that has just died; None for one that nobody looked at."""
        return self._memory.evidence(pid)

    def close(self) -> None:
        """End what runs in the background."""
        self._closing.set()
        if self._looking is not None:
            self._looking.join()
            self._looking = None
        self._closing.clear()

    def _look_on(self) -> None:
        while not self._closing.wait(_MEMORY_INTERVAL_S):
            self._memory.look()


def _look(pid: int) -> ProcessLook | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            status, times = process.status(), process.cpu_times()
            if status == psutil.STATUS_ZOMBIE:
                return None
            return ProcessLook(times.user + times.system, status in _STOPPED, _waited_s(pid))
    except psutil.NoSuchProcess:
        return None


def _waited_s(pid: int) -> float:
    """The second number of each thread's ``schedstat``, which Linux has: nanoseconds in a run queue."""
    waited_ns = 0
    for path in glob.iglob(f"/proc/{pid}/task/*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # a thread may end meanwhile
            waited_ns += int(Path(path).read_text().split()[1])
    return waited_ns / 1e9
