"""`KerasCallback` in a world of one: what it reports and saves, and where ``fit`` resumes."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.errors import CheckpointError, ConfigError, UsageError

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

NUM_ROWS = 23


@pytest.fixture
def keras() -> Any:
    return pytest.importorskip("keras")


@pytest.fixture(params=["tf_keras", "keras"], ids=["Keras 2", "Keras 3"])
def each_keras(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param)
    return importlib.import_module(request.param)


def make_model(keras: Any, optimizer: Any = "adam", width: int = 4) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((1,)), *layers])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def pairs(seen: list[float] | None = None) -> Any:
    """Return batches of four rows; each row that is read is appended to ``seen``."""

    def collate(batch: dict[str, Any]) -> Any:
        if seen is not None:
            seen.extend(batch["x"].tolist())
        return batch["x"][:, None], 2 * batch["x"][:, None]

    return raysgd.get_dataset().get_split().to_tf(4, collate_fn=collate, shuffle="full", prefetch=0)


def dataset() -> dict[str, Any]:
    return {"x": np.arange(NUM_ROWS, dtype=np.float32) / NUM_ROWS}


def fit(keras: Any, folder: Path, epochs: int, *more: Any, seen: list[float] | None = None, **settings: Any) -> Any:
    """Run a train_func once and return the model that it trained."""
    with raysgd.local(dataset=dataset(), dir=folder):
        model = make_model(keras, keras.optimizers.SGD(0.05, momentum=0.9))
        callback = raysgd.tensorflow.KerasCallback(**settings)
        first = callback.restore(model)
        model.fit(
            pairs(seen),
            epochs=epochs,
            initial_epoch=first,
            callbacks=[callback, *more],
            validation_data=(np.ones((2, 1)), np.ones((2, 1))),
            verbose=0,
        )
    return model


def saved(folder: Path) -> list[Checkpoint]:
    return [Checkpoint.from_path(path) for path in sorted(folder.glob("checkpoint_*"))]


def test_epochs_are_reported_with_logs_of_keras(
    each_keras: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(each_keras, tmp_path, 2)
    lines = [record.getMessage() for record in caplog.records if record.name == "raysgd"]
    assert [line.split(":")[1].split()[0] for line in lines] == ["epoch=0", "epoch=1"]
    assert all(f" {name}=" in line for line in lines for name in ("loss", "mae", "val_loss", "val_mae"))


def test_interrupted_training_ends_with_the_same_weights(each_keras: Any, tmp_path: Path) -> None:
    uninterrupted = fit(each_keras, tmp_path / "uninterrupted", 4)
    rows: list[float] = []
    for epochs in (2, 4):  # after the first epoch Keras knows its length and does not read to its end
        resumed = fit(each_keras, tmp_path / "parts", epochs, seen=rows)
    for ours, theirs in zip(resumed.get_weights(), uninterrupted.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    num_peeked = len(rows) - 4 * NUM_ROWS  # the first batch of each run is read twice, for its types
    assert num_peeked == 2 * 4
    assert saved(tmp_path / "parts")[-1].load()["epoch"] == 3


def test_checkpoint_holds_position_between_two_epochs(keras: Any, tmp_path: Path) -> None:
    for epochs in (1, 3):
        fit(keras, tmp_path, epochs)
        with raysgd.local(dataset=dataset(), dir=tmp_path):
            raysgd.load_checkpoint()
            position = raysgd.get_dataset().position
        assert (position.epoch, position.consumed) == (epochs, 0)


@pytest.mark.parametrize("steps", [6, 4])
def test_steps_per_epoch_resume_at_the_position_in_the_data(keras: Any, tmp_path: Path, steps: int) -> None:
    rows: list[float] = []
    for epochs in (2, 3):
        with raysgd.local(dataset=dataset(), dir=tmp_path):
            model = make_model(keras)
            callback = raysgd.tensorflow.KerasCallback()
            first = callback.restore(model)
            data, num_before = pairs(rows).repeat(), len(rows)
            given = {"steps_per_epoch": steps, "callbacks": [callback], "verbose": 0}
            model.fit(data, epochs=epochs, initial_epoch=first, **given)
            del rows[num_before - 4 : num_before]  # the first batch, which is read twice, for its types
        assert model.optimizer.iterations.numpy() == epochs * steps
    first_epoch = sorted(rows[:NUM_ROWS])
    assert first_epoch == sorted(dataset()["x"].tolist()), "the first epoch did not read each row once"
    assert len(rows) == {6: 3 * NUM_ROWS, 4: 2 * NUM_ROWS}[steps], "12 steps of 4 are two epochs of 6 steps"


def test_every_nth_and_the_last_epoch_are_saved(keras: Any, tmp_path: Path) -> None:
    fit(keras, tmp_path, 5, save_every=2)
    assert [checkpoint.load()["epoch"] for checkpoint in saved(tmp_path)] == [1, 3, 4]


def test_last_epoch_is_saved_when_another_callback_stops(keras: Any, tmp_path: Path) -> None:
    never_better = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=100, patience=1)
    fit(keras, tmp_path, 9, never_better, save_every=10)
    assert [checkpoint.load()["epoch"] for checkpoint in saved(tmp_path)] == [1]


def test_fit_stops_when_the_run_should_stop(each_keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])
    monkeypatch.setattr("raysgd.session.local.LocalSession.should_stop", lambda self: next(answers))
    fit(each_keras, tmp_path, 9, save_every=10)
    assert [checkpoint.load()["epoch"] for checkpoint in saved(tmp_path)] == [1]


def test_legacy_optimizers_of_keras_2_are_restored(tmp_path: Path) -> None:
    keras = pytest.importorskip("tf_keras")
    with raysgd.local(dataset=dataset(), dir=tmp_path):
        for epochs in (1, 2):
            model = make_model(keras, keras.optimizers.legacy.Adam())
            callback = raysgd.tensorflow.KerasCallback()
            first = callback.restore(model)
            slots = [variable.numpy() for variable in model.optimizer.variables()[1:]]
            assert (first, any(slot.any() for slot in slots)) == (epochs - 1, epochs == 2)
            model.fit(pairs(), epochs=epochs, initial_epoch=first, callbacks=[callback], verbose=0)


def test_callback_reports_outside_a_session(keras: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(keras)
    callback = raysgd.tensorflow.KerasCallback()
    assert callback.restore(model) == 0
    model.fit(np.ones((4, 1)), np.ones((4, 1)), callbacks=[callback], verbose=0)
    assert any(record.name == "raysgd" for record in caplog.records)


def test_unbuilt_and_uncompiled_models_are_refused(each_keras: Any) -> None:
    callback = raysgd.tensorflow.KerasCallback()
    unbuilt = each_keras.Sequential([each_keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    with pytest.raises(UsageError, match="give it an Input"):
        callback.restore(unbuilt)
    with pytest.raises(UsageError, match=r"call model\.compile"):
        callback.restore(each_keras.Sequential([each_keras.layers.Input((1,)), each_keras.layers.Dense(1)]))


def test_checkpoint_of_another_model_is_refused(each_keras: Any, tmp_path: Path) -> None:
    callback = raysgd.tensorflow.KerasCallback()
    fit(each_keras, tmp_path, 1)
    with raysgd.local(dataset=dataset(), dir=tmp_path):
        with pytest.raises(CheckpointError, match=r"other weights of the model: 8 of shapes \(1, 4\)"):
            callback.restore(make_model(each_keras, width=5))
        with pytest.raises(CheckpointError, match="other variables of the optimizer"):
            callback.restore(make_model(each_keras))
        raysgd.save_checkpoint({"epoch": 3})
        with pytest.raises(CheckpointError, match="a KerasCallback did not save"):
            callback.restore(make_model(each_keras))


def test_save_every_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"KerasCallback\(save_every\)=0 is too small"):
        raysgd.tensorflow.KerasCallback(save_every=0)
