"""The optimizer that the engine returns: the user's own, whose steps count when gradients are complete."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.checkpoint.placing import place_optimizer_state
from raysgd.engine.optimizer.parameters import refuse_optimizer
from raysgd.errors import UsageError
from raysgd.session import api
from raysgd.torch.devices import device

if TYPE_CHECKING:
    from raysgd.engine.step import Step

#: What messages of torch have that refuse an operation on distributed tensors.
_OF_DTENSORS = ("DTensor", "placement", "harding")


class EngineOptimizer(Optimizer):
    """An optimizer whose ``step`` and ``zero_grad`` do nothing until the gradients of a step are complete.

    ``param_groups``, ``state`` and ``state_dict`` are those of the optimizer inside, and have the model's parameters. While one
    of its methods runs, it finds what the engine made of these. All ranks call such a method.

    Args:
        inner: The user's optimizer, which updates what the engine made of its parameters.
        step: Knows whether gradients are complete.
    """

    def __init__(self, inner: Optimizer, step: Step) -> None:
        self.inner = inner
        self._step = step
        _share_metrics()
        # torch's schedulers warn if the optimizer has made no step before them; here either order is right.
        self._opt_called = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        found = getattr(self.inner, name)
        # Such as ``eval`` of an optimizer that exchanges weights for an evaluation.
        is_own = isinstance(found, MethodType) and not name.startswith("_")
        return functools.partial(self._call_own, found) if is_own else found

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
        self._step.share_buffers()  # ranks exchange nothing more once the changes have begun
        if self._step.take_gradients():
            self._update()
        self._step.finish()

    def _update(self) -> None:
        hooks = self.inner._optimizer_step_pre_hooks, self.inner._optimizer_step_post_hooks
        for hook in hooks[0].values():
            hook(self, (), {})
        # Hooks find the parameters, as the loop does.
        self.inner._optimizer_step_pre_hooks, self.inner._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        try:
            self._call(self.inner.step)
        finally:
            self.inner._optimizer_step_pre_hooks, self.inner._optimizer_step_post_hooks = hooks
            vars(self.inner).pop("found_inf", None)  # of this step; also if it has failed
        for hook in hooks[1].values():
            hook(self, (), {})

    def _call_own(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method that torch's optimizers do not have, and that may make a step, as those of SAM do."""
        name, has_stepped = method.__name__, False

        def on_step(*_: Any) -> None:
            nonlocal has_stepped
            self._check_own_step(name)
            has_stepped = True

        handle = register_optimizer_step_pre_hook(on_step)
        try:
            found = self._call(method, *args, **kwargs)
        except UsageError:
            raise
        except RuntimeError as error:
            if self._step.hides_gradients:
                raise _refuse_hidden(name) from error
            raise
        finally:
            handle.remove()
        if has_stepped:
            self._step.finish()
            self._step.share_buffers()
        return found

    def _check_own_step(self, name: str) -> None:
        """Check that a method of the user's optimizer may make a step with the gradients that there are.

        Raises:
            UsageError: They are not complete, not finite, or are to be clipped in `step`.
        """
        if not self.is_complete:
            raise _refuse_hidden(name)
        if self._step.clips:
            raise UsageError(
                f"optimizer.{name}() makes a step by itself, and clip_grad_norm= clips in optimizer.step() alone: leave it out, "
                f"and call torch.nn.utils.clip_grad_norm_ before optimizer.{name}()."
            )
        if not self._step.is_finite:
            raise UsageError(
                f"gradients are infinite or NaN in fp16, and optimizer.{name}() makes a step by itself, which the engine cannot "
                'skip: give precision="bf16".'
            )

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the optimizer, which finds its shards and may change them and their gradients."""
        with self._step.optimizer_calls.in_place(self.inner):
            has_shards = any(is_dtensor(each) for group in self.param_groups for each in group["params"])
            try:
                return method(*args, **kwargs)
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                is_of_torch = isinstance(error, AssertionError) and not error.args  # torch has some without a text
                if not has_shards or not (is_of_torch or any(word in str(error) for word in _OF_DTENSORS)):
                    raise
                raise refuse_optimizer(self.inner) from error

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or make them zero, unless they belong to a step that is not complete yet."""
        self._step.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned on any number of ranks, also as `raysgd.load_checkpoint` has it."""
        with self._step.optimizer_calls.in_place(self.inner):
            self.inner.load_state_dict(place_optimizer_state(state_dict, self.inner, "state['optimizer']"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Let the optimizer update more parameters of the model, such as layers that were frozen.

        Raises:
            UsageError: Each rank has one stage of a pipeline, so that it does not know the parameters of the others.
        """
        if self._step.composed.pipeline is not None:
            raise UsageError(
                "add_param_group after engine.compose cannot be used with pipeline_parallel, where each rank has the parameters "
                "of its stage alone: add the group before, and freeze its parameters until they shall be trained."
            )
        self.inner.add_param_group(param_group)
        if (numbers := self._step.composed.numbers) is not None:
            numbers.follow(self.inner, {})


@functools.cache
def _share_metrics() -> None:
    """Let `ReduceLROnPlateau` find the mean of the ranks' metrics, so that all ranks have the same learning rates."""
    step = ReduceLROnPlateau.step

    @functools.wraps(step)
    def shared(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.optimizer, EngineOptimizer) and (size := api.world_size()) > 1:
            total = torch.tensor(float(metrics), dtype=torch.float64, device=device())
            dist.all_reduce(total)
            metrics = float(total) / size
        step(self, metrics, *args, **kwargs)

    ReduceLROnPlateau.step = shared  # type: ignore[method-assign]


def _same(optimizer: Optimizer) -> Optimizer:
    return optimizer


def _refuse_hidden(name: str) -> UsageError:
    return UsageError(
        f"optimizer.{name}() needs the gradients of a step, and these are not complete before its last batch: call it where "
        "optimizer.is_complete, or give accumulation_steps=1."
    )
