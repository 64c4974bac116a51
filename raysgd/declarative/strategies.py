"""The engine's config that a training's settings mean, and the plan for `pas_policy="autodist"`. Driver side.

Only `make_plan` imports torch, and the user's model and dataset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raysgd.declarative.args import TrainerArgs
from raysgd.declarative.fields import FieldError, of_field
from raysgd.declarative.values import Importer
from raysgd.engine.config import EngineConfig

#: What the precision of parameters is called by the engine.
_PRECISIONS = {"fp32": "fp32", "bf16": "bf16-true", "fp16": "fp16"}
#: Fields of the engine that follow from other fields here, and these.
_SET_BY_THE_LOOP = {
    "accumulation_steps": "grad_accumulation_steps or global_batch_size",
    "weighted_gradients": "optimizer.grad_reduction row-mean",
    "plan": "pas_policy autodist",
}


def list_warnings(args: TrainerArgs) -> list[str]:
    """Return what the user should know of fields that mean something else here than in nnScaler."""
    found, checkpoint = [], args.checkpoint
    if checkpoint.save_type == "deduped":
        found.append("checkpoint.save_type='deduped' is what 'sharded' is, too: each tensor lies in a checkpoint once.")
    if not checkpoint.symlink_best_and_last:
        found.append(
            "checkpoint.symlink_best_and_last=False: there are neither copies nor links; resume_from finds last and best all the "
            "same."
        )
    if args.compute.pas_config and "." not in args.pas_policy:
        found.append(
            f"compute_config.pas_config is not used by pas_policy={args.pas_policy!r}: give engine, such as "
            "activation_checkpointing, or a function in pas_policy."
        )
    if args.precision_of("param") == "fp16":
        found.append("precision fp16 of parameters is autocast with a dynamic loss scale; the parameters stay fp32.")
    if args.search is not None and checkpoint.resume_from is not None:
        found.append("checkpoint.resume_from has no effect in a search: each trial starts from the beginning.")
    if args.search is not None and checkpoint.save_dir != type(checkpoint).save_dir:
        found.append(
            "checkpoint.save_dir has no effect in a search: trials are in the folder of Ray Tune, ~/ray_results."
        )
    if args.seed is None and args.init_env_fn is None:
        found.append("neither seed nor init_env_fn is given, so a repeated training starts from other random numbers.")
    return found


def engine_fields(args: TrainerArgs, importer: Importer) -> dict[str, Any]:
    """Return the fields of the engine's config that were chosen.

    Raises:
        FieldError: They do not go together, or an own ``pas_policy`` returned something else.
    """
    compute, each = args.compute, args.compute.plan_ngpus
    fields: dict[str, Any] = {}
    if (param := args.precision_of("param")) is not None:
        fields["precision"] = _PRECISIONS[param]
    if compute.use_zero:
        fields["zero_stage"] = 2 if compute.zero_use_reduce_scatter else 1
    if args.optimizer.grad_reduction == "row-mean":
        fields["weighted_gradients"] = True
    if args.pas_policy == "tp":
        fields["tensor_parallel"] = each
    elif args.pas_policy == "pp":
        fields["pipeline_parallel"] = each
    elif args.pas_policy == "hybrid":
        fields |= _hybrid(each)
    elif args.pas_policy in ("dp", "data"):
        fields |= {"tensor_parallel": 1, "pipeline_parallel": 1}
    elif "." in args.pas_policy:
        fields |= _own_policy(args, importer)
    fields |= _further_fields(args)
    with of_field("engine", names=args.engine):
        EngineConfig.of(fields)
    return fields


def check_sizes(args: TrainerArgs, workers: Any, each: int) -> None:
    """Check that groups of every size that an elastic training may have take the rows of an optimizer step evenly.

    Raises:
        FieldError: One does not; the message names it, and batches with which all do.
    """
    low, high = workers if isinstance(workers, tuple) and len(workers) == 2 else (workers, workers)
    rows, micro = args.rows_per_step, args.micro_batch_size
    replicas = range(max(1, int(low) // each), int(min(high, rows // micro * each)) // each + 1)
    unfit = [number for number in replicas if rows % (micro * number)]
    if not unfit and replicas:
        return
    multiple = micro * math.lcm(*(replicas or [max(1, int(low) // each)]))
    raise FieldError(
        ("trainer", "num_workers") if "num_workers" in args.trainer else ("compute_config", "runtime_ngpus"),
        f"{unfit[0] * each if unfit else low} workers cannot take {rows} rows of an optimizer "
        f"step in micro-batches of {micro}; give a global_batch_size that is a multiple of {multiple}, or other numbers of "
        "workers.",
    )


def _further_fields(args: TrainerArgs) -> dict[str, Any]:
    fields = {name.replace("-", "_"): value for name, value in args.engine.items()}
    for name, instead in _SET_BY_THE_LOOP.items():
        if name in fields:
            raise FieldError(("engine", name), f"engine.{name} is set by the training: give {instead}.")
    return fields


def _hybrid(each: int) -> dict[str, int]:
    """Return tensor and pipeline parallelism that are as equal as can be."""
    tensor = max(size for size in range(1, each + 1) if each % size == 0 and size * size <= each * 2 and size <= each)
    return {"tensor_parallel": tensor, "pipeline_parallel": each // tensor}


def _own_policy(args: TrainerArgs, importer: Importer) -> Mapping[str, Any]:
    function = importer.load(args.pas_policy)
    found = function(args.compute) if callable(function) else None
    if isinstance(found, EngineConfig):
        return found.named()
    if not isinstance(found, Mapping):
        raise FieldError(
            ("pas_policy",),
            f"pas_policy {args.pas_policy} returned {type(found).__name__}; return fields of raysgd.EngineConfig, such as "
            "{'tensor_parallel': 2}, for the ComputeConfig that it gets.",
        )
    return found


@dataclass(frozen=True)
class Strategies:
    """The strategies of a training, as they were decided.

    Attributes:
        config: The engine's config.
        plan: The `raysgd.engine.Plan` that it is from; None: it was not planned.
    """

    config: EngineConfig
    plan: Any = None


def is_planned(args: TrainerArgs) -> bool:
    """Return whether the engine's plan decides about the strategies."""
    return args.run_mode == "compile" or (args.pas_policy == "autodist" and args.compute.plan_ngpus > 1)


def decide(args: TrainerArgs, importer: Importer) -> Strategies:
    """Decide about the strategies, by a plan for ``"autodist"`` with several workers for a replica, and for ``"compile"``.

    Raises:
        ConfigError: They cannot be used, or no strategy fits.
    """
    fields = engine_fields(args, importer)
    if is_planned(args):
        plan = make_plan(args, fields, importer)
        names = {**fields, **plan.config.named()}
        names.pop("memory_per_device", None)  # of the plan; an engine takes it only with one
        return Strategies(EngineConfig.of({**names, "accumulation_steps": 1}), plan)
    return Strategies(EngineConfig.of(fields))


def make_plan(args: TrainerArgs, fields: Mapping[str, Any], importer: Importer) -> Any:
    """Plan with the engine: the fastest strategies that fit, for the rows of an optimizer step.

    Raises:
        ConfigError: The model cannot be traced, or fits nowhere.
    """
    from raysgd.declarative.components import find_loss, read_rows
    from raysgd.engine.planning import plan

    compute = args.compute
    fixed = {
        name: value for name, value in fields.items() if name not in ("memory_per_device", "plan", "weighted_gradients")
    }
    model_type = args.model.type

    def make_optimizer(parameters: Any) -> Any:
        return importer.build(args.optimizer.type, args.optimizer.args, parameters)

    def compute_loss(model: Any, batch: Any) -> Any:
        return find_loss(model(batch), model_type)

    import torch

    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    memory = fields.get("memory_per_device") or _memory_of(device, compute.num_workers)
    return plan(
        lambda: importer.build(model_type, args.model.args),
        read_rows(args, importer, args.rows_per_step),
        compute.num_workers,
        memory,
        loss_fn=compute_loss,
        optimizer_fn=make_optimizer,
        device=device,
        refuse=lambda config: _refuse(args, config),
        **fixed,
    )


def _refuse(args: TrainerArgs, config: EngineConfig) -> str | None:
    """Return why a strategy cannot be used with these batches, or None."""
    each = config.workers_per_replica
    if args.compute.plan_ngpus % each:
        return f"{each} workers for a replica of the model do not divide plan_ngpus {args.compute.plan_ngpus}"
    replicas = args.compute.num_workers // each
    if args.rows_per_step % (args.micro_batch_size * replicas):
        return f"{args.rows_per_step} rows of a step are not a multiple of {replicas} replicas x {args.micro_batch_size} rows"
    return None


def _memory_of(device: str, num_workers: int) -> float:
    if device == "cuda":
        import torch

        return float(torch.cuda.mem_get_info()[1])
    import psutil

    return float(psutil.virtual_memory().total) / num_workers
