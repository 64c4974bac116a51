"""`Reductions`: what losses, outputs and gradients of a step become over all replicas of the model. Worker side."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist

from raysgd.declarative.args import OptimizerConfig
from raysgd.declarative.components import load_function
from raysgd.declarative.hooks import AggregatedOutputs
from raysgd.declarative.values import Importer
from raysgd.errors import ConfigError
from raysgd.torch.devices import device


class Reductions:
    """The reductions of a training.

    Args:
        settings: The optimizer's.
        importer: Imports ``aggregate_outputs_fn``.
        sync_group: The process group of the replicas of the model; None in a world of one.
        trainer: What a function with three arguments gets first.
    """

    def __init__(self, settings: OptimizerConfig, importer: Importer, sync_group: Any, trainer: Any) -> None:
        self._settings, self._sync_group = settings, sync_group
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
        of_rows = float((found * torch.tensor(rows, dtype=torch.float64)).sum())
        sums = self.add([float(found.sum()), float(len(losses)), of_rows, float(sum(rows))])
        aggregated = AggregatedOutputs(loss_sum=sums[0], num_batches=int(sums[1]))
        if self._function is not None:
            aggregated = self._function(*self._trainer, outputs, self._sync_group)
            if not isinstance(aggregated, AggregatedOutputs):
                raise ConfigError(
                    f"{self._settings.aggregate_outputs_fn} returned {type(aggregated).__name__}; return a "
                    "raysgd.declarative.AggregatedOutputs."
                )
        loss_sum = sums[0] if aggregated.loss_sum is None else float(aggregated.loss_sum)
        number = int(sums[1]) if aggregated.num_batches is None else int(aggregated.num_batches)
        if "per-token-mean" in (reduction, self._settings.grad_reduction) and not aggregated.num_tokens:
            raise ConfigError(
                f"{self._settings.aggregate_outputs_fn} returned num_tokens={aggregated.num_tokens!r}, and 'per-token-mean' "
                "divides by it."
            )
        loss = {
            "mean": loss_sum / max(1, number),
            "sum": loss_sum,
            "row-mean": sums[2] / max(1.0, sums[3]),
            "per-token-mean": loss_sum / float(aggregated.num_tokens or 1),
        }[reduction]
        aggregated.num_batches = number
        return aggregated, loss, sums[3]

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
            return number / float(aggregated.num_tokens or 1)
        return number if self._settings.grad_reduction == "sum" else 1.0
