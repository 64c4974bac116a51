"""The model that a training loop calls when its layers are stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from raysgd.engine.pipeline.schedule import PipelineModel


class PipelineOutput(dict[str, Any]):
    """The output of a pipelined model: the loss, as an attribute and as an item."""

    def __init__(self, loss: torch.Tensor) -> None:
        super().__init__(loss=loss)
        self.loss = loss


class PipelinedModel(nn.Module):
    """One stage of a model. A call makes the forward passes of all stages, and while training the backward passes too.

    Names of parameters and ``state_dict()`` are those of the stage.

    Args:
        pipeline: The stage.
        micro_batches: Parts of a batch; None: four for each stage.
        scale: Returns what gradients are multiplied by.
    """

    def __init__(self, pipeline: PipelineModel, micro_batches: int | None, scale: Callable[[Any], float]) -> None:
        super().__init__()
        self.module = pipeline.module
        self._pipeline = pipeline
        self._micro_batches = micro_batches
        self._scale = scale

    def forward(self, **batch: Any) -> PipelineOutput:
        if self.training and torch.is_grad_enabled():
            loss = self._pipeline.step(batch, self._micro_batches, scale=self._scale(batch))
        else:
            loss = self._pipeline.evaluate(batch, self._micro_batches)
        return PipelineOutput(loss)

    def __raysgd_unwrap__(self) -> nn.Module:
        """Return the stage, which is saved in a checkpoint."""
        return self.module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)
