"""The step of a model trained with DistributedDataParallel, beside the same loop under torchrun."""

from __future__ import annotations

import time
from typing import Any

from bench.inside import inside
from bench.notes import gather, note
from bench.systems.base import System

NAME = "ddp"
TITLE = "DDP step"
SYSTEMS = ("ray_train", "torchrun", "raysgd")
QUICK_SYSTEMS = ("torchrun", "raysgd")
UNITS = {"conv_step_s": "s", "mlp_step_s": "s"}
IS_FRESH = True
REPEAT = 5
#: Ray's workers would yield to whatever else the machine does, which torchrun's processes do not.
ENVIRONMENT = {"RAY_worker_niceness": "0"}

_BATCH = 64


def params(system: str, quick: bool) -> dict[str, Any]:
    return {"steps": 10 if quick else 40, "blocks": 2 if quick else 5}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    system.run(train, params)
    return {f"{name}_step_s": blocks for name, blocks in gather(system.folder, "blocks")[0].items()}


def train(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(dist.get_rank())
    images = torch.rand(_BATCH, 1, 28, 28)
    labels = torch.randint(10, (_BATCH,))
    conv = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip
    mlp = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    took = {}
    for name, plain in (("conv", conv), ("mlp", mlp)):
        model = inside(config).prepare_model(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def steps(count: int, model: nn.Module = model, optimizer: Any = optimizer) -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return (time.perf_counter() - start) / count

        steps(config["steps"])
        took[name] = [steps(config["steps"]) for _ in range(config["blocks"])]
    note(config, "blocks", dist.get_rank(), took)
