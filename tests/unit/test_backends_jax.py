"""Which of JAX's errors follow from the loss of a peer, and which devices a worker has. GPUs and TPUs are pretended."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.backends.base import Member
from raysgd.backends.jax import JaxBackend, JaxConfig

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install raysgd[jax]")
CLOSED = "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_what_gloo_says_follows_in_whichever_class_it_comes(kind: type[Exception]) -> None:
    assert JaxBackend(JaxConfig()).is_collective_error(kind(CLOSED))


@pytest.mark.parametrize(
    "error", [ValueError("shapes differ; the connection"), KeyError("gloo"), jax.errors.JaxRuntimeError("INTERNAL")]
)
def test_other_errors_are_causes(error: Exception) -> None:
    assert not JaxBackend(JaxConfig()).is_collective_error(error)


class HasBegunError(Exception):
    """`jax.distributed` would be initialised now."""


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

    def initialize(**settings: Any) -> None:
        raise HasBegunError

    monkeypatch.setattr(jax.config, "update", chosen.__setitem__)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    member = Member(1, 2, 1, 2, 0, "127.0.0.1:1", "127.0.0.1", has_gpu=has_gpu)
    with pytest.raises(HasBegunError):
        config.make().set_up(member)
    assert chosen.get("jax_platforms") == platforms
    assert chosen.get("jax_num_cpu_devices") == cpu_devices
    assert chosen.get("jax_cpu_collectives_implementation") == ("gloo" if cpu_devices else None)
