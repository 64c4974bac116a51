"""The TensorFlow backend explains the error of Keras 3's ``fit`` with several workers."""

from __future__ import annotations

import pytest

import raysgd

IN_KERAS_3 = ValueError(
    "Attempt to convert a value (PerReplica:{ 0: <tf.Tensor> }) with an unsupported type to a Tensor."
)


@pytest.mark.parametrize(
    ("legacy_keras", "is_installed", "advice"),
    [
        (True, True, "make the model with tf.keras"),
        (False, True, "leave TensorflowConfig(legacy_keras=True)"),
        (True, False, "pip install tf_keras"),
        (False, False, "pip install tf_keras"),
    ],
)
def test_error_of_keras_3_is_explained_with_advice(
    legacy_keras: bool, is_installed: bool, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if is_installed else None)
    explanation = raysgd.TensorflowConfig(legacy_keras=legacy_keras).make_backend().explain_error(IN_KERAS_3)
    assert explanation is not None and advice in explanation


def test_other_errors_are_not_explained() -> None:
    backend = raysgd.TensorflowConfig().make_backend()
    assert backend.explain_error(ValueError("PerReplica")) is None
    assert backend.explain_error(TypeError(str(IN_KERAS_3))) is None
