"""What the TensorFlow backend says about Keras 3's ``fit``, which cannot do what it is asked to."""

from __future__ import annotations

import pytest

import raysgd

IN_KERAS_3 = ValueError(
    "Attempt to convert a value (PerReplica:{ 0: <tf.Tensor> }) with an unsupported type to a Tensor."
)


@pytest.mark.parametrize(
    ("legacy_keras", "is_installed", "way"),
    [
        (True, True, "make the model with tf.keras"),
        (False, True, "leave TensorflowConfig(legacy_keras=True)"),
        (True, False, "pip install tf_keras"),
        (False, False, "pip install tf_keras"),
    ],
)
def test_the_way_out_is_told(legacy_keras: bool, is_installed: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if is_installed else None)
    told = raysgd.TensorflowConfig(legacy_keras=legacy_keras).make().explain(IN_KERAS_3)
    assert told is not None and way in told


def test_nothing_is_said_of_other_errors() -> None:
    backend = raysgd.TensorflowConfig().make()
    assert backend.explain(ValueError("PerReplica")) is None
    assert backend.explain(TypeError(str(IN_KERAS_3))) is None
