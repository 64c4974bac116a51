"""`export`: the train_func of `raysgd.functions.Trainer.export_ckpt`. Worker side."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from raysgd._util.imports import import_optional
from raysgd.errors import CheckpointError
from raysgd.functions.settings import TaskSettings
from raysgd.functions.sharding import plan_sharding
from raysgd.functions.worker.predicting import load_start
from raysgd.functions.worker.steps import Steps, mesh_of
from raysgd.session import api


def export(parts: Mapping[str, Any], settings: TaskSettings, folder: str) -> None:
    """Write the state that the run begins with as orbax writes a tree: each process the shards of its devices.

    Args:
        parts: ``optimizer``, ``rules`` and ``like`` (a `Model` of shapes).
        settings: The settings.
        folder: A path that does not exist yet.
    """
    orbax = import_optional("orbax.checkpoint", "flax")
    if any(api.gather(os.path.exists(folder))):  # before any rank makes it
        raise CheckpointError(f"export_ckpt: {folder} exists already: give another folder, or remove it.")
    model = parts["like"]
    mesh = mesh_of(settings.n_model_shards)
    plan = plan_sharding(model.params, dict(mesh.shape), parts["rules"], model.declared)
    state = Steps(mesh, plan, optimizer=parts["optimizer"], model=model).load_state(
        load_start(settings)["train_state"], settings.jax_seed
    )
    names = ("step", "params", "opt_state", "rng", "model_state")
    tree = {name: each for name in names if (each := getattr(state, name)) is not None}
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
