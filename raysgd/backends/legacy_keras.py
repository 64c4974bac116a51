"""Keras 2, where TensorFlow's distribution needs it: its package is ``tf_keras``. Worker side."""

from __future__ import annotations

import importlib.util
import os

#: What TensorFlow looks at when ``tf.keras`` is first asked for.
_SWITCH = "TF_USE_LEGACY_KERAS"


def has_legacy_keras() -> bool:
    """Whether it is installed here."""
    return importlib.util.find_spec("tf_keras") is not None


def use_legacy_keras() -> bool:
    """Have ``tf.keras`` be Keras 2, where that is installed; whether it is. To be called before TensorFlow is imported."""
    if not has_legacy_keras():
        return False
    os.environ[_SWITCH] = "1"
    return True
