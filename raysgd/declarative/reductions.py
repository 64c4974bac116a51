"""`Reductions`: what losses, outputs and gradients of a step become over all replicas of the model. Worker side."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist

from raysgd.declarative.args import OptimizerConfig
from raysgd.declarative.components import count_tokens, load_function
from raysgd.declarative.hooks import AggregatedOutputs
from raysgd.declarative.values import Importer
from raysgd.errors import ConfigError
from raysgd.torch.devices import device


class Reductions:
    """The reductions of a training.

    Args:
        settings: The optimizer's.
        model: The full name of the model's class, for messages.
        importer: Imports ``aggregate_outputs_fn``.
        sync_group: The process group of the replicas of the model; None in a world of one.
        trainer: What a function with three arguments gets first.
    """

    def __init__(
        self, settings: OptimizerConfig, model: str, importer: Importer, sync_group: Any, trainer: Any
    ) -> None:
        self._settings, self._model, self._sync_group = settings, model, sync_group
        self._function = None
        if (name := settings.aggregate_outputs_fn) is not None:
            self._function = load_function(importer, name, "optimizer.aggregate_outputs_fn")
            takes_trainer = len(inspect.signature(self._function).parameters) == 3
            self._trainer = [trainer] if takes_trainer else []

    def aggregate(
        self, outputs: list[Any], losses: list[torch.Tensor], rows: list[int], reduction: str
    ) -> tuple[AggregatedOutputs, float, float]:
        """Return the outputs of all replicas together, the loss by a reduction, and the rows. All ranks call it."""
        found = torch.stack(losses).double().cpu()  # one wait for the device
        counts = torch.tensor(rows, dtype=torch.float64)
        tokens = 0
        if self._settings.counts_tokens:
            found = found * (counts > 0)  # rows that are repeated have tokens of others
            tokens = self._count_tokens(outputs, rows)
        of_rows = float((found * counts).sum())
        sums = self.add([float(found.sum()), float(len(losses)), of_rows, float(sum(rows)), float(tokens)])
        aggregated = AggregatedOutputs(loss_sum=sums[0], num_batches=int(sums[1]))
        if self._settings.counts_tokens:
            aggregated.num_tokens = int(sums[4])
        if self._function is not None:
            aggregated = self._function(*self._trainer, outputs, self._sync_group)
            if not isinstance(aggregated, AggregatedOutputs):
                raise ConfigError(
                    f"{self._settings.aggregate_outputs_fn} returned {type(aggregated).__name__}; return a "
                    "raysgd.declarative.AggregatedOutputs."
                )
        loss_sum = sums[0] if aggregated.loss_sum is None else float(aggregated.loss_sum)
        number = int(sums[1]) if aggregated.num_batches is None else int(aggregated.num_batches)
        aggregated.num_batches = number
        if reduction == "per-token-mean":
            return aggregated, loss_sum / self.tokens_in(aggregated), sums[3]
        loss = {"mean": loss_sum / max(1, number), "sum": loss_sum, "row-mean": sums[2] / max(1.0, sums[3])}[reduction]
        return aggregated, loss, sums[3]

    def count(self, outputs: list[Any], losses: list[torch.Tensor], rows: list[int]) -> list[float]:
        """Return the sum of the losses of this replica over its own rows, or over its own tokens, and their number."""
        if self._settings.loss_reduction == "per-token-mean" and self._settings.counts_tokens:
            own = sum(float(loss) for loss, number in zip(losses, rows, strict=True) if number)
            return [own, float(self._count_tokens(outputs, rows))]
        return [sum(float(loss) * number for loss, number in zip(losses, rows, strict=True)), float(sum(rows))]

    def _count_tokens(self, outputs: list[Any], rows: list[int]) -> int:
        return sum(count_tokens(output, self._model) for output, number in zip(outputs, rows, strict=True) if number)

    def tokens_in(self, aggregated: AggregatedOutputs) -> int:
        """Return the tokens of a step, by which losses or gradients are divided; 1 where there is none.

        Raises:
            ConfigError: Their number is not known.
        """
        if aggregated.num_tokens is None:
            raise ConfigError(
                f"{self._settings.aggregate_outputs_fn} returned num_tokens=None, and per-token-mean divides by it."
            )
        return max(1, int(aggregated.num_tokens))

    def add(self, values: list[float]) -> list[float]:
        """Return the sums of values over all replicas."""
        if self._sync_group is None:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=device())
        dist.all_reduce(total, group=self._sync_group)
        found: list[float] = total.tolist()
        return found

    def gradient_factor(self, aggregated: AggregatedOutputs) -> float:
        """Return what gradients of the mean over micro-batches are multiplied by."""
        number = float(aggregated.num_batches or 1)
        if self._settings.grad_reduction == "per-token-mean":
            return number / self.tokens_in(aggregated)
        return number if self._settings.grad_reduction == "sum" else 1.0
