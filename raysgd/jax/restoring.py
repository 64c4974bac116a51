"""Arrays of JAX from a checkpoint, each process reading what its devices need. Runs in workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from raysgd.checkpoint.boxes import Box, box_of
from raysgd.checkpoint.saved_array import SavedArray
from raysgd.errors import CheckpointError


def restore(saved: Any, *, like: Any) -> Any:
    """A state that was saved, with its arrays on the devices that those of ``like`` are on.

    Each process reads the pieces that its own devices need, whatever the mesh and the number of workers were that they were
    saved from. Reading does not communicate, so ranks may come here at different times.

    Args:
        saved: What `raysgd.load_checkpoint` returned, or a part of it.
        like: A tree of the same form. In place of an array: an array, a ``jax.ShapeDtypeStruct`` with a sharding, or a
            sharding alone. In place of anything else: anything else.

    Returns:
        A tree of the type of ``like``, with the values of ``saved``.

    Raises:
        CheckpointError: The trees differ, or an array's shape or dtype does; the text names it.
        CheckpointCorruptError: A file is missing, or does not match its checksum.
    """
    import jax

    wanted, form = jax.tree_util.tree_flatten_with_path(like)
    found = {_keys(path): value for path, value in jax.tree_util.tree_flatten_with_path(saved)[0]}
    places = [_keys(path) for path, _ in wanted]
    if unknown := [place for place in found if place not in set(places)]:
        raise CheckpointError(
            f"{_show(unknown[0])} was saved, and is not in restore(..., like=...); give a part of both to restore that alone."
        )
    if missing := [place for place in places if place not in found]:
        raise CheckpointError(f"{_show(missing[0])} is in restore(..., like=...), and was not saved.")
    values = [_restored(_show(place), found[place], model) for place, (_, model) in zip(places, wanted, strict=True)]
    return jax.tree_util.tree_unflatten(form, values)


def _restored(place: str, value: Any, model: Any) -> Any:
    import jax

    if isinstance(model, jax.sharding.Sharding):
        return _on_devices(_array(value), model)
    if isinstance(model, (jax.Array, jax.ShapeDtypeStruct)):
        value = _array(value)
        if (value.shape, value.dtype) != (model.shape, model.dtype):
            raise CheckpointError(
                f"{place} was saved as {value.dtype} of shape {value.shape}; restore(..., like=...) has {model.dtype} of shape "
                f"{model.shape} there."
            )
        if model.sharding is not None and getattr(model, "committed", True):
            return _on_devices(value, model.sharding)
        return jax.numpy.array(np.asarray(value))  # not bound to a device, as its model is not
    return np.asarray(value) if isinstance(value, SavedArray) else value


def _array(value: Any) -> Any:
    return value if isinstance(value, SavedArray) else np.asarray(value)


def _on_devices(value: Any, sharding: Any) -> Any:
    """A global array; what several devices of this process have in common is read once."""
    import jax

    read: dict[Box, Any] = {}

    def piece(index: tuple[slice, ...] | None) -> Any:
        box = box_of(index or (), value.shape)
        if box not in read:
            read[box] = value[box.slices()]
        return read[box]

    return jax.make_array_from_callback(value.shape, sharding, piece, dtype=value.dtype)


def _keys(path: Any) -> tuple[Any, ...]:
    """The keys of a path, alike for a dict and for a class with fields of these names."""
    return tuple(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)) for key in path)


def _show(place: tuple[Any, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in place)
