"""A training by a YAML file, and the same loop by hand. Runs in workers; the file names the classes of this module."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import raysgd
from raysgd.declarative import TrainHook

LOOPS = {"by_hand": "by hand", "by_hand_again": "by hand, again", "declared": "YAML file"}
LEARNING_RATE = 0.01


class Images(Dataset[dict[str, torch.Tensor]]):
    """Random images of 28 x 28 pixels, with labels."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(size, 1, 28, 28, generator=generator)
        self.labels = torch.randint(10, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[place], "label": self.labels[place]}


class Model(nn.Module):
    """The MLP of the comparison; its ``forward`` returns the loss."""

    def __init__(self) -> None:
        from bench.measures.runs import make_models

        super().__init__()
        self.body = make_models()["mlp"]

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(batch["image"]), batch["label"])


class Clock(TrainHook):
    """Writes the milliseconds of a step in each epoch but the first to a file, on rank 0."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.taken: list[float] = []
        self.began = 0.0

    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        self.began, self.steps = time.perf_counter(), trainer.train_status.finished_train_steps

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        steps = trainer.train_status.finished_train_steps - self.steps
        if epoch:
            self.taken.append(1000 * (time.perf_counter() - self.began) / steps)

    def on_train_end(self, trainer: Any) -> None:
        if trainer.rank == 0:
            self.path.write_text(json.dumps(self.taken))


def train_by_hand(config: dict[str, Any]) -> list[float]:
    """Train as the declared loop does, with its metrics; return the milliseconds of a step in each epoch but the first.

    Config: ``rows`` of a worker's batch, ``size`` of the data, ``epochs``.
    """
    import torch.distributed as dist

    data = Images(config["size"])
    loader = raysgd.torch.prepare_data_loader(
        DataLoader(data, batch_size=config["rows"], sampler=DistributedSampler(data))
    )
    model = raysgd.torch.prepare_model(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    taken, step = [], 0
    for epoch in range(config["epochs"]):
        began, before = time.perf_counter(), step
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            optimizer.step()
            sums = torch.stack([loss.detach().double(), torch.tensor(float(len(batch["label"])), dtype=torch.float64)])
            dist.all_reduce(sums)
            step += 1
            total, rows = sums.tolist()
            raysgd.report(
                step=step,
                epoch=epoch,
                train_loss=total / dist.get_world_size(),
                lr=LEARNING_RATE,
                gnorm=norm,
                rows=int(rows),
            )
        if epoch:
            taken.append(1000 * (time.perf_counter() - began) / (step - before))
    return taken
