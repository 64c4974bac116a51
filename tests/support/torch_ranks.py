"""Rank processes of one gloo group, which stay up and run functions for the tests of a file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

#: What a rank may take for one call, on a busy machine; the first call waits for imports of torch and transformers.
_TIMEOUT_S = 240


class RankGroup:
    """A gloo group of new processes, with one thread each; use as a context manager.

    Args:
        world_size: The number of processes.
    """

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self._ends, self._processes = [], []
        # Not multiprocessing's own processes: they leave a helper process behind as long as pytest runs.
        for rank in range(world_size):
            ours, theirs = Pipe()
            command = [sys.executable, __file__, str(theirs.fileno()), store, str(rank), str(world_size)]
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


def _serve(end: Connection[Any, Any], store: str, rank: int, world_size: int) -> None:
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


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
