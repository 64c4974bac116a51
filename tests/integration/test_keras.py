"""Keras's ``fit`` on two workers: the batches of each rank, the resume after a death, and the refusal of Keras 3."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.errors import WorkerTraceback
from support.runs import events_of, latest_run, make_trainer, once, pids, quiet, travels_by_value

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="TensorFlow or tf_keras is not installed"),
]
travels_by_value(__name__)

TRAINER = {"backend": "tensorflow", "failure_config": raysgd.FailureConfig(max_failures=1)}
shared = pytest.mark.shared_trainer


def pairs(batch: dict[str, Any]) -> Any:
    x = batch["x"].astype(np.float32)[:, None]
    return x, 0.01 * x


def recording(seen: list[Any], more: Any = None) -> Any:
    """A model that records the rows of each batch that it trains on, and calls ``more`` in each step."""
    import tensorflow as tf

    def record(x: Any) -> Any:
        seen.append(x.astype(int).ravel().tolist())
        if more is not None:
            more(seen)
        return np.int32(0)

    class Recording(tf.keras.Sequential):
        def train_step(self, data: Any) -> Any:
            with tf.control_dependencies([tf.numpy_function(record, [data[0]], tf.int32)]):
                return super().train_step(data)

    tf.keras.utils.set_random_seed(0)
    model = Recording([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(1e-5, momentum=0.9), "mse")
    return model


def fit_two_epochs(config: dict[str, Any]) -> Any:
    """Return the rows of each step, and the rows of the epoch consumed after each step."""
    import tensorflow as tf

    module = raysgd.tensorflow if config["is_own"] else tf.distribute
    strategy = module.MultiWorkerMirroredStrategy()
    shard = raysgd.get_dataset().get_split()
    data = shard.to_tf(4, collate_fn=pairs)
    if raysgd.world_rank() == 1 and config.get("take"):
        data = data.take(config["take"])
    seen: list[Any] = []
    places: list[int] = []

    def note(batch: int, logs: Any) -> None:
        places.append(raysgd.get_dataset().position.consumed)

    with strategy.scope():
        model = recording(seen)
    hook = tf.keras.callbacks.LambdaCallback(on_train_batch_end=note)
    losses = model.fit(data, epochs=2, verbose=0, callbacks=[hook]).history["loss"]
    return seen, places, losses


def loop_two_epochs(config: dict[str, Any]) -> Any:
    """Do the same in a custom training loop."""
    strategy = raysgd.tensorflow.MultiWorkerMirroredStrategy()
    data = raysgd.get_dataset().get_split().to_tf(4, collate_fn=pairs)
    if config["way"] == "function":
        dealt = strategy.distribute_datasets_from_function(lambda context: data)
    else:
        dealt = strategy.experimental_distribute_dataset(data)
    seen, places = [], []
    for _ in range(2):
        for x, _ in dealt:
            (local,) = strategy.experimental_local_results(x)
            seen.append(local.numpy().astype(int).ravel().tolist())
            places.append(raysgd.get_dataset().position.consumed)
    return seen, places


FIRST = {
    23: [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]],
    17: [[0, 1, 2, 3], [8, 9, 10, 11], [16]],
}
SECOND = {
    23: [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22]],
    17: [[4, 5, 6, 7], [12, 13, 14, 15], []],
}


@shared
@pytest.mark.parametrize("num_rows", [23, 17])
def test_each_batch_of_a_shard_is_one_step(trainer: raysgd.Trainer, num_rows: int) -> None:
    given: dict[str, Any] = {"dataset": {"x": np.arange(num_rows)}, "callbacks": quiet(), "returns": "all"}
    ways: list[Any] = [trainer.run(loop_two_epochs, {"way": way}, **given) for way in ("function", "dataset")]
    fitted = trainer.run(fit_two_epochs, {"is_own": True}, **given)
    assert all(np.isfinite(losses).all() for _, _, losses in fitted), "a share of no rows made it nan"
    for ranks in (*ways, [(seen, places) for seen, places, _ in fitted]):
        assert [places for _, places in ranks] == [[8, 16, num_rows] * 2] * 2
        assert [seen for seen, _ in ranks] == [2 * FIRST[num_rows], 2 * SECOND[num_rows]]


@shared
def test_plain_tensorflow_may_use_unequal_shards(trainer: raysgd.Trainer) -> None:
    """The guide on data states this for both loops."""
    given: dict[str, Any] = {"dataset": {"x": np.arange(23)}, "callbacks": quiet(), "returns": "all"}
    plain = trainer.run(fit_two_epochs, {"is_own": False}, **given)
    first, second = trainer.run(fit_two_epochs, {"is_own": True, "take": 1}, **given)
    trained = [row for seen, _, _ in plain for batch in seen for row in batch]
    assert sorted(trained) == sorted(2 * list(range(23)))
    assert [[len(batch) for batch in seen] for seen, _, _ in plain] == [2 * [2] * 6, 2 * [2, 2, 2, 2, 2, 1]]
    assert (first[0], second[0]) == (2 * FIRST[23], 2 * [[4, 5, 6, 7], [], []])
    assert np.isfinite(first[2]).all()


def fit_with_callback(config: dict[str, Any]) -> Any:
    """Rank 1 dies once in the fifth step of an attempt, which is in the second epoch of three steps."""

    def die(seen: list[Any]) -> None:
        if config["dies"] and raysgd.world_rank() == 1 and len(seen) == 5 and once(config["folder"], "death"):
            deadline = time.monotonic() + 60
            while not raysgd.list_checkpoints() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    strategy = raysgd.tensorflow.MultiWorkerMirroredStrategy()
    seen: list[Any] = []
    with strategy.scope():
        model = recording(seen, die)
    callback = raysgd.tensorflow.KerasCallback()
    data = raysgd.get_dataset().get_split().to_tf(4, collate_fn=pairs, shuffle="full")
    first = callback.restore(model)
    model.fit(data, epochs=4, initial_epoch=first, callbacks=[callback], verbose=0)
    return first, seen, model.get_weights()


@shared
def test_fit_resumes_in_the_epoch_of_a_worker_death(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    given: dict[str, Any] = {"dataset": {"x": np.arange(23)}, "callbacks": quiet(), "returns": "all"}
    config = {"folder": str(tmp_path)}
    calm = trainer.run(fit_with_callback, config | {"dies": False}, **given)
    before = pids(trainer)
    ranks = trainer.run(fit_with_callback, config | {"dies": True}, **given)
    assert len(events_of(trainer, "failure")) == 1
    assert latest_run(trainer).metrics["epoch"].tolist() == [0, 1, 2, 3]
    assert trainer.get_last_checkpoint().load()["epoch"] == 3
    assert pids(trainer)[1] != before[1]
    assert [(first, len(seen)) for first, seen, _ in ranks] == [(1, 9), (1, 9)]
    trained = [row for _, seen, _ in ranks for batch in seen for row in batch]
    assert sorted(trained) == sorted(3 * list(range(23))), "not each row once in each of the three epochs"
    for _, _, weights in (*calm, *ranks):
        for ours, theirs in zip(weights, calm[0][2], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)


class Enough(raysgd.Callback):
    """Stops the run from the driver."""

    def on_result(self, result: Any) -> None:
        if result["epoch"] == 2:
            raise raysgd.Stop("enough")


def fit_for_long(config: dict[str, Any]) -> list[int]:
    strategy = raysgd.tensorflow.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = recording([])
    callback = raysgd.tensorflow.KerasCallback(save_every=1000)
    data = raysgd.get_dataset().get_split().to_tf(4, collate_fn=pairs)
    history = model.fit(data, epochs=2000, initial_epoch=callback.restore(model), callbacks=[callback], verbose=0)
    return list(history.epoch)


@shared
def test_all_ranks_stop_after_the_same_epoch_and_save_it(trainer: raysgd.Trainer) -> None:
    given: dict[str, Any] = {"dataset": {"x": np.arange(23)}, "callbacks": [*quiet(), Enough()]}
    first, second = trainer.run(fit_for_long, {}, returns="all", **given)
    run = latest_run(trainer)
    saved = [checkpoint.load()["epoch"] for checkpoint in run.checkpoints]
    assert first == second and 3 <= len(first) < 2000
    assert saved == [first[-1]] == [run.metrics["epoch"].iloc[-1]]


def fit_with_keras_3(config: dict[str, Any]) -> None:
    import tensorflow as tf

    strategy = raysgd.tensorflow.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 1)), np.ones((8, 1)), verbose=0)


def test_fit_of_keras_3_is_refused_with_a_hint(ray_cluster: Any, tmp_path: Path) -> None:
    advice = "leave TensorflowConfig(legacy_keras=True) at its default"
    backend = raysgd.TensorflowConfig(legacy_keras=False)
    with make_trainer(tmp_path, backend=backend) as trainer, pytest.raises(ValueError, match="PerReplica") as caught:
        trainer.run(fit_with_keras_3, callbacks=quiet())
    assert advice in caught.value.__notes__[0]
    assert isinstance(caught.value.__cause__, WorkerTraceback) and advice in str(caught.value.__cause__)
