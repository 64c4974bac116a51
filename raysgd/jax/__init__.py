"""Helpers for JAX code, in the worker.

::

    mesh = raysgd.jax.mesh(("data", -1), ("model", 2))
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    for batch in split.to_jax(batch_size=64, device=by_rows, drop_last=True):
        ...
    state = raysgd.jax.restore(raysgd.load_checkpoint(), like=state)

They also work outside a worker, with the devices of one process.
"""

from raysgd.jax.logical import logical_steps
from raysgd.jax.meshes import mesh
from raysgd.jax.restoring import restore

__all__ = ["logical_steps", "mesh", "restore"]
