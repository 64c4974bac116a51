"""Small models, datasets and functions in place of those that trainings written for nnScaler 0.8 name. Importable by workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from raysgd.declarative import AggregatedOutputs
from raysgd.session import api
from support.declared import CALLS, MLP, SimpleDataset

__all__ = ["MLP", "SimpleDataset"]

_trainers: list[Any] = []


def init_env(trainer: Any) -> None:
    """Keep the trainer, so that functions find it that do not get it."""
    torch.manual_seed(0)
    _trainers[:] = [trainer]


# -- a language model, whose dataset makes whole batches ------------------------------------------------------------------------


class Gpt(nn.Module):
    def __init__(
        self,
        init_from: str,
        *,
        n_layer: int,
        n_head: int,
        n_embd: int,
        block_size: int,
        bias: bool,
        dropout: float,
        meta_path: str | None = None,
    ) -> None:
        super().__init__()
        assert (init_from, meta_path) == ("scratch", "./nanoGPT/data/shakespeare_char/meta.pkl")
        assert n_embd % n_head == 0
        assert block_size == 256
        self.tokens = nn.Embedding(32, n_embd)
        layers: list[nn.Module] = [nn.Linear(n_embd, n_embd, bias=bias) for _ in range(n_layer)]
        self.layers = nn.Sequential(*layers, nn.Dropout(dropout))
        self.head = nn.Linear(n_embd, 32, bias=bias)

    def forward(self, batch: Any) -> torch.Tensor:
        logits = self.head(self.layers(self.tokens(batch[0])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class Characters(Dataset[Any]):
    def __init__(self, data_dir: str, split: str, block_size: int) -> None:
        assert data_dir == "./nanoGPT/data/shakespeare_char"
        self.data = torch.randint(32, (block_size + {"train": 300, "val": 150}[split],))
        self.block_size = block_size

    def __len__(self) -> int:
        return len(self.data) - self.block_size

    def __getitems__(self, places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (
            torch.stack([self.data[at + shift : at + shift + self.block_size] for at in places]) for shift in (0, 1)
        )
        return x, y


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """Counts its steps by itself."""

    def __init__(
        self, optimizer: Any, warmup_iters: int, learning_rate: float, lr_decay_iters: int, min_lr: float
    ) -> None:
        assert (lr_decay_iters, min_lr) == (5000, 1e-4)
        self.it, self.warmup_iters, self.learning_rate = 0, warmup_iters, learning_rate
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        self.it += 1
        return [self.learning_rate * (self.it - 1) / self.warmup_iters for _ in self.optimizer.param_groups]


# -- images, with an own loader and a scheduler that asks the trainer ---------------------------------------------------------


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 10)

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(data["pixel_values"].flatten(1)), data["labels"])


def images(split: str) -> Any:
    return [
        {"pixels": torch.full((3, 2, 2), row / 50), "label": row % 10} for row in range({"train": 47, "val": 15}[split])
    ]


def collate_images(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.stack([row["pixels"] for row in batch]),
        "labels": torch.tensor([row["label"] for row in batch]),
    }


def image_loader(
    dataset: Any, batch_size: int, collate_fn: Any, num_workers: int = 0, drop_last: bool = False, **more: Any
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size,
        sampler=more["sampler"],
        collate_fn=collate_fn,
        num_workers=num_workers,
        drop_last=drop_last,
    )


def linear_schedule(optimizer: Any, num_warmup_steps: int) -> Any:
    steps = _trainers[0].max_train_steps
    CALLS.append(("max_train_steps", steps, num_warmup_steps))
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)


# -- data that is read as a stream --------------------------------------------------------------------------------------------


class StreamedRows(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, split: str, shuffle: bool, batch_size: int, replication: int) -> None:
        assert not shuffle
        assert batch_size == 2
        self.size, self.replication = {"train": 100, "val": 10}[split], replication

    def __len__(self) -> int:
        return self.size // api.data_parallel_size()

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for row in range(self.size):
            data, target = torch.randn(16, generator=generator), torch.rand(16, generator=generator)
            if row % api.data_parallel_size() == api.data_parallel_rank():
                yield {"data": data, "target": target}


class StreamingLoader(DataLoader[Any]):
    """Saves its position by itself, as the loaders of streaming datasets do, and takes ``shuffle``."""

    def __init__(self, dataset: Any, *, shuffle: bool, **more: Any) -> None:
        assert shuffle is False
        super().__init__(dataset, **more)


# -- a loss over tokens --------------------------------------------------------------------------------------------------------


class TokenLoss(nn.Module):
    def __init__(self, model_id: str, **more: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        loss = (self.layer(batch["data"]) - batch["target"]).square().sum()
        return loss, loss.detach(), batch["data"].shape[0] * 4, None


def lines(split: str = "train", dataset_path: str = "") -> Any:
    generator = torch.Generator().manual_seed(1)
    return [
        {"data": torch.randn(4, generator=generator), "target": torch.rand(4, generator=generator)} for _ in range(70)
    ]


def sum_tokens(loss_outputs: list[Any], sync_group: Any) -> AggregatedOutputs:
    """Add losses and tokens over all ranks, by a reduction also where there is one rank."""
    loss = torch.stack([each[1] for each in loss_outputs]).sum(dtype=torch.float64)
    tokens = torch.tensor(float(sum(each[2] for each in loss_outputs)))
    number = torch.tensor(len(loss_outputs))
    for each in (loss, tokens, number):
        torch.distributed.all_reduce(each, group=sync_group)
    return AggregatedOutputs(loss.item() / tokens.item(), int(number), int(tokens))


class LinearWarmup(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: Any, warmup_steps: int, last_epoch: int = -1) -> None:
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate * min(1.0, (self.last_epoch + 1) / self.warmup_steps) for rate in self.base_lrs]


# -- hooks ---------------------------------------------------------------------------------------------------------------------


def note_train_step(trainer: Any, outputs: list[Any]) -> None:
    CALLS.append(("train", trainer.train_status.finished_train_steps, outputs[0].item()))


def note_val_step(trainer: Any, outputs: list[Any]) -> None:
    CALLS.append(("val", trainer.train_status.finished_train_steps, outputs[0].item()))


def note_aggregated(trainer: Any, aggregated_outputs: AggregatedOutputs, train_loss: float) -> None:
    CALLS.append(("aggregated", aggregated_outputs.num_batches, train_loss == aggregated_outputs.loss_sum))
