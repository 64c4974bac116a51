"""Which of JAX's errors follow from the loss of a peer."""

from __future__ import annotations

import pytest

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
