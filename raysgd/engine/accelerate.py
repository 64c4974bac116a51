"""`accelerate`: the engine for a loop that calls ``loss.backward()`` and ``optimizer.step()`` itself. Worker side."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from raysgd._util.text import with_article
from raysgd.engine.checks import check_parts, check_workers
from raysgd.engine.composing import compose
from raysgd.engine.config import (
    WITHOUT_OPTIMIZER,
    EngineConfig,
    Precision,
    current_engine_config,
    merge_configs,
)
from raysgd.engine.model.precision import LossScale
from raysgd.engine.optimizer.engine_optimizer import EngineOptimizer
from raysgd.engine.step import Step
from raysgd.errors import ConfigError, UsageError
from raysgd.session import api
from raysgd.torch.attached import AttachedHook, differentiable
from raysgd.torch.devices import device
from raysgd.torch.meshes import mesh as make_mesh
from raysgd.torch.model import unwrap

MixedPrecision = bool | Literal["bf16", "fp16"]

#: Strategies that need `Engine.backward` or `Engine.compose`, and what to write.
_NOT_HERE = {
    "precision": 'give mixed_precision=True, "bf16" or "fp16"; raysgd.Engine(precision=...) has the others',
    "accumulation_steps": "call loss.backward() several times before optimizer.step(), or use raysgd.Engine",
    "weighted_gradients": "use raysgd.Engine, whose backward(loss, weight) is given the weights",
    "pipeline_parallel": "use raysgd.Engine, whose compose makes the stages",
    "plan": "use raysgd.Engine, whose compose is given the optimizer and batches",
    "memory_per_device": "use raysgd.Engine, whose compose is given the optimizer and batches",
    "micro_batches": "use raysgd.Engine, whose compose makes the stages",
    "pipeline_schedule": "use raysgd.Engine, whose compose makes the stages",
}
_ADVICE = (
    "are not those of its model, as no backward pass came through model(...) since the last step: call the model that accelerate "
    "returned, then backward() on its loss"
)
_REPLACED = "_raysgd_is_replaced"


def accelerate(
    model: nn.Module,
    loss: Any = None,
    *,
    optimizer: Optimizer | None = None,
    mixed_precision: MixedPrecision = False,
    zero_stage: int = 0,
    **strategies: Any,
) -> Any:
    """Prepare a model for a training loop that stays as it is. All ranks call it.

        model = raysgd.accelerate(model, criterion, mixed_precision=True)
        model, optimizer = raysgd.accelerate(model, criterion, optimizer=optimizer, zero_stage=2)
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()

    `raysgd.Engine` has more strategies, for a loop that calls ``engine.backward(loss)``.

    Args:
        model: Changed in place; with ``zero_stage=3`` its parameters are replaced by others.
        loss: The criterion, which is moved to the worker's device. fp16 needs an ``nn.Module``: its result keeps its value,
            and its gradient is scaled. So all that ``backward()`` is called on comes from this criterion.
        optimizer: Made of the model's parameters. Without it, ``zero_stage=3`` needs one that is made afterwards.
        mixed_precision: ``"bf16"`` or ``"fp16"``; True: bf16 if the worker's device computes it, else fp16.
        zero_stage: As in `raysgd.EngineConfig`. 1 and 2 need the optimizer.
        **strategies: More fields of `raysgd.EngineConfig`, such as ``activation_checkpointing="full"`` and
            ``clip_grad_norm=1.0``. Strategies of the command line override those given here.

    Returns:
        The model; ``(model, optimizer)`` if an optimizer is given. Use both in place of those given.

    Raises:
        ConfigError: A strategy does not exist, or cannot be used so; the text says what to do.
        UsageError: There are several workers but no torch process group.
    """
    if "precision" in strategies:
        raise _refuse("precision", strategies["precision"])
    config = EngineConfig(precision=_precision(mixed_precision), zero_stage=zero_stage, **strategies)
    config = merge_configs(config, current_engine_config())
    for name, value in config.given_but({"precision": ("bf16", "fp16")}).items():
        if name in _NOT_HERE:
            raise _refuse(name, value)
    if optimizer is None:
        _check_without_optimizer(config)
    _check_loss(loss, config)
    check_workers(config, config.given())
    check_parts(model, optimizer, None)
    mesh = functools.cache(lambda: make_mesh(tensor_parallel=config.tensor_parallel))
    loss_scale = LossScale(config.precision == "fp16", config.loss_scale)
    before = list(model.parameters())
    composed = compose(config, mesh, model, optimizer)
    step = Step(config, composed, optimizer, mesh, loss_scale, advice=_ADVICE)
    step.attach()
    _PassHooks(step, loss_scale).attach(unwrap(step.model), loss)
    if optimizer is not None:
        return step.model, EngineOptimizer(optimizer, step)
    kept = set(step.model.parameters())
    for replaced in (each for each in before if each not in kept):
        setattr(replaced, _REPLACED, True)
        _check_first_steps()
    return step.model


def _refuse(name: str, value: Any) -> ConfigError:
    return ConfigError(f"accelerate cannot use {name}={value!r}: {_NOT_HERE[name]}.")


def _precision(given: Any) -> Precision:
    if isinstance(given, bool):
        if not given:
            return "fp32"
        return "bf16" if device().type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if given not in ("bf16", "fp16"):
        raise ConfigError(f'mixed_precision={given!r} is not known; give True, False, "bf16" or "fp16".')
    return "bf16" if given == "bf16" else "fp16"


def _check_without_optimizer(config: EngineConfig) -> None:
    call = "model, optimizer = raysgd.accelerate(model, loss, optimizer=optimizer, ...)"
    if config.zero_stage in (1, 2):
        raise ConfigError(
            f"accelerate(zero_stage={config.zero_stage}) divides the optimizer's state, and there is no optimizer: write {call}. "
            "zero_stage=3 takes a model alone."
        )
    if config.precision == "fp16":
        raise ConfigError(
            "accelerate in fp16 scales the loss, and the optimizer's step has to divide the gradients by that scale: write "
            f'{call}. mixed_precision="bf16" needs no scale.'
        )
    if needing := list(config.given_but(WITHOUT_OPTIMIZER)):
        raise ConfigError(f"accelerate(..., {needing[0]}=...) acts in the optimizer's step: write {call}.")


def _check_loss(loss: Any, config: EngineConfig) -> None:
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss is {with_article(type(loss).__name__)}; give the criterion, such as nn.MSELoss().")
    if config.precision == "fp16" and not isinstance(loss, nn.Module):
        given = "there is none" if loss is None else f"loss is {with_article(type(loss).__name__)}"
        raise ConfigError(
            f"accelerate in fp16 scales the gradient of the criterion's result, and {given}: give an nn.Module such as "
            'nn.MSELoss(), mixed_precision="bf16", which needs no scale, or use raysgd.Engine and engine.backward(loss).'
        )
    if api.world_size() > 1 and isinstance(loss, nn.Module) and any(each.requires_grad for each in loss.parameters()):
        raise ConfigError(
            f"{type(loss).__name__} has parameters to train, whose gradients are not averaged over the workers: make it a part "
            "of the model."
        )


#: The hooks that scale the results of criterions.
_scaling: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


class _PassHooks:
    """Hooks by which a step learns of backward passes, since the loop makes them itself.

    Args:
        step: Follows the passes through the model.
        loss_scale: What gradients of the criterion are multiplied by.
    """

    def __init__(self, step: Step, loss_scale: LossScale) -> None:
        self._step, self._scale = step, loss_scale
        self._backward_pass = -1  # that has reached the model last
        self._scaled_pass = -1  # whose loss was scaled last

    def attach(self, model: nn.Module, loss: Any) -> None:
        """Attach the hooks to the model, and in fp16 to the criterion."""
        model.register_forward_hook(AttachedHook(self._after_forward))
        if isinstance(loss, nn.Module):
            loss.to(device())
            if (earlier := _scaling.pop(loss, None)) is not None:  # of an earlier call with the same criterion
                earlier.remove()
            if self._scale.is_enabled:
                _scaling[loss] = loss.register_forward_hook(AttachedHook(self._after_loss))

    def _after_loss(self, module: nn.Module, args: Any, result: Any) -> None:
        for tensor in differentiable(result):
            tensor.register_hook(self._scale_gradient)  # type: ignore[no-untyped-call]

    def _scale_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        self._scaled_pass = torch._C._current_graph_task_id()
        return gradient * self._scale.scale

    def _after_forward(self, module: nn.Module, args: Any, outputs: Any) -> None:
        for tensor in differentiable(outputs):
            tensor.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        current = torch._C._current_graph_task_id()
        if current == self._backward_pass:
            return
        if self._scale.is_enabled and current != self._scaled_pass:
            raise UsageError(
                "backward() in fp16 was called on something that the criterion given to accelerate has not returned, so that its "
                "gradient is not scaled: call it on loss(model(inputs), targets)."
            )
        self._backward_pass = current
        self._step.begin_pass()
        # Twice: DDP and FSDP complete the gradients at the end of the pass too, and must come first.
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        queue_callback(lambda: queue_callback(lambda: self._step.end_pass(1.0)))


@functools.cache
def _check_first_steps() -> None:
    """Raise an error at the first step of an optimizer that was made before its parameters were replaced."""
    checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in checked:
            return
        if any(getattr(each, _REPLACED, False) for group in optimizer.param_groups for each in group["params"]):
            raise UsageError(
                f"this {type(optimizer).__name__} was made before accelerate(zero_stage=3) replaced the model's parameters, so "
                "it would train nothing: make it afterwards of model.parameters(), or give it to accelerate(optimizer=...)."
            )
        checked.add(optimizer)

    register_optimizer_step_pre_hook(check)
