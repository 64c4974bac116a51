"""Encodes JAX arrays: as the shards that this process holds where an array is distributed over processes, else whole.

Runs in workers; loaded only where JAX is in use, and imports JAX on the first value. `raysgd.jax.restore` makes JAX
arrays of what was saved.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from raysgd.checkpoint.codecs.leaves import Json, Leaf
from raysgd.checkpoint.codecs.numpy import dtype_to_json, encode_array_like, leaf_of
from raysgd.checkpoint.codecs.shards import ShardIndex, index_from_slices
from raysgd.errors import CheckpointError


def find_encoder(value: Any) -> Callable[[Any, Any], Json] | None:
    """Return the encoder of a JAX array; None for other values and for tracers inside a jitted function."""
    jax = _jax()
    return _encode if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) else None


def _encode(encoder: Any, array: Any) -> Json:
    jax = _jax()
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise CheckpointError(f"{encoder.where()} is an array of {array.dtype}: save jax.random.key_data(...) of it")
    if array.is_deleted():
        raise CheckpointError(
            f"{encoder.where()} was deleted, as JAX deletes donated arrays: save the array that was computed from it"
        )
    if encoder.shards is not None and (encoder.shards.world_size == 1 or not array.is_fully_addressable):
        return _encode_shards(encoder, array)
    if not array.is_fully_addressable and not array.is_fully_replicated:
        raise CheckpointError(
            f"{encoder.where()} is distributed over the devices of several workers: call save_checkpoint(..., all_ranks=True) "
            "on all workers, so that each saves its own shards"
        )
    return encode_array_like(encoder, array)


def _encode_shards(encoder: Any, array: Any) -> Json:
    leaves: dict[ShardIndex, Leaf] = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:  # exactly one process has replica 0 of each shard
            if shard.device.platform != "cpu":
                shard.data.copy_to_host_async()  # start all copies before waiting for the first
            leaves[index_from_slices(shard.index, array.shape)] = leaf_of([*encoder.path, "shard"], shard.data)
    names = {index: encoder.add_leaf(leaf) for index, leaf in leaves.items()}
    return encoder.shards.add(encoder.path, dtype_to_json(np.dtype(array.dtype)), array.shape, names)


def _jax() -> Any:
    return importlib.import_module("jax")
