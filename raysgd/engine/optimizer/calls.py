"""The calls of optimizers that update a model: of the engine's, and of others that the loop has for layers of it. Worker side."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from raysgd._util.text import with_article
from raysgd.engine.gradients.accumulation import Accumulation
from raysgd.errors import UsageError

if TYPE_CHECKING:
    from raysgd.engine.data_parallel.replicas import DataParallel

#: Those of this process.
_calls: weakref.WeakSet[OptimizerCalls] = weakref.WeakSet()


class OptimizerCalls:
    """Lets optimizers find the shards of a model's parameters while they run.

    Args:
        given: The user's optimizer that the engine was given, if there is one.
        data_parallel: Holds the shards.
        accumulation: Knows whether gradients are complete.
        parameters: Returns the model's, by name.
        is_scaled: Gradients may be left out of a step, as in fp16.
    """

    def __init__(
        self,
        given: Optimizer | None,
        data_parallel: DataParallel,
        accumulation: Accumulation,
        parameters: Callable[[], Mapping[str, nn.Parameter]],
        *,
        is_scaled: bool,
    ) -> None:
        self._given, self._data_parallel, self._accumulation = given, data_parallel, accumulation
        self._parameters, self._is_scaled = parameters, is_scaled
        self._running: Optimizer | None = None
        self._other: AbstractContextManager[None] | None = None  # around the step of another optimizer
        if given is not None:
            _calls.add(self)
            _watch_steps()

    @contextmanager
    def in_place(self, optimizer: Optimizer) -> Iterator[None]:
        """Let an optimizer find its shards, made of the parameters as they are now; see `OptimizerShards.in_place`."""
        self._running = optimizer
        try:
            # Others run between two steps, too, and find the gradients that are there.
            with_gradients = self._accumulation.is_complete or optimizer is not self._given
            with self._data_parallel.shards.in_place(optimizer, with_gradients=with_gradients):
                yield
        finally:
            self._running = None

    def begin_step(self, optimizer: Optimizer) -> None:
        """Begin a step of any optimizer.

        Raises:
            UsageError: It is the user's, without the engine's; or it would not find the gradients of the plain loop.
        """
        if self._running is not None:  # it is a part of the one that runs
            return
        if optimizer is self._given:
            raise UsageError(
                f"step() was called on the {type(optimizer).__name__} that the engine was given: it does not know there whether "
                "the gradients are complete, nor which shards it updates. Call step() on the optimizer that was returned."
            )
        updated = {each for group in optimizer.param_groups for each in group["params"]}
        name = next((name for name, each in self._parameters().items() if each in updated), None)
        if name is None:
            return
        if self._is_scaled or (self._accumulation.is_open and not self._accumulation.is_complete):
            raise UsageError(
                f"{with_article(type(optimizer).__name__)} updates {name} of the model, next to the optimizer of engine.compose: "
                "in fp16 and within an accumulated step its gradient is not there. Add the parameters to the engine's optimizer "
                "by optimizer.add_param_group."
            )
        self._other = self.in_place(optimizer)
        self._other.__enter__()

    def end_step(self, optimizer: Optimizer) -> None:
        """End a step of any optimizer."""
        if self._other is not None and optimizer is self._running:
            other, self._other = self._other, None
            other.__exit__(None, None, None)


@functools.cache
def _watch_steps() -> None:
    """Let each step of an optimizer begin and end with the models of this process."""

    def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for each in list(_calls):
            each.begin_step(optimizer)

    def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for each in list(_calls):
            each.end_step(optimizer)

    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(end)
