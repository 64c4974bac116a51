"""The session outside of a Trainer, with scalars on a device: the loop does not wait for them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import raysgd
from support.poll import until


def scalar_of(read: Any) -> Any:
    """A scalar on a device, which is read by ``read``."""
    return type("Scalar", (), {"__module__": "jaxlib._jax", "shape": (), "item": lambda self: read()})()


def test_report_does_not_wait_for_the_device(caplog: pytest.LogCaptureFixture) -> None:
    is_computed = threading.Event()

    def read() -> float:
        assert is_computed.wait(20)
        return 0.5

    with raysgd.local():
        raysgd.report(step=0, loss=1.0)
        raysgd.report(step=1, nested={"losses": [scalar_of(read)]})
        raysgd.report(step=2)
        assert caplog.messages == ["1: step=0  loss=1"]
        is_computed.set()
        assert until(lambda: len(caplog.messages) == 3, 20)
        raysgd.report(step=3)
        assert until(lambda: len(caplog.messages) == 4, 20)
    assert caplog.messages[1:] == ["2: step=1  nested={'losses': [0.5]}", "3: step=2", "4: step=3"]


def test_scalar_that_cannot_be_read_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> float:
        raise RuntimeError("device-side assert triggered")

    with raysgd.local():
        raysgd.report(loss=scalar_of(fail))
        assert until(lambda: caplog.messages, 20)
    assert caplog.messages == ["1: this report could not be read: RuntimeError: device-side assert triggered"]


def test_metrics_of_a_checkpoint_may_be_on_a_device(tmp_path: Path) -> None:
    with raysgd.local(dir=tmp_path):
        raysgd.save_checkpoint({"x": 1}, metrics={"loss": scalar_of(lambda: 0.5)})
    (folder,) = tmp_path.iterdir()
    assert raysgd.Checkpoint.from_path(folder).metrics == {"loss": 0.5}
