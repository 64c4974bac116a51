"""`TrainHook`: what is called at the moments of a declarative training. Worker side, without torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.config.argument_names import nearest
from raysgd.errors import ConfigError, UnknownArgumentError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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

    ``trainer`` is the `raysgd.declarative.loop.TrainingLoop`. A hook may leave out the last arguments that it does not need:
    ``on_train_step_end(self, trainer, outputs)``. A method whose name begins like that of a hook and is none is refused before
    the training starts.

    In a step, they are called in the order: ``on_step_start``, ``before_zero_grad``, ``after_zero_grad``,
    ``on_train_step_start``, ``before_sync_grad``, ``after_sync_grad``, ``on_train_step_end``,
    ``after_aggregate_train_step_outputs``, ``before_gnorm_clip``, ``after_gnorm_clip``, ``before_optimizer_step``,
    ``after_optimizer_step``, ``before_log_train_metrics``, ``on_step_end``.
    """

    def after_setup(self, trainer: Any) -> None:
        """Everything is made, and the checkpoint to resume from is loaded."""

    def on_finalize(self, trainer: Any) -> None:
        """The training has ended, also if it failed or had nothing to do."""

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
        """An epoch has ended, and is saved; or ``max_train_steps`` has ended the training within it."""

    def on_step_start(self, trainer: Any, epoch: int, idx: int) -> None:
        """A step begins; ``idx`` counts the epoch's steps from 0."""

    def on_step_end(
        self, trainer: Any, epoch: int, idx: int, step_metrics: dict[str, Any], aggregated_outputs: AggregatedOutputs
    ) -> None:
        """A step is made, counted and logged. What is due after it follows: validation, report, checkpoint."""

    def on_train_step_start(self, trainer: Any, batches: list[Any], idx: int) -> None:
        """The micro-batches of a step are about to go forward."""

    def on_train_step_end(self, trainer: Any, outputs: list[Any], batches: list[Any], idx: int) -> None:
        """All micro-batches have gone forward and backward; ``outputs`` are those of the model."""

    def on_val_step_start(self, trainer: Any, batches: list[Any], idx: int) -> None:
        """A step of a validation begins, on as many micro-batches as a step of the training has."""

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

    def before_log_train_metrics(
        self, trainer: Any, step_metrics: dict[str, Any], aggregated_outputs: AggregatedOutputs
    ) -> None:
        """The metrics of a step are about to be logged; what is changed in the dict is what is logged and reported.

        ``loss`` is ``train_loss`` again, for reading: it is not reported.
        """

    def before_log_val_metrics(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """The metrics of a validation are about to be logged; what is changed in the dict is what is logged and reported."""

    def on_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint was read, and is about to be restored: ``model``, ``optimizer``, ``lr_scheduler`` and ``train_status``.

        It also has what `on_save_checkpoint` of this rank added, or of rank 0 if as many ranks did not save it. What is changed
        in ``model``, ``optimizer`` and ``lr_scheduler`` is what is restored. Tensors that ranks saved in shards are of
        `raysgd.SavedArray`: ``value.read()`` reads one.
        """

    def after_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """The checkpoint is restored."""

    def on_save_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be saved: ``model``, ``optimizer``, ``lr_scheduler``, ``train_status`` and ``rank``.

        Values that are added under other names are saved too: numbers, texts, tensors, arrays, and dicts and lists of them. Other
        objects have to be made of such values again in `on_load_checkpoint`.
        """


#: The names of all hooks, and what each is called with.
HOOKS = {
    name: tuple(inspect.signature(hook).parameters)[1:]
    for name, hook in vars(TrainHook).items()
    if not name.startswith("_")
}
#: How the names of all hooks begin.
_BEGINNINGS = tuple({f"{name.partition('_')[0]}_" for name in HOOKS})


def check_names(owner: str, names: Iterable[str]) -> None:
    """Check that the methods of a class with hooks that are named like hooks are hooks.

    Raises:
        UnknownArgumentError: One is not.
    """
    for name in names:
        if name.startswith(_BEGINNINGS) and name not in HOOKS:
            raise UnknownArgumentError(
                f"{owner} has the method {name}, which is not a hook{nearest(name, HOOKS)}: no training calls it. If the class "
                "calls it itself, begin its name otherwise, such as with _."
            )


def count_arguments(hook: str, what: str, signature: inspect.Signature) -> int:
    """Return how many of a hook's arguments a function takes: all that it needs, and those for which it has a default by name.

    Raises:
        ConfigError: It cannot be called with them.
    """
    arguments = HOOKS[hook]
    number = 0
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            number = len(arguments)
        is_named = parameter.name in arguments[number : number + 1]
        if parameter.kind not in _POSITIONAL or (parameter.default is not parameter.empty and not is_named):
            break
        number += 1
    try:
        if not number:
            raise TypeError
        signature.bind(*arguments[:number])
    except TypeError:
        raise ConfigError(
            f"{what} is called with ({', '.join(arguments)}), of which it may leave out the last, but takes {signature}."
        ) from None
    return number


class Hooks:
    """Calls hooks of several owners in their order.

    Args:
        owners: Objects with hooks, by the names that messages give them.

    Raises:
        ConfigError: An owner has a method that is named like a hook and is none, or a hook cannot be called as it is.
    """

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self._calls: dict[str, list[tuple[Callable[..., Any], int]]] = {name: [] for name in HOOKS}
        for what, owner in owners.items():
            check_names(what, _list_methods(type(owner)))
            for name in HOOKS:
                if callable(call := getattr(owner, name, None)) and getattr(type(owner), name, None) is not getattr(
                    TrainHook, name
                ):
                    self._calls[name].append((call, _count_taken(name, f"{what}.{name}", call)))

    def call(self, name: str, *args: Any) -> None:
        """Call this hook of every owner that has it."""
        for call, number in self._calls[name]:
            call(*args[:number])

    def has(self, *names: str) -> bool:
        """Return whether an owner has one of these hooks."""
        return any(self._calls[name] for name in names)


def _list_methods(kind: type) -> list[str]:
    """Return the names of a class's methods; of a model that is a `TrainHook`, those of the classes that are."""
    kinds = [each for each in kind.__mro__ if not issubclass(kind, TrainHook) or issubclass(each, TrainHook)]
    return [name for each in kinds for name, value in vars(each).items() if inspect.isroutine(value)]


def _count_taken(name: str, what: str, function: Callable[..., Any]) -> int:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C may have none
        return len(HOOKS[name])
    return count_arguments(name, what, signature)
