"""Reads checkpoints that orbax wrote, also those of its CheckpointManager and of redco. Any process; it makes no JAX array.

Only the list of arrays is read here. Their values are read with tensorstore, in slices, where they are needed.
"""

from __future__ import annotations

import json
import os
import re
from functools import partial
from typing import Any

import numpy as np

from raysgd._util.imports import import_optional
from raysgd.errors import CheckpointError
from raysgd.functions.stored_arrays import StoredArray

#: What orbax writes for a tree and for a dict of JSON, and redco for what it is given in addition.
_TREE, _JSON, _INFO = "_METADATA", "metadata", "info.json"
#: Entries of a tree that are arrays. Others are texts, and places without a value.
_ARRAYS = {"jax.Array", "np.ndarray", "scalar"}
_SEQUENCE = 1


def read(folder: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the state and the information of a checkpoint of orbax, or None if the folder is not one.

    Args:
        folder: A folder of a tree, of items, or of numbered checkpoints, of which the newest is read.

    Returns:
        ``params`` and, if they are there, ``opt_state``, ``step`` and so on, as nested dicts of `StoredArray`; and the
        information, such as the ``step`` of a CheckpointManager.

    Raises:
        CheckpointError: It has several trees, and none is called params.
    """
    if os.path.isfile(os.path.join(folder, _TREE)):
        return _as_state(_read_tree(folder)), {}
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    items = {
        name: _read_tree(path)
        for name in names
        if os.path.isfile(os.path.join(path := os.path.join(folder, name), _TREE))
    }
    if items:
        if "params" not in items and len(items) > 1:
            raise CheckpointError(
                f"{folder} has the items {', '.join(items)}, and none is called params: give the folder of one of them."
            )
        info: dict[str, Any] = {}
        for path in (os.path.join(folder, _INFO), *(os.path.join(folder, name, _JSON) for name in names)):
            if os.path.isfile(path):
                with open(path, encoding="utf-8") as file:
                    info |= json.load(file)
        return (items if "params" in items else _as_state(*items.values())), info
    steps = {int(match[1]): name for name in names if (match := re.fullmatch(r"(?:.*_)?(\d+)", name))}
    for step in sorted(steps, reverse=True):
        if (found := read(os.path.join(folder, steps[step]))) is not None:
            return found[0], {"step": step, **found[1]}
    return None


def _as_state(tree: dict[str, Any]) -> dict[str, Any]:
    return tree if isinstance(tree.get("params"), dict) else {"params": tree}


def _read_tree(folder: str) -> dict[Any, Any]:
    """Return the arrays of a tree in nested dicts, whose keys are those of `raysgd.functions.trees.as_nested_dict`."""
    with open(os.path.join(folder, _TREE), encoding="utf-8") as file:
        metadata = json.load(file)
    nested: dict[Any, Any] = {}
    for entry in metadata["tree_metadata"].values():
        keys = [int(each["key"]) if each["key_type"] == _SEQUENCE else each["key"] for each in entry["key_metadata"]]
        if entry["value_metadata"]["value_type"] not in _ARRAYS:
            continue
        node = nested
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = _open_array(folder, ".".join(map(str, keys)), metadata.get("use_zarr3", False))
    return nested


def _open_array(folder: str, name: str, use_zarr3: bool) -> StoredArray:
    kvstore: Any = {"driver": "file", "path": os.path.join(folder, name, "")}
    if os.path.isfile(os.path.join(folder, "manifest.ocdbt")):
        kvstore = {"driver": "ocdbt", "base": f"file://{os.path.join(folder, '')}", "path": f"{name}/"}
    spec = {"driver": "zarr3" if use_zarr3 else "zarr", "kvstore": kvstore}
    try:
        opened = _open(spec)
    except ValueError as error:
        raise CheckpointError(f"{folder} lists the array {name}, which cannot be read: {error}") from error
    return StoredArray(tuple(opened.shape), np.dtype(opened.dtype.numpy_dtype), partial(_read, spec))


def _read(spec: dict[str, Any], slices: tuple[slice, ...]) -> Any:
    return _open(spec)[slices].read().result()


def _open(spec: dict[str, Any]) -> Any:
    return import_optional("tensorstore", "flax").open(spec, open=True, read=True).result()
