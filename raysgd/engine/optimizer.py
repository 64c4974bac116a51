"""The optimizer and the scheduler that the engine returns: the user's own, whose steps count when gradients are complete."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.errors import ConfigError, UsageError
from raysgd.torch.restoring import place_like, place_optimizer_state

if TYPE_CHECKING:
    from raysgd.engine.step import Step

#: What messages of torch have that refuse an operation on distributed tensors.
_OF_DTENSORS = ("DTensor", "placement", "harding")


class EngineOptimizer(Optimizer):
    """An optimizer whose ``step`` and ``zero_grad`` do nothing until the gradients of a step are complete.

    ``param_groups``, ``state`` and ``state_dict`` are those of the optimizer inside.

    Args:
        inner: The user's optimizer, which updates what the engine made of its parameters.
        step: Knows whether gradients are complete.
    """

    def __init__(self, inner: Optimizer, step: Step) -> None:
        self.inner = inner
        self._step = step
        # torch's schedulers warn if the optimizer has made no step before them; here either order is right.
        self._opt_called = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.inner,)  # a copy or a pickle is the optimizer inside

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.inner!r})"

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of a step are complete, so that the next call of `step` uses them."""
        return self._step.is_complete

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make the optimizer's step if the gradients of all its batches are there; else do nothing.

        Raises:
            UsageError: A closure is given, which would make backward passes of its own; or gradients are there that
                did not come from ``engine.backward``.
        """
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure) cannot be used with the engine: call engine.backward(loss), then step()."
            )
        if not self.is_complete:
            self._step.end_batch()
            return
        if self._step.take_gradients():
            self._update()
        self._step.finish()

    def _update(self) -> None:
        try:
            self.inner.step()
        except (RuntimeError, NotImplementedError) as error:
            if not any(is_dtensor(each) for group in self.param_groups for each in group["params"]):
                raise
            if not any(word in str(error) for word in _OF_DTENSORS):
                raise
            raise refuse_optimizer(self.inner) from error
        finally:
            vars(self.inner).pop("found_inf", None)  # of this step; also if it has failed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, unless they belong to a step that is not complete yet."""
        self._step.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned on any number of ranks, also as `raysgd.load_checkpoint` has it."""
        self.inner.load_state_dict(place_optimizer_state(state_dict, self.inner, "state['optimizer']"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UsageError("add_param_group after engine.compose: the engine has placed all parameters; add it before.")


def refuse_optimizer(optimizer: Optimizer) -> ConfigError:
    """Return the error for an optimizer that cannot update parameters of which each rank has a part."""
    return ConfigError(
        f"{type(optimizer).__name__} needs whole parameters, and each rank has a part of them with zero_stage=1, 2 or 3 and with "
        "tensor_parallel: give zero_stage=0, which carries any optimizer, or an optimizer that updates each number by itself, as "
        "AdamW and SGD do."
    )


def follow_steps(scheduler: Any, steps: Step) -> Any:
    """Make a scheduler's ``step`` count only where a step of the optimizer does, before it or after it.

    Returns:
        The scheduler itself.
    """
    kind = type(scheduler)

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if steps.should_schedule():
            kind.step(self, *args, **kwargs)
            steps.on_schedule()

    # By its class: a scheduler's state is all of its attributes.
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})
    return scheduler


def replace_parameters(
    optimizer: Optimizer, replaced: Mapping[nn.Parameter, torch.Tensor], *, dropped: Container[nn.Parameter] = ()
) -> None:
    """Make an optimizer update other tensors in place of its parameters: groups stay, and its state moves to them.

    Args:
        optimizer: Changed in place.
        replaced: The new tensors by the old parameters. State of a parameter's shape is distributed as the new one is.
        dropped: Parameters that other ranks update.

    Raises:
        ConfigError: It keeps its parameters in other places too, or has parameters that were not replaced.
    """
    name = type(optimizer).__name__
    is_same = all(old is new for old, new in replaced.items())
    if not is_same and (kept := sorted(key for key, value in vars(optimizer).items() if _holds(value, replaced))):
        raise ConfigError(
            f"{name} keeps its parameters in {', '.join(kept)} too, so it cannot be moved to the parameters that the engine has "
            "made; give the engine an optimizer that reads param_groups alone, as AdamW does."
        )
    new_groups = []
    for number, group in enumerate(optimizer.param_groups):
        known = [parameter in replaced or parameter in dropped for parameter in group["params"]]
        unknown = [place for place, is_known in enumerate(known) if not is_known]
        if unknown:
            raise ConfigError(
                f"{name} has parameters that are not the model's (group {number}, parameter {unknown[0]}): make the optimizer of "
                "model.parameters()."
            )
        new_groups.append([replaced[parameter] for parameter in group["params"] if parameter in replaced])
    for group, parameters in zip(optimizer.param_groups, new_groups, strict=True):
        group["params"] = parameters
    for old, new in replaced.items():
        if old is not new and old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {
                key: place_like(key, value, new, f"the optimizer's {key}") for key, value in state.items()
            }


def _holds(value: Any, parameters: Mapping[nn.Parameter, Any]) -> bool:
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, torch.Tensor) and item in parameters for item in value
    )


def _same(optimizer: Optimizer) -> Optimizer:
    return optimizer
