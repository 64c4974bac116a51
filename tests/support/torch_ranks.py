"""Rank processes of one gloo group, which stay up and run functions for the tests of a file."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

#: What a rank may take for one call, its first one included, which imports torch and transformers.
_TIMEOUT_S = 100


class RankGroup:
    """A gloo group of new processes; use as a context manager.

    Args:
        world_size: The number of processes.
    """

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        start = multiprocessing.get_context("spawn")
        self._ends, self._processes = [], []
        previous = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            for rank in range(world_size):
                ours, theirs = start.Pipe()
                process = start.Process(target=_serve, args=(theirs, store, rank, world_size), daemon=True)
                process.start()
                self._ends.append(ours)
                self._processes.append(process)
        finally:
            if previous is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = previous

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        for process, end in zip(self._processes, self._ends, strict=True):
            process.kill()
            process.join()
            end.close()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function of a module on every rank, and return what it returned, by rank.

        Raises:
            AssertionError: The function raised on a rank, or a rank did not answer.
        """
        for end in self._ends:
            end.send((function, args, kwargs))
        answers: list[Any] = []
        failures: list[str] = []
        for rank, end in enumerate(self._ends):
            if not end.poll(5 if failures else _TIMEOUT_S):
                failures.append(f"rank {rank} does not answer")
                continue
            is_good, value = end.recv()
            answers.append(value)
            if not is_good:
                failures.append(f"rank {rank}:\n{value}")
        assert not failures, "\n".join(failures)
        return answers


def _serve(end: Any, store: str, rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        try:
            function, args, kwargs = end.recv()
        except EOFError:
            return
        try:
            answer = True, function(*args, **kwargs)
        except Exception:
            answer = False, traceback.format_exc()
        end.send(answer)
