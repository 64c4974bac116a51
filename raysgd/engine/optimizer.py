"""The optimizer that the engine returns: the user's own, whose steps count when gradients are complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.engine.optimizer_parameters import refuse_optimizer
from raysgd.engine.step import Step
from raysgd.errors import UsageError
from raysgd.torch.restoring import place_optimizer_state

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


def _same(optimizer: Optimizer) -> Optimizer:
    return optimizer
