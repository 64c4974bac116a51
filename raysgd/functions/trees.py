"""Trees of arrays: their shapes, as NumPy arrays, and as nested dicts for checkpoints. Any process; makes no JAX array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from raysgd.errors import ConfigError
from raysgd.functions.stored_arrays import StoredArray

_FLOATS = ("float32", "bfloat16", "float16", "float64")


class Parameter(NamedTuple):
    """The path, which is the keys from the root to the leaf, the shape and the dtype of one array of a tree."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any


def list_parameters(params: Any, *, is_trained: bool = True) -> tuple[list[Parameter], Any]:
    """Return the parameters in the order of `jax.tree.leaves`, and the structure of the tree.

    Args:
        params: The tree.
        is_trained: Whether they are trained, so that they must be floating-point numbers.

    Raises:
        ConfigError: The tree is empty, or a leaf is not an array of such numbers.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    if not leaves:
        raise ConfigError("params has no arrays: give the tree of parameters of a model.")
    found = []
    for keys, leaf in leaves:
        path = tuple(map(str, keys_of(keys))) or ("params",)  # a tree may be a single array
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            raise ConfigError(f"params: {'/'.join(path)} is of type {type(leaf).__name__}: give an array.")
        if is_trained and not jax.numpy.issubdtype(dtype, jax.numpy.floating):
            raise ConfigError(
                f"params: {'/'.join(path)} has dtype {dtype}, which has no gradient: keep it out of params. A whole module "
                "of nnx may be given, whose nnx.Param are trained."
            )
        found.append(Parameter(path, tuple(shape), dtype))
    return found, structure


def key_of(key: Any) -> Any:
    """Return the key, index or name of one node of a path of JAX: equal for a dict and for a class with fields."""
    return next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))


def keys_of(path: Any) -> tuple[Any, ...]:
    """Return the keys from the root to a leaf, without that of the field of a variable of nnx or a box of linen."""
    if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name in ("value", "raw_value"):
        path = path[:-1]
    return tuple(map(key_of, path))


def shapes_of(tree: Any) -> Any:
    """Return the tree with a `jax.ShapeDtypeStruct` in place of each array."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def as_numpy(params: Any) -> Any:
    """Return a tree of parameters as NumPy arrays of the types that JAX uses, or arrays in files. It makes no JAX array.

    Raises:
        ConfigError: The tree is empty, or a leaf is not an array of floating-point numbers.
    """
    list_parameters(params)
    return as_numbers(params)


def as_numbers(tree: Any) -> Any:
    """Return a tree of arrays, or numbers, as NumPy arrays of the types that JAX uses, or arrays in files.

    Raises:
        ConfigError: A leaf has no numbers.
    """

    def convert(keys: Any, leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        is_key = dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
        if is_key or isinstance(leaf, jax.ShapeDtypeStruct):
            kind = "a random key" if is_key else "a shape without values"
            raise ConfigError(f"params: {'/'.join(map(str, keys_of(keys)))} is {kind}: give an array of numbers.")
        array = leaf if isinstance(leaf, StoredArray) else np.asarray(leaf)
        return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)  # float64 becomes float32

    return jax.tree_util.tree_map_with_path(convert, tree)


def float_name(argument: str, dtype: Any) -> str:
    """Return the name of a type of floating-point numbers, which may be given as JAX or NumPy write it.

    Raises:
        ConfigError: It is not one of those that JAX computes with.
    """
    try:
        name = jax.numpy.dtype(dtype).name
    except TypeError:
        name = None
    if name not in _FLOATS:
        raise ConfigError(f"{argument}={dtype!r:.80} is not a type of floats: give one of {', '.join(_FLOATS)}.")
    return str(name)


def as_nested_dict(tree: Any) -> dict[Any, Any]:
    """Return the arrays of a tree in nested dicts, whatever classes hold them, for `raysgd.save_checkpoint`."""
    nested: dict[Any, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        *above, last = (key_of(key) for key in keys)
        node = nested
        for key in above:
            node = node.setdefault(key, {})
        node[last] = leaf
    return nested


def from_nested_dict(nested: Any, like: Any) -> Any:
    """Return a tree with the structure of ``like`` and the arrays of the result of `as_nested_dict`."""
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    leaves = []
    for keys, _ in paths:
        node = nested
        for key in map(key_of, keys):
            if isinstance(node, Mapping) or key != "value":  # a variable of nnx may have been saved as its value
                node = node[key if key in node else str(key)]  # orbax has texts as keys
        leaves.append(node)
    return jax.tree_util.tree_unflatten(structure, leaves)
