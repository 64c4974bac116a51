"""What keeps this process from running: other processes on its processors, and memory that is short. Worker side."""

from __future__ import annotations

import os
from typing import Any

import psutil

#: Other processes are looked at after an interval in which the training thread waited this part of it for a processor.
_WAITED = 0.15


class Pressure:
    """Reads the pressure on this process, once a sample."""

    def __init__(self) -> None:
        self._cpu_wait_s: float | None = None
        self._before: dict[int, float] = {}  # the processor time of other processes, while they are looked at

    def read(self, cpu_wait_s: float | None, elapsed_s: float) -> dict[str, Any]:
        """Return the values for a sample.

        Args:
            cpu_wait_s: Seconds so far in which the training thread could have run.
            elapsed_s: Seconds since the last call.

        Returns:
            ``cpu_wait_s``; ``memory_wait_s``, seconds so far in which some process of this machine waited for memory, None where
            the kernel does not say it; and ``busy``, the name, id and used processors of the process that uses most, if it is
            not a worker and processors are short.
        """
        before_s, self._cpu_wait_s = self._cpu_wait_s, cpu_wait_s
        values: dict[str, Any] = {"cpu_wait_s": cpu_wait_s, "memory_wait_s": _memory_wait_s()}
        if None in (before_s, cpu_wait_s) or cpu_wait_s - before_s < _WAITED * elapsed_s:  # type: ignore[operator]
            self._before = {}
        elif (busy := self._busiest(elapsed_s)) is not None:
            values["busy"] = busy
        return values

    def _busiest(self, elapsed_s: float) -> dict[str, Any] | None:
        before, self._before = self._before, _processor_times()
        used = {pid: seconds - before[pid] for pid, seconds in self._before.items() if pid in before}
        if not used:
            return None
        pid = max(used, key=lambda each: used[each])
        try:
            name = psutil.Process(pid).name()
        except psutil.Error:
            return None
        return {"pid": pid, "name": name, "processors": round(used[pid] / elapsed_s, 2)}


def _processor_times() -> dict[int, float]:
    """Return the processor seconds of each process on this machine that is not one of Ray's."""
    times: dict[int, float] = {}
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and not process.name().startswith("ray::"):
                spent = process.cpu_times()
                times[process.pid] = spent.user + spent.system
        except psutil.Error:
            continue
    return times


def _memory_wait_s() -> float | None:
    try:
        with open("/proc/pressure/memory", encoding="ascii") as file:
            return int(file.readline().rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):
        return None
