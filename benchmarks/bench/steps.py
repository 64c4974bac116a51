"""A training loop that records every step, and the process groups that the records show.

`train` runs in the workers of every system: each process of each group writes the times of its steps to a file. The driver
reads these files with `newest_group`, even after the processes have died.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.worker import session_of

#: The file that ends the training, in the folder of the steps.
ENOUGH = "enough"
_WIDTH = 64


def train(config: dict[str, Any]) -> None:
    """Train with DistributedDataParallel until the file `ENOUGH` exists.

    Config: ``steps`` is the folder, ``save_every`` the number of steps between checkpoints (0: only the first step saves),
    ``step_s`` the seconds that a step waits after its computation.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    system, folder = session_of(config), Path(config["steps"])
    rank = dist.get_rank()
    state = system.load()
    step = 0 if state is None else int(state["step"]) + 1
    model = system.prepare_model(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    group = torch.tensor([time.time_ns()])
    dist.broadcast(group, 0)
    with open_marks(folder, int(group), dist.get_world_size(), rank) as marks:
        while True:
            optimizer.zero_grad()
            model(torch.rand(8, _WIDTH)).square().mean().backward()
            optimizer.step()
            is_enough = torch.tensor([float(rank == 0 and (folder / ENOUGH).exists())])
            dist.all_reduce(is_enough)
            marks.write(f"{time.time()!r}\n")
            if is_enough.item():
                return
            if step == 0 or (config["save_every"] and step % config["save_every"] == 0):
                system.save({"step": step} if rank == 0 else None, step)
            step += 1
            time.sleep(config["step_s"])


def open_marks(folder: Path, group: int, size: int, rank: int) -> TextIO:
    """Open the file for the times of this process's steps in a group."""
    return (folder / f"{group}-{size}-{rank}-{os.getpid()}.steps").open("w", buffering=1)


#: The bytes at the end of a file that contain its last line.
_TAIL = 128


@dataclass(frozen=True)
class Group:
    """A process group in which each rank has finished a step.

    Attributes:
        number: Later groups have higher numbers.
        pids: The process ids by rank.
        first_step: When the slowest rank finished its first step, in seconds since the epoch.
        last_step: When the last of all steps so far was finished.
        steps: The number of steps that all ranks have finished.
    """

    number: int
    pids: tuple[int, ...]
    first_step: float
    last_step: float
    steps: int

    @property
    def size(self) -> int:
        return len(self.pids)


def newest_group(folder: Path) -> Group | None:
    """Return the newest group in which all ranks have finished a step, or None."""
    files: dict[tuple[int, int], dict[int, tuple[int, Path]]] = {}
    for path in folder.glob("*.steps"):
        number, size, rank, pid = map(int, path.stem.split("-"))
        files.setdefault((number, size), {})[rank] = (pid, path)
    for (number, size), members in sorted(files.items(), reverse=True):
        marks = [read_marks(path) for _, path in members.values()]
        if len(members) == size and all(count for _, _, count in marks):
            pids = tuple(members[rank][0] for rank in range(size))
            first = max(first for first, _, _ in marks)
            last = max(last for _, last, _ in marks)
            return Group(number, pids, first, last, min(count for _, _, count in marks))
    return None


def read_marks(path: Path) -> tuple[float, float, int]:
    """Return the first and the last time in a file, and the approximate number of times; ignore an incomplete line."""
    with path.open("rb") as file:
        first = file.readline()
        if not first.endswith(b"\n"):
            return 0.0, 0.0, 0
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL))
        whole = [line for line in file.read().rpartition(b"\n")[0].split(b"\n") if len(line) >= len(first) // 2]
    return float(first), float(whole[-1]), max(1, round(size / len(first)))
