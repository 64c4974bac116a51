"""A training without end that leaves a mark of every step, in the same way in every system. Worker side.

Each process of each group it belongs to writes the times of its steps to a file of its own, so that what a group did can be
read from outside whatever becomes of its processes. See `bench.groups`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, TextIO

from bench.inside import inside

#: The file that ends the training, in the folder of the steps.
ENOUGH = "enough"
_WIDTH = 64


def train(config: dict[str, Any]) -> None:
    """Steps of DistributedDataParallel on whatever number of ranks, until the file `ENOUGH` is there.

    Config: ``steps`` is the folder, ``save_every`` the steps between two checkpoints (0: only the first one), ``step_s``
    what a step waits beside its computing.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    system, folder = inside(config), Path(config["steps"])
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
