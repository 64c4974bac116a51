"""`KerasCallback`: what a training loop of one's own calls of raysgd, for Keras's ``fit``. Worker side.

It speaks to Keras 2 and Keras 3 alike, both of which may be in a process, so it inherits from neither's class: all that
Keras looks at is here. It imports neither.
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
    """Reports each epoch of ``fit``, saves checkpoints, ends when the run is asked to, and goes on where a run was.

    ::

        callback = raysgd.tensorflow.KerasCallback()
        model.fit(data, epochs=10, initial_epoch=callback.restore(model), callbacks=[callback])

    After each epoch it reports ``epoch``, from 0, and Keras's logs as floats. A checkpoint holds ``epoch``, ``weights`` and
    ``optimizer`` as NumPy arrays, and the place in the datasets. All ranks use it alike.

    A checkpoint between two epochs of ``fit`` stands between two epochs of the data, unless ``fit`` is given other
    ``steps_per_epoch``; then it stands where training does.

    Args:
        save_every: Epochs from checkpoint to checkpoint. The last epoch is saved in any case, also where ``fit`` ends early.

    Raises:
        ConfigError: ``save_every`` is less than 1.
    """

    def __init__(self, *, save_every: int = 1) -> None:
        self._save_every = check_count("KerasCallback(save_every)", save_every, minimum=1)
        self._unsaved: int | None = None
        self.model: Any = None
        self.params: Mapping[str, Any] = {}

    def restore(self, model: Any) -> int:
        """Put back the weights and the optimizer's state of the newest checkpoint; returns the epoch to go on with.

        That is what ``initial_epoch`` is to be, 0 where there is no checkpoint. The model must be compiled, and have its
        weights. Called on all ranks, inside or outside the scope of a strategy.

        Raises:
            UsageError: The model has no weights yet, or no optimizer.
            CheckpointError: The checkpoint is not one of such a model with such an optimizer.
        """
        _check_ready(model)
        state = api.load_checkpoint()
        if state is None:
            return 0
        if not isinstance(state, Mapping) or not state.keys() >= {"epoch", "weights", "optimizer"}:
            raise CheckpointError(
                "KerasCallback.restore() found a checkpoint that no KerasCallback saved: it has not 'epoch', 'weights' and "
                "'optimizer'. Load it by raysgd.load_checkpoint() instead."
            )
        with _scope_of(model):
            _put_back("weights of the model", model.weights, state["weights"])
            _put_back("variables of the optimizer", _built_variables(model), state["optimizer"])
        return int(state["epoch"]) + 1

    # -- what Keras calls -------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        self.model = model

    def set_params(self, params: Mapping[str, Any]) -> None:
        self.params = params

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report, save, and stop where all ranks do."""
        # Without a number of steps it was a pass through the data, which Keras may have left at its last batch.
        context.acting().end_passes(only_finished=self.params.get("steps") is not None)
        api.report({"epoch": epoch, **{name: _plain(value) for name, value in (logs or {}).items()}})
        self._unsaved = epoch
        if (epoch + 1) % self._save_every == 0:
            self._save()
        if api.should_stop():
            self.model.stop_training = True

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._save()

    def _save(self) -> None:
        """Save the last epoch, if that is not done."""
        if self._unsaved is None:
            return
        epoch, self._unsaved = self._unsaved, None
        # On every rank: reading what a strategy keeps apart on each, such as moving averages, is a collective.
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
    # Keras 2 asks whether there is something to call in each step.
    _implements_train_batch_hooks = _implements_test_batch_hooks = _implements_predict_batch_hooks = _implements_no_hook


def _check_ready(model: Any) -> None:
    if not model.built:
        raise UsageError(
            "KerasCallback.restore(model): the model has no weights to put back into; give it an Input, or call "
            "model.build(input_shape), before."
        )
    if getattr(model, "optimizer", None) is None:
        raise UsageError("KerasCallback.restore(model): the model has no optimizer; call model.compile(...) before.")


def _scope_of(model: Any) -> Any:
    """Where variables of the model's optimizer are to be made. Other backends of Keras 3 have no strategy."""
    strategy = getattr(model, "distribute_strategy", None)
    return nullcontext() if strategy is None else strategy.scope()


def _built_variables(model: Any) -> list[Any]:
    """The optimizer's variables, made if they are not: ``fit`` makes them in its first step."""
    optimizer = model.optimizer
    if hasattr(optimizer, "build"):
        if not getattr(optimizer, "built", False):  # Keras 2 looks by itself
            optimizer.build(model.trainable_variables)
    else:  # tf.keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def _arrays(variables: list[Any]) -> list[NDArray[Any]]:
    return [np.asarray(variable.numpy()) for variable in variables]


def _put_back(what: str, variables: list[Any], values: list[NDArray[Any]]) -> None:
    """Assign all or none."""
    here, saved = [tuple(variable.shape) for variable in variables], [value.shape for value in values]
    if here != saved:
        raise CheckpointError(
            f"the checkpoint has other {what}: {_told(saved)}, and here are {_told(here)}. Make the same model and optimizer as "
            "in the run that saved it."
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _told(shapes: list[tuple[int, ...]]) -> str:
    return f"{len(shapes)} of shapes {', '.join(map(str, shapes[:8]))}{', ...' if len(shapes) > 8 else ''}"


def _plain(value: Any) -> Any:
    """A float, or a list of them."""
    return np.asarray(value, float).tolist()
