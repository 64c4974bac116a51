"""Checks of what `raysgd.Engine` and `raysgd.accelerate` are given, before anything is changed. Worker side."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from raysgd._util.text import with_article
from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.engine.config import EngineConfig
from raysgd.engine.optimizer.shards import GradientHook
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


def check_updated(optimizer: Optimizer, known: Container[torch.Tensor]) -> None:
    """Check that what an optimizer updates is the model's, or has no gradient.

    Raises:
        UsageError: The loop has given the optimizer other parameters.
    """
    groups = optimizer.param_groups
    if any(each.grad is not None and each not in known for group in groups for each in group["params"]):
        raise UsageError(
            "the optimizer has a parameter that is not the model's, so that its gradient is not averaged over the workers: "
            "make it a part of the model that engine.compose returned."
        )


def check_hooks(
    known: Mapping[nn.Parameter, tuple[int, int]], parameters: Iterable[nn.Parameter], *, is_late: bool
) -> None:
    """Check that no hook of the loop has found another gradient than that of the plain loop.

    Args:
        known: `count_hooks` of each parameter when it was first seen.
        parameters: Those of the model.
        is_late: Gradients are complete after all hooks.

    Raises:
        UsageError: One has.
    """
    for each in parameters:
        (num_before, num_after), (before, after) = known[each], count_hooks(each)
        if after > num_after or (is_late and before > num_before):
            raise UsageError(
                "a parameter has a hook, which would not find its gradient: with several workers, zero_stage=3 or fp16 it is "
                "complete after the backward pass. Change parameter.grad before optimizer.step() in place of the hook."
            )


def count_hooks(parameter: nn.Parameter) -> tuple[int, int]:
    """Return how many hooks of others a parameter has, for its gradient and after that."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return len(parameter._backward_hooks or ()), sum(not isinstance(each, GradientHook) for each in after.values())


def check_weight(config: EngineConfig, weight: float | None, *, is_pipelined: bool, is_known: bool) -> None:
    """Check the weight that ``engine.backward`` got.

    Args:
        config: The strategies.
        weight: Of the batch, or None.
        is_pipelined: The model's stages make the backward passes.
        is_known: The engine knows the rows of the batch.

    Raises:
        UsageError: It cannot be used, or is missing.
    """
    if not config.weighted_gradients:
        if weight is not None:
            raise UsageError("engine.backward(weight=...) needs Engine(weighted_gradients=True).")
    elif is_pipelined:
        if weight is not None:
            raise UsageError(
                "with pipeline_parallel the backward passes are made when the model is called, before the weight is known: "
                "leave out engine.backward(weight=...); batches are weighted by their rows."
            )
    elif weight is None and not is_known:
        raise UsageError(
            "weighted_gradients=True: the engine has handed out no batch, so it does not know its rows: call "
            "engine.backward(loss, weight=number), or give the loader to compose(train_dataloader=...)."
        )


def check_saved(*, is_open: bool) -> None:
    """Check that no gradients are lost in a checkpoint.

    Raises:
        UsageError: There are some that the optimizer has not used.
    """
    if is_open:
        raise UsageError(
            "raysgd.save_checkpoint was called within a step of the engine, and does not save the gradients of batches that "
            "count as trained on: call it after optimizer.step() of a complete step, or between two batches "
            "engine.save_checkpoint(**more), which saves the gradients too."
        )


NO_AVERAGES = (
    "zero_stage=3 divides the parameters over the ranks, so that neither copy.deepcopy(model) nor "
    "torch.optim.swa_utils.AveragedModel has whole ones: give zero_stage=2, with which both work."
)


def check_averages() -> None:
    """Let averages that were made before the parameters were divided or converted raise an error that says so."""
    from torch.optim.swa_utils import AveragedModel

    update = AveragedModel.update_parameters
    if getattr(update, "is_checked", False):
        return

    @functools.wraps(update)
    def checked(self: Any, model: nn.Module) -> Any:
        for own, new in zip(self.module.parameters(), model.parameters(), strict=False):
            if is_dtensor(new) and not is_dtensor(own):
                raise ConfigError(NO_AVERAGES)
            if own.dtype != new.dtype:
                raise ConfigError(
                    f"AveragedModel has averages in {own.dtype}, and the model's parameters are {new.dtype} now: with "
                    'precision="bf16-true" make it of the model that the engine returned.'
                )
        return update(self, model)

    checked.is_checked = True  # type: ignore[attr-defined]
    AveragedModel.update_parameters = checked  # type: ignore[method-assign]
