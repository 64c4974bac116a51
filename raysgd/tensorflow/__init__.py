"""Helpers for TensorFlow and Keras code, in the worker.

::

    callback = raysgd.tensorflow.KerasCallback()
    model.fit(data, epochs=10, initial_epoch=callback.restore(model), callbacks=[callback])

All of them also work outside a worker, as a world of one. TensorFlow is imported on first use of the strategy. The callback
does not need it, since Keras 3 may run on another backend.
"""

import typing as _typing

from raysgd.tensorflow.keras_callback import KerasCallback

if _typing.TYPE_CHECKING:
    from raysgd.tensorflow.strategy import MultiWorkerMirroredStrategy

__all__ = ["KerasCallback", "MultiWorkerMirroredStrategy"]


if not _typing.TYPE_CHECKING:  # type checkers would take every name for a public one

    def __getattr__(name: str) -> _typing.Any:
        if name != "MultiWorkerMirroredStrategy":
            raise AttributeError(f"module 'raysgd.tensorflow' has no attribute {name!r}")
        from raysgd.tensorflow.strategy import MultiWorkerMirroredStrategy

        return MultiWorkerMirroredStrategy


def __dir__() -> list[str]:
    return __all__
