"""Training loops whose state survives deaths in one way or another. Runs in workers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

#: How a loop keeps its state for the time after a death.
WAYS = {"live": "live state", "memory": "saved to memory in every step", "none": "not kept"}
#: Weights of this width, with the moments of AdamW, are a state of 100 MB.
WIDTH = 2048
ROWS = 4


def make_model(width: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False))


class Loop:
    """A training with DistributedDataParallel and AdamW.

    Attributes:
        step: Steps so far, also those of earlier attempts.
        loaded: The seconds that `raysgd.load_checkpoint` took, and whether it returned a state.
    """

    def __init__(self, way: str, width: int) -> None:
        import torch

        import raysgd

        self._width, self._way, self.step = width, way, 0
        self._model = raysgd.torch.prepare_model(make_model(width))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._live = None
        if way == "live":
            self._live = raysgd.live_state(model=self._model, optimizer=self._optimizer)
        began = time.perf_counter()
        state = raysgd.load_checkpoint()
        self.loaded = time.perf_counter() - began, state is not None
        if state is not None:
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    def train_step(self) -> None:
        import torch

        import raysgd

        self._optimizer.zero_grad()
        (self._model(torch.rand(ROWS, self._width)) - 1).square().mean().backward()
        self._optimizer.step()
        self.step += 1
        if self._live is not None:
            self._live.step(step=self.step)
        elif self._way == "memory":
            state = {"model": self._model, "optimizer": self._optimizer, "step": self.step}
            raysgd.save_checkpoint(state if raysgd.world_rank() == 0 else None)


def train_until_enough(config: dict[str, Any]) -> None:
    """Train until the file `bench.steps.ENOUGH` exists; record each step, the step that a group begins with, and its loading.

    Config: ``steps`` is the folder, ``way`` one of `WAYS`, ``width`` that of the model.
    """
    import torch
    import torch.distributed as dist

    from bench.steps import ENOUGH, open_marks

    rank, folder = dist.get_rank(), Path(config["steps"])
    loop = Loop(config["way"], config["width"])
    group = torch.tensor([time.time_ns()])
    dist.broadcast(group, 0)
    about = f"{loop.step} {loop.loaded[0]} {int(loop.loaded[1])} {os.getpid()}"
    (folder / f"{int(group)}-{rank}.begin").write_text(about, encoding="utf-8")
    with open_marks(folder, int(group), dist.get_world_size(), rank) as marks:
        while True:
            loop.train_step()
            marks.write(f"{time.time()!r}\n")
            is_enough = torch.tensor([float(rank == 0 and (folder / ENOUGH).exists())])
            dist.all_reduce(is_enough)
            if is_enough.item():
                return


def train_block(config: dict[str, Any]) -> float:
    """Return the milliseconds of a step, after two steps.

    Config: ``way``, ``width`` and ``count``, the number of steps.
    """
    import torch.distributed as dist

    loop = Loop(config["way"], config["width"])
    for _ in range(2):
        loop.train_step()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(config["count"]):
        loop.train_step()
    return 1000 * (time.perf_counter() - began) / config["count"]
