"""Models, datasets, loaders and hooks that declarative trainings of tests name. Importable by workers."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

import raysgd
from raysgd import SavedArray
from raysgd.declarative import AggregatedOutputs, TrainHook
from raysgd.session import context
from support.engine_models import batch

CALLS: list[Any] = []


class MLP(nn.Module):
    """What nnScaler's tests train: its ``forward`` returns the loss."""

    def __init__(self, dim: int, nlayers: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(nlayers))
        self.dropout = nn.Dropout(dropout)
        self.loss_fn = nn.BCELoss()

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        x = data["data"]
        for layer in self.layers:
            x = self.dropout(layer(x))
        loss: torch.Tensor = self.loss_fn(torch.sigmoid(x), data["target"])
        return loss


class SimpleDataset(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, dim: int, size: int = 100, noise: str = "") -> None:
        generator = torch.Generator().manual_seed(size)
        self.data = torch.randn(size, dim, generator=generator)
        self.target = torch.rand(size, dim, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        draws = {
            "": lambda: 0.0,
            "random": random.random,
            "numpy": np.random.rand,
            "torch": lambda: float(torch.rand(())),
        }
        return {"data": self.data[place] + draws[self.noise](), "target": self.target[place]}


class Gpt2(nn.Module):
    """A GPT-2 of transformers that takes a batch as one argument."""

    def __init__(self, config: Any) -> None:
        from transformers import GPT2LMHeadModel

        super().__init__()
        self.model = GPT2LMHeadModel(config)

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.model(**batch)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int, length: int) -> None:
        self.ids = torch.randint(64, (size, length), generator=torch.Generator().manual_seed(size))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[place], "labels": self.ids[place]}


class ConvNet(nn.Module):
    """A convolutional network with batch normalization, whose statistics are state, too."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()
        )
        self.head = nn.Linear(channels * 36, 10)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(batch["image"])), batch["label"])


class Images(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.images = torch.rand(size, 1, 8, 8, generator=generator)
        self.labels = torch.randint(10, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[place], "label": self.labels[place]}


class Mean(nn.Module):
    """Its loss is the mean of a batch's rows plus a weight; ``scale`` is not trained."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.scale = scale

    def forward(self, batch: torch.Tensor) -> Any:
        loss = self.scale * (batch.float() * (1 + self.weight)).mean()
        return loss, {"rows": batch.shape[0]}


class Given(Mean):
    """A model whose loss is the mean of the rows, whatever its weight is."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.mean() + self.weight.sum() - self.weight.sum().detach()


class Total(Mean):
    """Its loss is a sum over rows."""

    def forward(self, batch: torch.Tensor) -> Any:
        return {"loss": (batch.float() * (1 + self.weight)).sum(), "num_tokens": batch.shape[0]}


class NoLoss(Mean):
    """Returns a value for each row."""

    def forward(self, batch: torch.Tensor) -> Any:
        return batch.float() * self.weight


class Numbers(Dataset[float]):
    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int) -> float:
        return float(self.values[place])


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(2)


def language_rows(kind: str, rows: int) -> list[dict[str, torch.Tensor]]:
    """Make a dataset of rows for a model of `support.engine_models`."""
    whole = batch(kind, 0, rows=rows, is_even=True)
    return [{name: values[number] for name, values in whole.items()} for number in range(rows)]


class DrawingRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of `language_rows`; each draws from torch's generator and writes the number to the file of its rank."""

    def __init__(self, kind: str, rows: int, folder: str) -> None:
        self._rows = language_rows(kind, rows)
        self._folder = Path(folder)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        with open(self._folder / f"draws-{context.current().world_rank}", "a") as file:
            file.write(f"{place} {torch.rand(()).item()}\n")
        return self._rows[place]


def sum_tokens(loss_outputs: list[Any], sync_group: Any) -> AggregatedOutputs:
    loss = sum(float(each["loss"].detach()) for each in loss_outputs)
    return AggregatedOutputs(loss, len(loss_outputs), sum(each["num_tokens"] for each in loss_outputs))


def sum_tokens_of_ranks(trainer: Any, loss_outputs: list[Any], sync_group: Any) -> AggregatedOutputs:
    own = sum_tokens(loss_outputs, sync_group)
    total = torch.tensor([float(own.loss_sum or 0), float(own.num_batches or 0), float(own.num_tokens or 0)])
    torch.distributed.all_reduce(total, group=sync_group)
    loss, batches, tokens = total.tolist()
    return AggregatedOutputs(loss, int(batches), int(tokens))


def sum_nothing(loss_outputs: list[Any], sync_group: Any) -> AggregatedOutputs:
    return AggregatedOutputs(0.0, len(loss_outputs))


class GlobalOrder(Sampler[int]):
    """Draws its order from torch's global generator."""

    def __init__(self, dataset: Any, num_replicas: int, rank: int) -> None:
        self.size, self.num_replicas, self.rank = len(dataset), num_replicas, rank

    def __len__(self) -> int:
        return self.size // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size)[self.rank :: self.num_replicas].tolist()


class PositionedLoader(DataLoader[Any]):
    """A loader that saves its position by itself, and counts what it reads."""

    reads = 0

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.position = self.start = 0

    def __iter__(self) -> Any:
        inner, start, self.start = super().__iter__(), self.start, 0
        self.position = 0
        batches: list[Any] = list(self.batch_sampler or ())
        for indices in batches[start:]:
            PositionedLoader.reads += 1
            self.position = self.position + 1 if self.position else start + 1
            yield self.collate_fn([self.dataset[index] for index in indices])
        del inner

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


class PlainLoader:
    """A loader that is not torch's."""

    def __init__(self, dataset: Any, batch_size: int, sampler: DistributedSampler[Any]) -> None:
        self.dataset, self.batch_size, self.sampler = dataset, batch_size, sampler

    def __iter__(self) -> Iterator[Any]:
        group: list[Any] = []
        for index in self.sampler:
            group.append(self.dataset[index])
            if len(group) == self.batch_size:
                yield torch.utils.data.default_collate(group)
                group = []


class Recorder(TrainHook):
    """Writes down the hooks that are called. Its name says whose it is."""

    def __init__(self, name: str = "hook") -> None:
        self.name = name

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name.startswith(("on_", "before_", "after_")):

            def call(trainer: Any, *args: Any) -> None:
                CALLS.append((object.__getattribute__(self, "name"), name))
                value(trainer, *args)

            return call
        return value


class Everything(Recorder):
    """Overrides all hooks."""


def _override(name: str) -> None:
    def hook(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    setattr(Everything, name, hook)


for _name in [each for each in dir(TrainHook) if each.startswith(("on_", "before_", "after_"))]:
    _override(_name)


class HookedModel(MLP, TrainHook):
    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        CALLS.append(("model", "on_epoch_start"))


class HookedOptimizer(torch.optim.SGD, TrainHook):
    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        CALLS.append(("optimizer", "on_epoch_start"))


class HookedScheduler(torch.optim.lr_scheduler.StepLR, TrainHook):
    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        CALLS.append(("lr_scheduler", "on_epoch_start"))


def note_norm(trainer: Any, gnorm: torch.Tensor) -> None:
    CALLS.append(float(gnorm))


class ExtraState(TrainHook):
    """Saves a value of its own."""

    def __init__(self, value: Any = 3) -> None:
        self.value = value

    def on_save_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = self.value

    def on_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        CALLS.append(checkpoint["kept"])


class Misnamed(TrainHook):
    """Has a method that a source does not show."""


setattr(Misnamed, "on_train_strt", lambda self, trainer: None)  # noqa: B010


class ChangingMetrics:
    """Changes and adds metrics."""

    def on_step_start(self, trainer: Any) -> None:
        trainer.log_metrics({"seen": trainer.train_status.finished_train_steps}, tag="train")

    def before_log_train_metrics(self, trainer: Any, step_metrics: dict[str, Any]) -> None:
        step_metrics["doubled"] = 2 * step_metrics["loss"]

    def before_log_val_metrics(self, trainer: Any, metrics: dict[str, Any]) -> None:
        metrics["percent"] = 100 * metrics["val_loss"]

    def on_step_end(
        self, trainer: Any, epoch: int, idx: int, step_metrics: dict[str, Any], aggregated_outputs: AggregatedOutputs
    ) -> None:
        CALLS.append(("on_step_end", trainer.train_status.finished_train_steps, epoch, idx, sorted(step_metrics)))


def keep_trainer(trainer: Any) -> None:
    CALLS.append(trainer)


def scheduler_of_the_loop(optimizer: Any) -> Any:
    """Make a scheduler that reaches 0 at the end of the training."""
    CALLS.append(CALLS[0].max_train_steps)
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, CALLS[0].max_train_steps)


class SeenValidation:
    """Writes down the rows of each step of a validation, and the loss."""

    def on_val_step_start(self, trainer: Any, batches: list[Any]) -> None:
        CALLS.append([batch.tolist() for batch in batches])

    def on_val_end(self, trainer: Any, val_loss: float) -> None:
        CALLS.append(val_loss)


class FailingHook:
    def on_step_end(self, trainer: Any) -> None:
        raise ZeroDivisionError

    def on_finalize(self, trainer: Any) -> None:
        CALLS.append("on_finalize")


class ChangingCheckpoints(TrainHook):
    """Adds a value to checkpoints, and doubles the weights that are restored."""

    def on_save_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        CALLS.append(("saved", sorted(checkpoint), checkpoint["train_status"]["steps"]))
        checkpoint["own"] = {"mine": 7}

    def on_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        CALLS.append(("on_load", trainer.train_status.finished_train_steps, checkpoint["own"]))
        checkpoint["model"] = {name: 2 * value for name, value in checkpoint["model"].items()}

    def after_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        CALLS.append(("after_load", trainer.train_status.finished_train_steps, checkpoint["own"]))


class DoublingCheckpoints(TrainHook):
    """Doubles the weights that are restored, also those in shards, and writes down their norms as saved and as restored."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "norms"

    def on_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        whole = {
            name: value.read() if isinstance(value, SavedArray) else value
            for name, value in checkpoint["model"].items()
        }
        self.norm = float(sum(value.square().sum() for value in whole.values()) ** 0.5)
        checkpoint["model"] = {name: 2 * value for name, value in whole.items()}

    def after_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        weights = [each.detach() for each in trainer.model.parameters()]
        weights = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in weights]
        norm = float(sum(each.square().sum() for each in weights) ** 0.5)
        if trainer.rank == 0:
            self.path.write_text(json.dumps([self.norm, norm]))


class ReplacingCheckpoints(TrainHook):
    def on_save_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["model"] = {}


class Referring(MLP):
    """Gets objects by reference."""

    def __init__(self, rows: Any, again: Any, args: Any) -> None:
        super().__init__(4, 1)
        CALLS.append((rows is again and rows.values == [1.0, 2.0], args.vars["size"]))


class DrawingSetup(TrainHook):
    def after_setup(self, trainer: Any) -> None:
        torch.rand(3)


class SeenRows(TrainHook):
    """Writes down the rows of each step."""

    def on_train_step_start(self, trainer: Any, batches: list[Any], idx: int) -> None:
        CALLS.append([float(row) for batch in batches for row in batch])


class Drawing(TrainHook):
    """Draws where a training or an epoch starts."""

    def on_train_start(self, trainer: Any) -> None:
        torch.rand(2)

    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        torch.rand(3)


class DrawingValidations(TrainHook):
    """Draws in validations, and keeps what it draws in steps of the training."""

    def on_train_step_start(self, trainer: Any, batches: list[Any], idx: int) -> None:
        CALLS.append((trainer.train_status.finished_train_steps, torch.rand(()).item(), random.random()))

    def on_val_start(self, trainer: Any) -> None:
        torch.rand(2)

    def on_val_end(self, trainer: Any, val_loss: float) -> None:
        random.random()


class Diverging(Mean):
    """Its loss is NaN from the second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_batches = 0

    def forward(self, batch: torch.Tensor) -> Any:
        self.num_batches += 1
        loss, rows = super().forward(batch)
        return (loss if self.num_batches == 1 else loss * float("nan")), rows


class Normed(nn.Module):
    """Has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.norm(batch.float()[:, None]).square().sum()  # type: ignore[no-any-return]


class Tabled(Mean):
    """Has a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2), persistent=False)


class Infinite(nn.Module):
    """One of its gradients is infinite, and one is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.infinite = nn.Parameter(torch.zeros(()))
        self.finite = nn.Parameter(torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.finite + (self.infinite + 1) * 1e38 * 1e38 - (self.infinite.detach() + 1) * 1e38


class Logger:
    def __init__(self, name: str) -> None:
        self.name = name

    def setup(self, config: dict[str, Any]) -> None:
        CALLS.append(("setup", config["micro_batch_size"]))

    def log_metrics(self, metrics: dict[str, float], step: int, tag: str) -> None:
        CALLS.append((self.name, tag, step, sorted(metrics)))

    def finalize(self) -> None:
        CALLS.append(("finalize", self.name))


def two_of_each(compute_config: Any) -> dict[str, int]:
    return {"tensor_parallel": compute_config.plan_ngpus}


def note_environment(trainer: Any) -> None:
    CALLS.append(("init_env", trainer.rank))


class RowDataset(Dataset[dict[str, Any]]):
    """Rows with their numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(place)
        return {"data": torch.randn(4, generator=generator), "target": torch.rand(4, generator=generator), "row": place}


class RowLog(TrainHook):
    """Writes down the rows of each step, and kills rank 1 once.

    Args:
        folder: Where it writes.
        kill_at: The step before which the rank is killed; 0: never.
    """

    def __init__(self, folder: str, kill_at: int = 0) -> None:
        self.folder, self.kill_at = Path(folder), kill_at

    def on_train_step_start(self, trainer: Any, batches: list[Any], idx: int) -> None:
        step, attempt = trainer.train_status.finished_train_steps + 1, context.current().attempt
        if step == self.kill_at and trainer.rank == 1 and not (mark := self.folder / "killed").exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        rows = [row for batch in batches for row in batch["row"].tolist()]
        line = {"attempt": attempt, "step": step, "epoch": trainer.train_status.epoch, "rows": rows}
        with open(self.folder / f"rows-{attempt}-{trainer.rank}", "a") as log:
            log.write(json.dumps(line) + "\n")


def fail_inside() -> Any:
    import datetime

    return datetime.timedelta(days="2")  # type: ignore[arg-type]


class Pairs(Numbers):
    """Numbers that are read a batch at a time; torch's collate function makes one tensor of inputs and targets."""

    def __getitems__(self, places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.tensor([self.values[place] for place in places]).reshape(-1, 1)
        return found, -found


class OfPairs(Mean):
    def forward(self, batch: torch.Tensor) -> Any:
        return super().forward((batch[0] - batch[1]) / 2)


def loader_without_sampler(dataset: Any, batch_size: int, sampler: Any, is_shuffled: bool = False) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size, shuffle=is_shuffled)


class ReadsAll:
    """A loader that is not torch's, and reads all rows."""

    def __init__(self, dataset: Any, batch_size: int, sampler: Any) -> None:
        self.batches = list(DataLoader(dataset, batch_size))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Stream(IterableDataset[float]):
    """Numbers one after the other: all of them, or those of the rank."""

    def __init__(self, values: list[float], is_split: bool = False) -> None:
        self.values, self.is_split = values, is_split

    def __iter__(self) -> Iterator[float]:
        begin, step = (raysgd.world_rank(), raysgd.world_size()) if self.is_split else (0, 1)
        return iter(self.values[begin::step])
