"""`restore`: makes JAX arrays of a loaded checkpoint; each process reads what its devices need. Worker side."""

from __future__ import annotations

from typing import Any

import numpy as np

from raysgd.checkpoint.codecs.shards import ShardIndex, index_from_slices
from raysgd.checkpoint.resharding import SavedArray
from raysgd.errors import CheckpointError


def restore(saved: Any, *, like: Any) -> Any:
    """Place the arrays of a loaded checkpoint on devices.

    Each process reads the shards that its own devices need, whatever mesh and number of workers saved them. Reading does not
    communicate, so ranks may call this at different times.

    Args:
        saved: The state that `raysgd.load_checkpoint` returned, or a sub-tree of it.
        like: A tree of the same structure. It has an array, a ``jax.ShapeDtypeStruct`` with a sharding, or a sharding in
            place of each array, and anything in place of other values.

    Returns:
        A tree with the structure of ``like`` and the values of ``saved``.

    Raises:
        CheckpointError: The structures, or the shape or dtype of an array, differ; the text names the place.
        CheckpointCorruptError: A file is missing, or does not match its checksum.
    """
    import jax

    wanted, form = jax.tree_util.tree_flatten_with_path(like)
    found = {_keys(path): value for path, value in jax.tree_util.tree_flatten_with_path(saved)[0]}
    places = [_keys(path) for path, _ in wanted]
    if unknown := [place for place in found if place not in set(places)]:
        raise CheckpointError(
            f"{_show(unknown[0])} was saved but is not in restore(..., like=...): add it, or restore matching sub-trees of both."
        )
    if missing := [place for place in places if place not in found]:
        raise CheckpointError(f"{_show(missing[0])} is in restore(..., like=...) but was not saved: leave it out.")
    values = [_restored(_show(place), found[place], target) for place, (_, target) in zip(places, wanted, strict=True)]
    return jax.tree_util.tree_unflatten(form, values)


def _restored(place: str, value: Any, target: Any) -> Any:
    import jax

    if isinstance(target, jax.sharding.Sharding):
        return _on_devices(_array(value), target)
    if isinstance(target, (jax.Array, jax.ShapeDtypeStruct)):
        value = _array(value)
        if (value.shape, value.dtype) != (target.shape, target.dtype):
            raise CheckpointError(
                f"{place} was saved as {value.dtype} of shape {value.shape}; restore(..., like=...) has {target.dtype} of shape "
                f"{target.shape} there: change it, or convert the array after restoring."
            )
        if target.sharding is not None and getattr(target, "committed", True):
            return _on_devices(value, target.sharding)
        return jax.numpy.array(np.asarray(value))  # uncommitted to a device, like its counterpart
    return np.asarray(value) if isinstance(value, SavedArray) else value


def _array(value: Any) -> Any:
    return value if hasattr(value, "read") else np.asarray(value)  # or an array that is read in slices


def _on_devices(value: Any, sharding: Any) -> Any:
    """Make a global array. A shard that several devices of this process hold is read once."""
    import jax

    loaded: dict[ShardIndex, Any] = {}

    def read_shard(slices: tuple[slice, ...] | None) -> Any:
        index = index_from_slices(slices or (), value.shape)
        if index not in loaded:
            loaded[index] = value[index.slices()]
        return loaded[index]

    return jax.make_array_from_callback(value.shape, sharding, read_shard, dtype=value.dtype)


def _keys(path: Any) -> tuple[Any, ...]:
    """Return the keys of a path, which are equal for a dict and for a class with fields of these names."""
    return tuple(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)) for key in path)


def _show(place: tuple[Any, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in place)
