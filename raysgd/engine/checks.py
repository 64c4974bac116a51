"""Checks of what `raysgd.Engine` and `raysgd.accelerate` are given, before anything is changed. Worker side."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from raysgd._util.text import with_article
from raysgd.engine.config import EngineConfig
from raysgd.errors import ConfigError, UsageError
from raysgd.session import api, context
from raysgd.torch.model import is_wrapped


def check_workers(config: EngineConfig, given: Container[str]) -> None:
    """Check that the workers of this run fit the strategies.

    Args:
        config: The strategies.
        given: Names of those that a plan may not choose.

    Raises:
        ConfigError: They do not.
        UsageError: There are several workers but no torch process group.
    """
    identity, needed = context.current().identity, config.workers_per_replica
    if context.current().logical is not None:
        raise ConfigError(
            "the engine adds gradients in orders of its own, so it cannot train logical workers: use "
            "raysgd.torch.logical_steps with a plain model, or leave out Trainer(logical_workers=...)."
        )
    is_planned = config.plan is not None
    if config.memory_per_device is not None and not is_planned:
        raise ConfigError('memory_per_device is what plan="auto" may use, and plan is None: give plan="auto" too.')
    # What is not given, a plan can choose.
    is_fitting = identity.workers_per_replica == needed or (
        is_planned
        and identity.workers_per_replica % needed == 0
        and not all(name in given for name in ("tensor_parallel", "pipeline_parallel"))
    )
    if not is_fitting:
        sizes = config.tensor_parallel, config.pipeline_parallel
        raise ConfigError(
            f"tensor_parallel={sizes[0]} and pipeline_parallel={sizes[1]} need {needed} workers for each replica of the model, "
            f"and the Trainer was made with workers_per_replica={identity.workers_per_replica}: give "
            f"Trainer(..., workers_per_replica={needed}), or on the command line `raysgd run --engine.tensor-parallel "
            f"{sizes[0]} --engine.pipeline-parallel {sizes[1]}`."
        )
    if api.world_size() > 1 and not dist.is_initialized():
        raise UsageError(
            "the engine needs a torch process group for several workers: use Trainer(backend='torch'); a script under "
            "`raysgd run --backend env` calls torch.distributed.init_process_group() first."
        )


def check_parts(model: Any, optimizer: Any, lr_scheduler_fn: Any) -> None:
    """Check the parts of a loop that `raysgd.Engine.compose` gets.

    Raises:
        ConfigError: One of them cannot be composed; the text says what to do.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"engine.compose(model=...) is {with_article(type(model).__name__)}; give a torch module.")
    if wrapped := [type(module).__name__ for module in model.modules() if is_wrapped(module)]:
        raise ConfigError(
            f"the model, a {type(model).__name__}, is wrapped by {wrapped[0]} already, and the engine does that itself: give "
            "the model inside."
        )
    devices = sorted({str(tensor.device) for tensor in model.parameters()})
    if len(devices) > 1:
        raise ConfigError(
            f"the model's parameters are on {len(devices)} devices ({', '.join(devices)}), and the engine moves a model to "
            "one: make it on one device, and give zero_stage=3 if it is too large for that."
        )
    if devices == ["meta"]:
        raise ConfigError(
            "the model is on the meta device, where parameters have no values: make it on the CPU, or load its values first."
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer is {with_article(type(optimizer).__name__)}; give a torch optimizer.")
    if lr_scheduler_fn is None:
        return
    if hasattr(lr_scheduler_fn, "optimizer") or not callable(lr_scheduler_fn):
        raise ConfigError(
            f"lr_scheduler_fn is {with_article(type(lr_scheduler_fn).__name__)} that belongs to an optimizer already; give a "
            "function that makes it, such as functools.partial(StepLR, step_size=30)."
        )
    if optimizer is None:
        raise ConfigError("lr_scheduler_fn needs an optimizer: give optimizer=... too.")


def check_loss(loss: Any, parameters: Iterable[nn.Parameter], *, is_pipelined: bool) -> None:
    """Check that a loss is one, and was computed from what is trained.

    Raises:
        UsageError: It is not.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        is_tensor = isinstance(loss, torch.Tensor)
        what = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else with_article(type(loss).__name__)
        raise UsageError(
            f"engine.backward(loss) got {'None' if loss is None else what}; give the mean loss of the batch, a scalar tensor "
            "as the model and the criterion return it, such as loss.mean() and not loss.item()."
        )
    if not is_pipelined and not loss.requires_grad:
        is_frozen = not any(each.requires_grad for each in parameters)
        why = "all parameters are frozen" if is_frozen else "it was detached, or computed under torch.no_grad()"
        raise UsageError(
            f"engine.backward(loss) got a loss that has no gradient: {why}. Compute it from the output of the model that "
            "engine.compose returned, some of whose parameters are trained (requires_grad=True)."
        )
