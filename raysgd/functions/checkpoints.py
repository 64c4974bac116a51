"""Checkpoints that a script saves and loads itself, in the driver. Arrays are NumPy's; no JAX array is made.

They have the format of all checkpoints, so `Predictor.predict` and ``fit(resume_from=...)`` take them, too. Those of orbax are
read, as arrays in files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from raysgd._util.text import with_article
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from raysgd.functions import orbax_checkpoints
from raysgd.functions.models import Model
from raysgd.functions.trees import as_nested_dict, float_name, from_nested_dict, shapes_of
from raysgd.functions.worker.train_state import with_kind_of_dicts
from raysgd.session.local import LocalSession


def save(folder: str, params: Any, opt_state: Any, float_dtype: Any, info: Mapping[str, Any]) -> Checkpoint:
    """Save a checkpoint in a folder, in place of the one that is there; see `Deployer.save_ckpt`."""
    convert = _converter(float_dtype)
    state = {name: convert(jax.tree.map(np.asarray, tree)) for name, tree in Model.of(params).as_state().items()}
    if opt_state is not None:
        state["opt_state"] = as_nested_dict(convert(jax.tree.map(np.asarray, opt_state)))
    kept = {name: _plain(value) for name, value in info.items()}
    store = CheckpointStore(Storage.from_uri(folder))
    session = LocalSession(folder)
    session.save_checkpoint(
        {"train_state": state, "info": kept}, files=False, metrics=None, all_ranks=False, allow_pickle=False
    )
    newest = store.list()[-1]
    for number in store.numbers():
        if number < newest.number:
            store.delete(number)
    return Checkpoint.of_manifest(store.path(newest.number), newest)


def find(folder: str) -> Checkpoint:
    """Return the checkpoint at a path, or the newest one in a folder that `save` wrote to.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    try:
        return Checkpoint.from_path(folder)
    except CheckpointNotFoundError:
        store = CheckpointStore(Storage.from_uri(folder))
        manifests = store.list()
        if not manifests:
            raise
        return Checkpoint.from_path(store.path(manifests[-1].number))


def read(given: str | Checkpoint) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the state and the information of a checkpoint, or of the newest one in a folder.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointError: It is not of `raysgd.functions`, and no tree that orbax saved.
    """
    try:
        checkpoint = find(given) if isinstance(given, str) else given
    except CheckpointNotFoundError:
        found = orbax_checkpoints.read(str(given))
        if found is None:
            raise
        return found
    saved = checkpoint.load()
    if not isinstance(saved, Mapping) or "train_state" not in saved:
        raise CheckpointError(f"{checkpoint.path} is not a checkpoint of raysgd.functions: it has no train_state.")
    info = dict(saved.get("info", {}))
    if (progress := saved.get("progress")) is not None:
        info["epoch_idx"] = progress["history"][-1]["epoch"] if progress["history"] else -1
    return saved["train_state"], info


def load(
    given: str | Checkpoint,
    *,
    like: Any,
    optimizer: Any,
    float_dtype: Any,
    load_params: bool,
    load_opt_state: bool,
    update_rng: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a checkpoint; see `Deployer.load_ckpt`."""
    (state, info), convert = read(given), _converter(float_dtype)
    model = None if like is None else Model.like(like)
    state = {**state, "params": convert(state["params"])}
    found: dict[str, Any] = {"params": None, "opt_state": None}
    if load_params:
        found["params"] = state["params"] if model is None else model.from_state(state, seed=0)
    if load_opt_state and optimizer is not None and "opt_state" in state:
        shapes = shapes_of(state["params"]) if model is None else model.params
        opt_like = jax.eval_shape(with_kind_of_dicts(optimizer, shapes).init, shapes)
        found["opt_state"] = convert(from_nested_dict(state["opt_state"], opt_like))
    if "step" in state:
        info["step"] = int(np.asarray(state["step"]))
    rng = state.get("rng", info.pop("rng", None))
    if update_rng and rng is not None:
        info["rng"] = np.asarray(rng, np.uint32)
    return found, info


def check_info(info: Any) -> tuple[Any, int, Any]:
    """Return the step, the epoch and the random key of ``last_ckpt_info``; those that it lacks are of a beginning.

    Raises:
        ConfigError: It is not such information.
    """
    if not isinstance(info, Mapping):
        raise ConfigError(
            f"last_ckpt_info is {with_article(type(info).__name__)}; give the second value that deployer.load_ckpt returned."
        )
    numbers = []
    for name, default in (("step", 0), ("epoch_idx", -1)):
        value = info.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < default:
            raise ConfigError(f"last_ckpt_info has {name}={value!r:.50}; give a whole number, {default} or more.")
        numbers.append(int(value))
    rng = info.get("rng")
    return np.asarray(numbers[0], np.int32), numbers[1], None if rng is None else np.asarray(rng, np.uint32)


def _converter(float_dtype: Any) -> Any:
    """Return a function that converts the floats of a tree."""
    if float_dtype is None:
        return lambda tree: tree
    dtype = np.dtype(jax.numpy.dtype(float_name("float_dtype", float_dtype)))

    def convert(leaf: Any) -> Any:
        is_float = jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
        return leaf.astype(dtype) if is_float else leaf

    return lambda tree: jax.tree.map(convert, tree)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else np.asarray(value)
