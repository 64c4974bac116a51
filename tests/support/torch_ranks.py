"""Rank processes that stay up and run functions for the tests of a file, each function in a gloo group of its own."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

from raysgd.backends.base import Member
from raysgd.backends.torch import Rendezvous, TorchBackend, TorchConfig

#: What a rank may take to start, and for one call, on a busy machine; calls import transformers.
_TIMEOUT_S = 240
_ADDRESS = "127.0.0.1"


class RankGroup:
    """New processes, with one thread each; use as a context manager.

    Args:
        world_size: The number of processes.
        timeout_s: What they may take for one call, after they have started.
        preloaded: Modules that they import before they are ready.
    """

    def __init__(self, world_size: int, *, timeout_s: float = _TIMEOUT_S, preloaded: Sequence[str] = ()) -> None:
        self._timeout_s, self._is_ready = timeout_s, False
        self._folder = tempfile.TemporaryDirectory()
        self._store = (Path(self._folder.name) / "store").as_uri()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self._ends, self._processes = [], []
        # Not multiprocessing's own processes: they leave a helper process behind as long as pytest runs.
        for rank in range(world_size):
            ours, theirs = Pipe()
            command = [sys.executable, __file__, str(theirs.fileno()), str(rank), str(world_size), *preloaded]
            self._processes.append(subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]))
            theirs.close()
            self._ends.append(ours)

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        for process, end in zip(self._processes, self._ends, strict=True):
            process.kill()
            process.wait()
            end.close()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function of a module on every rank, and return what it returned, by rank.

        Raises:
            AssertionError: The function raised on a rank, or a rank did not answer, or has ended.
        """
        if not self._is_ready:
            self._receive(_TIMEOUT_S)
            self._is_ready = True
        rendezvous = Rendezvous.open(self._store, _ADDRESS).address
        for end in self._ends:
            end.send((rendezvous, function, args, kwargs))
        answers, failures = self._receive(self._timeout_s)
        assert not failures, "\n".join(failures)
        return answers

    def _receive(self, timeout_s: float) -> tuple[list[Any], list[str]]:
        """Return the answers of all ranks, and what is wrong with them."""
        answers: list[Any] = []
        failures: list[str] = []
        for rank, end in enumerate(self._ends):
            if not end.poll(5 if failures else timeout_s):
                failures.append(f"rank {rank} does not answer")
                continue
            try:
                is_good, value = end.recv()
            except EOFError:
                failures.append(f"rank {rank} has ended")
                continue
            answers.append(value)
            if not is_good:
                failures.append(f"rank {rank}:\n{value}")
        return answers, failures


def count_groups() -> int:
    """Return how many groups of gloo have connections in this process; each has one such thread."""
    count = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            count += (thread / "comm").read_text().startswith("gloo_tcp_loop")
    return count


def _serve(end: Connection[Any, Any], rank: int, world_size: int, preloaded: Sequence[str]) -> None:
    import torch

    torch.set_num_threads(1)
    backend = TorchBackend(TorchConfig(init_timeout_s=_TIMEOUT_S, warn_unsynchronized=False))
    backend.load()
    for name in preloaded:
        importlib.import_module(name)
    end.send((True, None))  # it is ready
    while True:
        try:
            rendezvous, function, args, kwargs = end.recv()
        except EOFError:
            return
        # The group of the function before it, which all ranks have ended. Its threads use CPU time.
        backend.destroy_process_group()
        gc.freeze()  # what is left is modules and caches; to look for garbage among them takes half a second
        member = Member(rank, world_size, rank, world_size, 0, rendezvous, _ADDRESS, has_gpu=False)
        try:
            backend.init_process_group(member)
            answer = True, function(*args, **kwargs)
        except Exception:
            answer = False, traceback.format_exc()
            backend.destroy_process_group()  # frees the ranks that wait for this one
        end.send(answer)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
