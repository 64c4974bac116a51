"""Virtual devices of JAX in the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cpu_devices(number: int) -> Iterator[None]:
    """Let JAX have so many devices of the CPU inside. What it has compiled is lost."""
    import jax
    from jax.extend import backend

    before = jax.config.jax_num_cpu_devices
    backend.clear_backends()
    jax.config.update("jax_num_cpu_devices", number)
    yield
    backend.clear_backends()
    jax.config.update("jax_num_cpu_devices", before)
