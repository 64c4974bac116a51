"""Fixtures of the tests that need a GPU.

``device`` gives most of them a variant on the CPU too, so that they are tried without a GPU. `make gpu` runs all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))

from bench.session_alone import SessionAlone


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch sees none here")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[SessionAlone]:
    """A worker's session in this process, without Ray."""
    with SessionAlone(tmp_path / "checkpoints") as session:
        yield session


@pytest.fixture
def no_waits(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager in which it is an error if the host waits for the device."""

    @contextmanager
    def no_waits() -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return no_waits


@pytest.fixture
def keep_gpu_busy() -> Callable[[], Any]:
    """Return a function that queues a second of work on the current stream; it returns an event at the work's end."""

    def keep_gpu_busy() -> torch.cuda.Event:
        torch.cuda._sleep(2_000_000_000)  # clock cycles
        event = torch.cuda.Event()
        event.record()
        return event

    return keep_gpu_busy
