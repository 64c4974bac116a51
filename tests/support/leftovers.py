"""Snapshots of this process and machine that show what a test left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from support.poll import until
from support.project import ROOT

# Libraries set these permanently when they are imported or started.
LIBRARIES_SET = (
    "CRC32C_",  # tensorboardX
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",  # JAX, which also sets the TPU variables
    "HDF5_",
    "JAX_",
    "KERAS_",
    "KMP_",
    "MPL",
    "PYTEST_",
    "PYTHONBREAKPOINT",  # Ray, when it starts
    "PYTORCH_NVML_",  # Lightning
    "RAY_",
    "TF_",
    "TF2_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TPU_",
    "WANDB_",
    "XLA_",
)
# Another process of pytest may write these meanwhile: the benchmark programs work in build/.
CACHES = frozenset(
    {".hypothesis", ".import_linter_cache", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__", "build"}
)
MARK = "RUN_OF_THE_TESTS"  # inherited by all descendants of this process


#: The threads of `raysgd.workers.placement.calls`, which a process keeps.
_OF_THE_PROCESS = "raysgd-gcs"


@dataclass(frozen=True)
class ProcessState:
    """The environment, working directory and threads of this process, and the names in the project's root."""

    environment: dict[str, str]
    folder: str
    threads: frozenset[threading.Thread]
    root: frozenset[str]

    @classmethod
    def now(cls) -> ProcessState:
        return cls(
            environment={name: value for name, value in os.environ.items() if not name.startswith(LIBRARIES_SET)},
            folder=os.getcwd(),
            threads=frozenset(threading.enumerate()),
            root=frozenset(os.listdir(ROOT)) - CACHES,
        )

    def restore(self, timeout_s: float = 20) -> list[str]:
        """Restore what can be restored, and return descriptions of the changes; threads may take some time to end."""
        until(lambda: not self._new_threads(), timeout_s)
        return [*self._restore_environment(), *self._restore_folder(), *self._left_threads(), *self._left_files()]

    def _restore_environment(self) -> list[str]:
        now = ProcessState.now().environment
        changed = sorted(
            name for name in now.keys() | self.environment.keys() if now.get(name) != self.environment.get(name)
        )
        for name in changed:
            if name in self.environment:
                os.environ[name] = self.environment[name]
            else:
                del os.environ[name]
        return [f"environment variable {name} was changed" for name in changed]

    def _restore_folder(self) -> list[str]:
        now = os.getcwd()
        if now == self.folder:
            return []
        os.chdir(self.folder)
        return [f"the working directory was changed to {now}"]

    def _left_threads(self) -> list[str]:
        return [f"thread {thread.name} still runs" for thread in self._new_threads()]

    def _new_threads(self) -> list[threading.Thread]:
        """Return new threads that would keep the process alive, and all new threads of raysgd."""
        started = {each for each in threading.enumerate() if not each.name.startswith(_OF_THE_PROCESS)} - self.threads
        return [thread for thread in started if not thread.daemon or thread.name.startswith("raysgd")]

    def _left_files(self) -> list[str]:
        return [f"{name} was left in the project's root" for name in sorted(ProcessState.now().root - self.root)]


def mark_this_process() -> None:
    os.environ[MARK] = str(os.getpid())


def marked_processes() -> set[psutil.Process]:
    """Return all living descendants of this process, including those whose parents are gone."""
    return processes_marked_by({os.getpid()})


def processes_marked_by(pids: set[int]) -> set[psutil.Process]:
    """Return all living descendants of processes of pytest, including those whose parents are gone."""
    marks = {str(pid) for pid in pids}
    return {process for process in psutil.process_iter() if process.pid not in pids and _is_marked(process, marks)}


def _is_marked(process: psutil.Process, marks: set[str]) -> bool:
    try:
        return process.environ().get(MARK) in marks and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end_processes(
    before: set[psutil.Process],
    timeout_s: float = 75,  # Ray's dashboard takes long to end on a busy machine
    is_to_stay: Callable[[psutil.Process], bool] = lambda process: False,
) -> list[str]:
    """Wait for the new marked processes to end; kill the others, and return their names."""

    def new() -> list[psutil.Process]:
        return [process for process in marked_processes() - before if not is_to_stay(process)]

    until(lambda: not new(), timeout_s, interval_s=0.1)
    left = []
    for process in new():
        try:
            command = " ".join(process.cmdline())[:120]
            process.kill()
        except psutil.NoSuchProcess:
            continue
        if not _is_kept_by_python(command):
            left.append(f"process {process.pid} still ran: {command}")
    return left


def _is_kept_by_python(command: str) -> bool:
    """Return whether a process is a helper of multiprocessing, which lives as long as its parent."""
    return "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command
