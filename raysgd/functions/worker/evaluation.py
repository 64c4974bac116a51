"""The loss and the predictions of a dataset of examples, in their order and without padding. Worker side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from raysgd._util.json import encode, take_nonfinite
from raysgd._util.text import with_article
from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import ConfigError
from raysgd.functions.worker.batches import HostBatch, place_for_loss
from raysgd.functions.worker.steps import Steps
from raysgd.functions.worker.train_state import TrainState

#: Elements of the largest array of an example that is written to JSON.
_MAX_ELEMENTS = 1000


def compute_loss(steps: Steps, state: TrainState, batches: Iterable[HostBatch]) -> float:
    """Return the loss over all examples, weighted by rows, or by what loss_fn counts."""
    total = weight = 0.0
    for batch in batches:
        sums = steps.eval_loss(state, *place_for_loss(steps, batch, is_training=False))
        total, weight = total + float(sums[0]), weight + float(sums[1])
    return total / weight if weight else float("nan")


@dataclass(frozen=True)
class Predictions:
    """Examples and what was predicted for them, on rank 0; empty on the others.

    Attributes:
        examples: The examples.
        outputs: What ``output_fn`` returned for each, or else the rows of what ``pred_fn`` returned.
    """

    examples: list[Any]
    outputs: list[Any]


def predict(
    steps: Steps,
    params: Any,
    batches: Iterable[HostBatch],
    output_fn: Callable[[Any], Any] | None,
    *,
    model_state: Any = None,
    seed: int,
    is_first_rank: bool,
    keeps_examples: bool = True,
) -> Predictions:
    """Predict all examples. Every rank computes; rank 0 converts the outputs.

    Args:
        steps: Steps with the user's ``pred_fn``.
        params: The parameters, placed on the devices.
        batches: The batches, whose padding is dropped.
        output_fn: The user's function, or None.
        model_state: The variables of the model that are not trained, placed on the devices, or None.
        is_first_rank: Whether this process is rank 0.
        seed: Of the keys that ``pred_fn`` gets; they depend on it and on the batch alone.
        keeps_examples: Whether to return the examples, too.

    Raises:
        ConfigError: pred_fn or output_fn returned another number of rows.
    """
    found = Predictions([], [])
    for batch in batches:
        key = jax.random.fold_in(jax.random.PRNGKey(seed), batch.refs[0].row)
        placed = steps.place_batch(batch.arrays, batch.num_rows, batch.rows)
        predicted = steps.predict(key, params, placed, model_state)
        rows = jax.tree.map(lambda array, batch=batch: _own_rows(array, batch), predicted)
        if is_first_rank:
            found.outputs.extend(_as_list(rows, len(batch.refs), output_fn))
            if keeps_examples:
                found.examples.extend(ref.load() for ref in batch.refs)
    return found


def _own_rows(array: Any, batch: HostBatch) -> Any:
    shape = np.shape(array)
    if not shape or shape[0] != batch.num_rows:
        raise ConfigError(
            f"pred_fn returned an array of shape {shape} for a batch of {batch.num_rows} rows. Return arrays that have one row "
            "for each example."
        )
    return np.asarray(array)[: len(batch.refs)]


def _as_list(rows: Any, number: int, output_fn: Callable[[Any], Any] | None) -> list[Any]:
    if output_fn is None:
        return [jax.tree.map(lambda array, row=row: array[row], rows) for row in range(number)]
    outputs = output_fn(rows)
    if (
        isinstance(outputs, (str, bytes, Mapping))
        or not hasattr(outputs, "__len__")
        or not hasattr(outputs, "__iter__")
    ):
        raise ConfigError(
            f"output_fn returned {with_article(type(outputs).__name__)}; return a list with one output for each row of its batch."
        )
    if len(outputs) != number:
        raise ConfigError(
            f"output_fn returned {len(outputs)} outputs for {number} rows. Return a list with one output for each row of its "
            "batch."
        )
    return list(outputs)


# ------------------------------------------------------------------------------------------------------------- files


def write_evaluation(folder: str, epoch: int, results: Mapping[str, Any], predictions: Predictions) -> None:
    """Write ``results.json`` and, if there are predictions, ``outputs.json`` to the folder of an epoch.

    A file is replaced if the epoch is evaluated again, as after a failure.
    """
    storage = Storage.from_uri(folder).child(f"epoch_{epoch}")
    storage.make_dirs()
    storage.write_bytes("results.json", _encode(dict(results)) + b"\n")
    if predictions.outputs:
        pairs = zip(predictions.examples, predictions.outputs, strict=True)
        rows = [{"example": _plain(example), "pred": _plain(output)} for example, output in pairs]
        storage.write_bytes("outputs.json", b"[" + b",\n ".join(map(_encode, rows)) + b"]\n")


def _encode(value: Any) -> bytes:
    """Encode as standard JSON, which has null for NaN."""
    return encode(take_nonfinite(value)[0])


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a value: arrays as lists, large ones and unknown objects as texts."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        array = np.asarray(value)
        if array.size > _MAX_ELEMENTS:
            return f"array of shape {array.shape} and dtype {array.dtype}"
        return array.tolist() if array.dtype.kind in "biufUS" else array.astype(np.float32).tolist()
    return repr(value)[:1000]
