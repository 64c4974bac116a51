"""The callbacks a run has without being given any."""

from __future__ import annotations

from collections.abc import Sequence

from raysgd.callbacks.base import Callback
from raysgd.callbacks.progress import ProgressCallback


def default_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """The user's callbacks, and a `ProgressCallback` unless they have one (``mode="off"`` counts)."""
    if any(isinstance(callback, ProgressCallback) for callback in callbacks):
        return list(callbacks)
    return [*callbacks, ProgressCallback()]
