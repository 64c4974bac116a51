"""`TrainHook`: what is called at the moments of a declarative training. Worker side, without torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from raysgd.errors import ConfigError


@dataclass
class AggregatedOutputs:
    """The outputs of all micro-batches of a step, of all replicas of the model.

    Attributes:
        loss_sum: The sum of their losses.
        num_batches: The number of micro-batches.
        num_tokens: The number of tokens, which ``grad_reduction="per-token-mean"`` needs.
        aggregated_outputs: Anything else.
    """

    loss_sum: float | None = None
    num_batches: int | None = None
    num_tokens: int | None = None
    aggregated_outputs: Any = None


class TrainHook:
    """Methods that a training calls on every rank. A model, optimizer or scheduler of this class is called too, in this order.

    ``trainer`` is the `raysgd.declarative.loop.TrainingLoop`.

    In a step, they are called in the order: ``before_zero_grad``, ``after_zero_grad``, ``on_train_step_start``,
    ``before_sync_grad``, ``after_sync_grad``, ``on_train_step_end``, ``after_aggregate_train_step_outputs``,
    ``before_gnorm_clip``, ``after_gnorm_clip``, ``before_optimizer_step``, ``after_optimizer_step``.
    """

    def after_setup(self, trainer: Any) -> None:
        """Everything is made, and no checkpoint is loaded yet."""

    def on_train_start(self, trainer: Any) -> None:
        """The training begins, or is resumed."""

    def on_train_end(self, trainer: Any) -> None:
        """The training has ended."""

    def on_val_start(self, trainer: Any) -> None:
        """A validation begins."""

    def on_val_end(self, trainer: Any, val_loss: float) -> None:
        """A validation has ended."""

    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        """An epoch, counted from 0, begins or is resumed."""

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        """An epoch has ended; not called if ``max_train_steps`` ends the training within it."""

    def on_train_step_start(self, trainer: Any, batches: list[Any], idx: int) -> None:
        """A step begins, on these micro-batches; ``idx`` counts the epoch's steps from 0."""

    def on_train_step_end(self, trainer: Any, outputs: list[Any], batches: list[Any], idx: int) -> None:
        """All micro-batches have gone forward and backward; ``outputs`` are those of the model."""

    def on_val_step_start(self, trainer: Any, batches: list[Any], idx: int) -> None:
        """A step of a validation begins."""

    def on_val_step_end(self, trainer: Any, outputs: list[Any], batches: list[Any], idx: int) -> None:
        """A step of a validation has ended."""

    def after_aggregate_train_step_outputs(
        self, trainer: Any, aggregated_outputs: AggregatedOutputs, train_loss: float, idx: int
    ) -> None:
        """The outputs of all ranks were aggregated."""

    def after_aggregate_val_step_outputs(
        self, trainer: Any, aggregated_outputs: AggregatedOutputs, val_loss: float, idx: int
    ) -> None:
        """The outputs of all ranks were aggregated; ``val_loss`` is that of this step."""

    def before_zero_grad(self, trainer: Any) -> None:
        """The gradients of the last step are about to be dropped."""

    def after_zero_grad(self, trainer: Any) -> None:
        """There are no gradients."""

    def before_sync_grad(self, trainer: Any) -> None:
        """The last micro-batch of the step is about to go backward; its gradients are averaged over the ranks meanwhile.

        The gradients are those of the micro-batches before it, on this rank.
        """

    def after_sync_grad(self, trainer: Any) -> None:
        """The gradients of all micro-batches are averaged over the ranks; they are not scaled yet."""

    def before_gnorm_clip(self, trainer: Any) -> None:
        """The gradients are scaled, and their norm is about to be computed."""

    def after_gnorm_clip(self, trainer: Any, gnorm: Any) -> None:
        """The gradients are clipped, if there is a limit; ``gnorm`` is their norm before that, a scalar tensor."""

    def before_optimizer_step(self, trainer: Any) -> None:
        """The optimizer is about to make its step."""

    def after_optimizer_step(self, trainer: Any) -> None:
        """The optimizer has made its step."""

    def on_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint was loaded; ``checkpoint`` has what `on_save_checkpoint` of this rank added, or of rank 0 if as many ranks
        did not save it.
        """

    def on_save_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be saved; values that are added to ``checkpoint`` are saved too.

        Numbers, texts, tensors, arrays, and dicts and lists of them can be saved; other objects have to be made of such values
        again in `on_load_checkpoint`.
        """


#: The names of all hooks.
HOOKS = tuple(name for name in vars(TrainHook) if not name.startswith("_"))


class Hooks:
    """Calls hooks of several owners in their order."""

    def __init__(self, owners: Iterable[Any]) -> None:
        self._calls: dict[str, list[Callable[..., Any]]] = {name: [] for name in HOOKS}
        for owner in owners:
            for name in HOOKS:
                if callable(call := getattr(owner, name, None)) and getattr(type(owner), name, None) is not getattr(
                    TrainHook, name
                ):
                    self._calls[name].append(call)

    def call(self, name: str, *args: Any) -> None:
        """Call this hook of every owner that has it."""
        for call in self._calls[name]:
            call(*args)

    def has(self, name: str) -> bool:
        """Return whether an owner has this hook."""
        return bool(self._calls[name])


class FunctionHooks:
    """Hooks that are functions, by the names of hooks."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        for name, function in functions.items():
            if not callable(function):
                raise ConfigError(f"hook.{name} is not callable; give the full name of a function.")
            _check_signature(name, function)
            setattr(self, name, function)


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    arguments = list(inspect.signature(getattr(TrainHook, name)).parameters)[1:]
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C may have none
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ConfigError(f"hook.{name} is called with ({', '.join(arguments)}), but takes {signature}.") from None
