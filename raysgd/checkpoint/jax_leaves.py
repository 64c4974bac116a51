"""JAX's arrays: taken apart into the shards that this process has, where they are distributed over processes.

Making arrays of what was saved is `raysgd.jax.restore`'s. Runs in workers; loaded only where JAX is in use, and imports JAX on
the first value.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from raysgd.checkpoint.arrays import dtype_to_json, encode_array_like, leaf_of
from raysgd.checkpoint.boxes import Box, box_of
from raysgd.checkpoint.leaves import Leaf
from raysgd.errors import CheckpointError

Json: TypeAlias = Any


def find_encoder(value: Any) -> Callable[[Any, Any], Json] | None:
    """The encoder of an array, or None. One within a function that JAX is tracing is none."""
    jax = _jax()
    return _encode if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) else None


def _encode(encoder: Any, array: Any) -> Json:
    jax = _jax()
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise CheckpointError(f"{encoder.where()} is an array of {array.dtype}: save jax.random.key_data(...) of it")
    if array.is_deleted():
        raise CheckpointError(
            f"{encoder.where()} was deleted, as an array is that was donated: save what was made of it"
        )
    if encoder.shards is not None and (encoder.shards.world_size == 1 or not array.is_fully_addressable):
        return _encode_shards(encoder, array)
    if not array.is_fully_addressable and not array.is_fully_replicated:
        raise CheckpointError(
            f"{encoder.where()} is distributed over the devices of several workers: call save_checkpoint(..., all_ranks=True) "
            "on all of them, and each saves the shards that it has"
        )
    return encode_array_like(encoder, array)


def _encode_shards(encoder: Any, array: Any) -> Json:
    pieces: dict[Box, Leaf] = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:  # one of all processes has it
            if shard.device.platform != "cpu":
                shard.data.copy_to_host_async()  # all of them are under way before the first is waited for
            pieces[box_of(shard.index, array.shape)] = leaf_of([*encoder.path, "shard"], shard.data)
    names = {box: encoder.leaves.add(leaf) for box, leaf in pieces.items()}
    return encoder.shards.add(encoder.path, dtype_to_json(np.dtype(array.dtype)), array.shape, names)


def _jax() -> Any:
    return importlib.import_module("jax")
