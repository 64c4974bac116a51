"""A training loop that marks every step, and the process groups that can be read from the marks.

`train` runs in workers, in the same way in every system: each process of each group writes the times of its steps to its own
file. The driver reads them with `newest_group`, whatever becomes of the processes.
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
    """Steps of DistributedDataParallel on whatever number of ranks, until the file `ENOUGH` is there.

    Config: ``steps`` is the folder, ``save_every`` the steps between two checkpoints (0: only the first one), ``step_s``
    what a step waits after its computation.
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
    """The file for the times of this process's steps in a group."""
    return (folder / f"{group}-{size}-{rank}-{os.getpid()}.steps").open("w", buffering=1)


#: Bytes at the end of a file that hold its last line for certain.
_TAIL = 128


@dataclass(frozen=True)
class Group:
    """Processes that form one process group, each with a step or more behind it.

    Attributes:
        number: Later groups have higher ones.
        pids: By rank.
        first_step, last_step: When the slowest of its ranks had done its first step, and when the last step of all was done
            so far; seconds since the epoch.
        steps: Steps that all of its ranks have done.
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
    """The newest group all of whose ranks have done a step; None without one."""
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
    """The first and the last time in a file, and about how many there are; a line that is being written is none."""
    with path.open("rb") as file:
        first = file.readline()
        if not first.endswith(b"\n"):
            return 0.0, 0.0, 0
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL))
        whole = [line for line in file.read().rpartition(b"\n")[0].split(b"\n") if len(line) >= len(first) // 2]
    return float(first), float(whole[-1]), max(1, round(size / len(first)))
