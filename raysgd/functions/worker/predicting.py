"""`predict_all`: the train_func of `raysgd.functions.Predictor.predict`. Worker side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from raysgd.functions.models import Model
from raysgd.functions.settings import PredictSettings, TaskSettings
from raysgd.functions.sharding import plan_sharding
from raysgd.functions.trees import shapes_of
from raysgd.functions.worker.batches import ExampleBatches
from raysgd.functions.worker.evaluation import predict
from raysgd.functions.worker.steps import Steps, find_steps, mesh_of
from raysgd.session import api

EXAMPLES = "examples"


def rows_on_all_devices(per_device: int, settings: TaskSettings, num_workers: int) -> int:
    """Return the rows of a batch on all devices of so many workers: each replica of the model takes ``per_device`` rows."""
    num_devices: int = num_workers * jax.local_device_count()
    return per_device * (num_devices // settings.n_model_shards)


def load_start(settings: TaskSettings) -> Any:
    """Return what the run begins with: a state of this run, or the initial one, or that of another run's checkpoint."""
    saved = api.load_checkpoint()
    if saved is None and settings.start is not None:
        return {"train_state": api.load_checkpoint(settings.start)["train_state"]}
    return saved


def predict_all(parts: Mapping[str, Any], settings: PredictSettings, identity: bytes) -> list[Any]:
    """Predict all examples; the result is that of rank 0.

    Args:
        parts: ``collate_fn``, ``pred_fn``, ``output_fn``, ``like`` (a `Model` of shapes, or None) and ``rules``.
        settings: The settings.
        identity: Equal for equal functions; see `find_steps`.
    """
    start = load_start(settings)
    saved = start["train_state"]
    model = parts["like"] or Model(shapes_of(saved["params"]))
    mesh = mesh_of(settings.n_model_shards)
    plan = plan_sharding(model.params, dict(mesh.shape), parts["rules"], model.declared)
    steps = find_steps(
        plan, ("predict", identity, model.definition), lambda: Steps(mesh, plan, pred_fn=parts["pred_fn"], model=model)
    )
    params, model_state = steps.restore_params(saved)
    rows = rows_on_all_devices(settings.per_device_batch_size, settings, api.world_size())
    dataset = api.get_dataset(EXAMPLES)
    batches = ExampleBatches(
        dataset,
        parts["collate_fn"],
        steps,
        rows,
        seed=settings.jax_seed,
        pads=True,
        per_worker=settings.collate_per_worker,
    )
    is_first = api.world_rank() == 0
    found = predict(
        steps,
        params,
        batches,
        parts["output_fn"],
        model_state=model_state,
        seed=settings.jax_seed,
        is_first_rank=is_first,
        keeps_examples=False,
    )
    return found.outputs
