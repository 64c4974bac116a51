"""`KerasCallback`: reports, checkpoints and resuming for Keras's ``fit``. Worker side.

A process may use both Keras 2 and Keras 3, so the callback imports neither and inherits from neither's base class: it has
every attribute that they look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysgd.config.checks import check_count
from raysgd.errors import CheckpointError, UsageError
from raysgd.session import api, context


class KerasCallback:
    """Reports each epoch of ``fit``, saves checkpoints, stops when the run should stop, and resumes from a checkpoint.

        callback = raysgd.tensorflow.KerasCallback()
        model.fit(data, epochs=10, initial_epoch=callback.restore(model), callbacks=[callback])

    After each epoch it reports ``epoch``, counted from 0, and Keras's logs as floats. A checkpoint holds ``epoch``,
    ``weights`` and ``optimizer`` as NumPy arrays, and the position in the datasets. All ranks must use the callback.

    A checkpoint after an epoch of ``fit`` is taken between two epochs of the data. With ``steps_per_epoch`` it is taken at
    the current position in the data.

    Args:
        save_every: Epochs between checkpoints. The last epoch is always saved, also if ``fit`` ends early.

    Raises:
        ConfigError: ``save_every`` is less than 1.
    """

    def __init__(self, *, save_every: int = 1) -> None:
        self._save_every = check_count("KerasCallback(save_every)", save_every, minimum=1)
        self._unsaved: int | None = None
        self.model: Any = None
        self.params: Mapping[str, Any] = {}

    def restore(self, model: Any) -> int:
        """Restore the weights and the optimizer's state from the newest checkpoint, and return the epoch to continue with.

        Pass it to ``fit`` as ``initial_epoch``; it is 0 if there is no checkpoint. The model must be compiled and built. Call
        it on all ranks, inside or outside the scope of a strategy.

        Raises:
            UsageError: The model has no weights yet, or no optimizer.
            CheckpointError: The checkpoint is of another model or optimizer, or not from a KerasCallback.
        """
        _check_ready(model)
        state = api.load_checkpoint()
        if state is None:
            return 0
        if not isinstance(state, Mapping) or not state.keys() >= {"epoch", "weights", "optimizer"}:
            raise CheckpointError(
                "KerasCallback.restore() found a checkpoint without 'epoch', 'weights' and 'optimizer', which a KerasCallback "
                "did not save: load it with raysgd.load_checkpoint() instead."
            )
        with _scope_of(model):
            _assign("weights of the model", model.weights, state["weights"])
            _assign("variables of the optimizer", _built_variables(model), state["optimizer"])
        return int(state["epoch"]) + 1

    # -- called by Keras ----------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        self.model = model

    def set_params(self, params: Mapping[str, Any]) -> None:
        self.params = params

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report, save, and stop if the run should stop."""
        # Without a number of steps an epoch is a pass over the data, which Keras may leave at the last batch.
        context.acting().end_epochs(only_finished=self.params.get("steps") is not None)
        api.report({"epoch": epoch, **{name: _plain(value) for name, value in (logs or {}).items()}})
        self._unsaved = epoch
        if (epoch + 1) % self._save_every == 0:
            self._save()
        if api.should_stop():
            self.model.stop_training = True

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._save()

    def _save(self) -> None:
        """Save the last epoch unless it is saved."""
        if self._unsaved is None:
            return
        epoch, self._unsaved = self._unsaved, None
        # On every rank, since reading variables that a strategy keeps per replica, such as moving averages, is a collective.
        weights, optimizer = _arrays(self.model.weights), _arrays(_built_variables(self.model))
        state = {"epoch": epoch, "weights": weights, "optimizer": optimizer}
        api.save_checkpoint(state if api.world_rank() == 0 else None)

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        return

    def _implements_no_hook(self) -> bool:
        return False

    on_epoch_begin = on_train_begin = _ignore
    on_batch_begin = on_train_batch_begin = on_test_batch_begin = on_predict_batch_begin = _ignore
    on_batch_end = on_train_batch_end = on_test_batch_end = on_predict_batch_end = _ignore
    on_test_begin = on_test_end = on_predict_begin = on_predict_end = _ignore
    # Keras 2 calls these to find out whether a hook is to be called in each step.
    _implements_train_batch_hooks = _implements_test_batch_hooks = _implements_predict_batch_hooks = _implements_no_hook


def _check_ready(model: Any) -> None:
    if not model.built:
        raise UsageError(
            "KerasCallback.restore(model): the model has no weights yet: give it an Input, or call model.build(input_shape) "
            "before."
        )
    if getattr(model, "optimizer", None) is None:
        raise UsageError("KerasCallback.restore(model): the model has no optimizer: call model.compile(...) before.")


def _scope_of(model: Any) -> Any:
    """Return the scope in which to make the optimizer's variables. Other backends of Keras 3 have no strategy."""
    strategy = getattr(model, "distribute_strategy", None)
    return nullcontext() if strategy is None else strategy.scope()


def _built_variables(model: Any) -> list[Any]:
    """Return the optimizer's variables. They are made if ``fit`` has not made them yet, in its first step."""
    optimizer = model.optimizer
    if hasattr(optimizer, "build"):
        if not getattr(optimizer, "built", False):  # Keras 2 has no `built` and checks by itself
            optimizer.build(model.trainable_variables)
    else:  # tf.keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def _arrays(variables: list[Any]) -> list[NDArray[Any]]:
    return [np.asarray(variable.numpy()) for variable in variables]


def _assign(what: str, variables: list[Any], values: list[NDArray[Any]]) -> None:
    """Assign all values, or none if a shape differs."""
    here, saved = [tuple(variable.shape) for variable in variables], [value.shape for value in values]
    if here != saved:
        raise CheckpointError(
            f"the checkpoint has other {what}: {_format(saved)}, but here are {_format(here)}. Make the same model and optimizer "
            "as in the run that saved it."
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _format(shapes: list[tuple[int, ...]]) -> str:
    return f"{len(shapes)} of shapes {', '.join(map(str, shapes[:8]))}{', ...' if len(shapes) > 8 else ''}"


def _plain(value: Any) -> Any:
    """Convert to a float or a list of floats."""
    return np.asarray(value, float).tolist()
