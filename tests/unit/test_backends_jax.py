"""JAX errors that follow from a lost peer are recognised, and a worker gets the right devices. GPUs and TPUs are faked."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from raysgd.backends import jax as jax_backend
from raysgd.backends.base import Member
from raysgd.backends.jax import JaxBackend, JaxConfig
from raysgd.errors import ConfigError

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install raysgd[jax]")
backends = pytest.importorskip("jax.extend").backend
pytestmark = pytest.mark.jax
CLOSED = "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_gloo_error_is_a_collective_error_in_any_class(kind: type[Exception]) -> None:
    assert JaxBackend(JaxConfig()).is_collective_error(kind(CLOSED))


@pytest.mark.parametrize(
    "error", [ValueError("shapes differ; the connection"), KeyError("gloo"), jax.errors.JaxRuntimeError("INTERNAL")]
)
def test_other_errors_are_not_collective_errors(error: Exception) -> None:
    assert not JaxBackend(JaxConfig()).is_collective_error(error)


class InitializeCalledError(Exception):
    """The backend called `jax.distributed.initialize`."""


@pytest.mark.parametrize(
    ("config", "has_gpu", "platforms", "cpu_devices"),
    [
        (JaxConfig(), False, "cpu", 1),
        (JaxConfig(devices_per_worker=4), False, "cpu", 4),
        (JaxConfig(devices_per_worker=4), True, "cuda,cpu", None),
        (JaxConfig(platform="cpu"), True, "cpu", 1),
        (JaxConfig(platform="rocm"), True, "rocm,cpu", None),
        (JaxConfig(platform="tpu"), False, "tpu,cpu", None),
    ],
)
def test_devices_are_chosen_before_a_group_is_formed(
    monkeypatch: pytest.MonkeyPatch, config: JaxConfig, has_gpu: bool, platforms: str, cpu_devices: int | None
) -> None:
    chosen: dict[str, Any] = {}
    backends.clear_backends()  # another module of this process may have created arrays

    def initialize(**settings: Any) -> None:
        raise InitializeCalledError

    monkeypatch.setattr(jax.config, "update", chosen.__setitem__)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    member = Member(1, 2, 1, 2, 0, "127.0.0.1:1", "127.0.0.1", has_gpu=has_gpu)
    with pytest.raises(InitializeCalledError):
        config.make_backend().init_process_group(member)
    assert chosen.get("jax_platforms") == platforms
    assert chosen.get("jax_num_cpu_devices") == cpu_devices
    assert chosen.get("jax_cpu_collectives_implementation") == ("gloo" if cpu_devices else None)


def test_process_that_cannot_leave_its_group_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A computation that waits for a lost rank keeps JAX from leaving; its connections are shut down, and then it is given up."""
    connections: list[str] = []
    ends = threading.Event()
    monkeypatch.setattr(jax_backend, "_LEAVE_S", 0.05)
    monkeypatch.setattr(jax_backend, "_leave", lambda: ends.wait(60))
    monkeypatch.setattr(JaxBackend, "abort_process_group", lambda self: connections.append("shut down"))
    backend = JaxBackend(JaxConfig())
    backend._member = object()  # type: ignore[assignment]  # as after joining
    backend.destroy_process_group()
    assert backend.should_replace_process() and connections == ["shut down"]
    ends.set()
    monkeypatch.setattr(jax_backend, "_LEAVE_S", 20.0)
    backend._member = object()  # type: ignore[assignment]
    backend.destroy_process_group()
    assert not backend.should_replace_process() and connections == ["shut down"]


@pytest.mark.parametrize(
    ("config", "world_size", "is_refused"),
    [
        (JaxConfig(), 2, True),
        (JaxConfig(platform="rocm"), 2, True),
        (JaxConfig(platform="cpu"), 2, False),
        (JaxConfig(), 1, False),
    ],
)
def test_workers_that_share_a_gpu_are_refused_before_a_group_is_formed(
    monkeypatch: pytest.MonkeyPatch, config: JaxConfig, world_size: int, is_refused: bool
) -> None:
    backends.clear_backends()

    def initialize(**settings: Any) -> None:
        raise InitializeCalledError

    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    member = Member(0, world_size, 0, world_size, 0, "127.0.0.1:1", "127.0.0.1", has_gpu=True, shares_gpu=True)
    with pytest.raises(ConfigError if is_refused else InitializeCalledError) as raised:
        config.make_backend().init_process_group(member)
    assert ("XLA_PYTHON_CLIENT_MEM_FRACTION" in str(raised.value)) == is_refused
