"""`plan`: choose the strategies that fit a model into the memory of the devices, the fastest first.

It runs anywhere: the model is on the meta device, and neither Ray, nor a process group, nor a GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from raysgd._util.text import with_article
from raysgd.config.argument_names import refuse_unknown
from raysgd.config.checks import check_amount, check_choice, check_count, check_instance
from raysgd.engine.config import EngineConfig, check_memory
from raysgd.engine.planning.candidates import Candidate, Refuse, check_fixed
from raysgd.engine.planning.memory import MemoryEstimate, estimate_memory, in_gb
from raysgd.engine.planning.planner import Planner, Workers, choose, choose_fused_step, profile_model, say_impossible
from raysgd.engine.planning.profile import ModelProfile
from raysgd.engine.planning.step_time import Hardware
from raysgd.engine.planning.support import EngineSupport
from raysgd.engine.planning.trace import Batch, DeviceType, LossFn, OptimizerFn, TracedModel
from raysgd.errors import ConfigError

_SHOWN = 4
_EXPLAINED = 6


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice of strategies and what it was chosen from. Printing it shows a table and the reason.

    Attributes:
        chosen: The strategy, with its estimates of memory and time.
        candidates: All strategies that can work, the fastest that fit first, then those that do not fit.
        refused: Why other strategies cannot work.
        profile: What was found of the model.
        num_workers: Devices.
        memory_per_device: Bytes of a device.
        margin: The part of it that is kept free.
        fixed: The fields that were not varied.
        hardware: The speeds from which the times were estimated.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...] = field(repr=False)
    refused: Mapping[str, str] = field(repr=False)
    profile: ModelProfile = field(repr=False)
    num_workers: int
    memory_per_device: float
    margin: float
    fixed: Mapping[str, Any]
    hardware: Hardware

    @property
    def is_calibrated(self) -> bool:
        """Whether the times are those of given devices; the defaults of `Hardware` are not measured."""
        return self.hardware != Hardware()

    @property
    def config(self) -> EngineConfig:
        """The chosen strategy, for `raysgd.Engine`."""
        return self.chosen.config

    @property
    def loader_batch_size(self) -> int:
        """Rows of a batch of each worker's loader."""
        return self.chosen.loader_batch_size

    @property
    def reason(self) -> str:
        """Why this strategy was chosen, and what kept simpler ones from it."""
        fitting = [one for one in self.candidates if one.is_fitting]
        assumed = (
            "" if self.is_calibrated else " (not calibrated: times assume the speeds of a current data-center GPU)"
        )
        lines = [
            f"Chosen: {self.chosen.describe()}. {len(fitting)} of {len(self.candidates)} strategies fit into "
            f"{in_gb(self.chosen.limit_bytes)} GB; a step takes an estimated {_seconds(self.chosen)}{assumed}."
        ]
        for one in _find_simpler(self.candidates, self.chosen):
            if not one.is_fitting:
                lines.append(f"Not {one.describe()}: needs {in_gb(one.memory.total)} GB, {one.memory.explain()}.")
            else:
                lines.append(f"Not {one.describe()}: {_seconds(one)} a step, {_explain_time(one, self.chosen)}.")
        return "\n".join(lines)

    def __str__(self) -> str:
        """Return a table of the best strategies, and the reason."""
        profile = self.profile
        stacks = ", ".join(f"{count} {name or 'model'}" for name, count in profile.stacks.items()) or "none"
        title = (
            f"Plan for {profile.num_parameters:,} parameters (layers: {stacks}) on {self.num_workers} x "
            f"{in_gb(self.memory_per_device)} GB, of which {self.margin:.0%} are kept free"
        )
        shown = [one for one in self.candidates if one.is_fitting and one is not self.chosen][:_SHOWN]
        shown += _find_simpler(self.candidates, self.chosen)[:_SHOWN]
        rows = [_HEAD, *(_row(one, self.chosen) for one in [self.chosen, *_unique(shown)])]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([title, "", *lines, "", self.reason])


_HEAD = (
    "",
    "strategy",
    "rows",
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "buffers",
    "total GB",
    "s/step",
    "fits",
)


def plan(
    model_fn: Callable[[], nn.Module],
    batch: Batch,
    num_workers: int,
    memory_per_device: float,
    *,
    loss_fn: LossFn | None = None,
    optimizer_fn: OptimizerFn = torch.optim.AdamW,
    device: DeviceType = "cuda",
    hardware: Hardware | None = None,
    margin: float = 0.05,
    tensor_plan: Any = None,
    refuse: Refuse | None = None,
    **fixed: Any,
) -> Plan:
    """Choose the strategies for training a model on a number of devices: the fastest that fits into their memory.

    Nothing is allocated: the model is built on the meta device, and one step of it is traced for each size of a
    micro-batch. Combinations of data, tensor, sequence and pipeline parallelism, ZeRO stages, activation checkpointing
    and micro-batches are compared by the memory of the rank that needs most, and by an estimated time.

    Args:
        model_fn: Makes the model; it is called under ``torch.device("meta")``.
        batch: The rows of one optimizer step, of all workers together: a dict of tensors or shapes (``model(**batch)``), a
            tuple (``model(*batch)``) or one tensor. A shape stands for int64 token ids. The first dimension is the rows.
        num_workers: Devices.
        memory_per_device: Bytes of a device, such as ``80e9``.
        loss_fn: Computes the loss of a model and a batch. None: the ``loss`` of the model's output; where it has none, the sum
            of the output's first tensor stands for it.
        optimizer_fn: Makes the optimizer of a list of parameters; its state is counted after one step.
        device: Where the training will run: attention and dropout keep less on a GPU.
        hardware: Speeds of devices and connections, for the estimate of time. None: those of a current data-center GPU; the
            plan then says that its times are not calibrated.
        margin: Part of the memory that is kept free, for the CUDA context and fragmentation.
        tensor_plan: Your own plan for ``tensor_parallel``, as ``Engine.compose`` takes it. Without one, tensor parallelism is
            considered for models that the engine knows.
        refuse: Returns why a strategy is not supported, or None if it is.
        **fixed: Fields of `EngineConfig` that are chosen by hand and not varied, such as ``zero_stage=3``.

    Returns:
        The plan; ``print(plan)`` shows a table with the reason, ``plan.config`` is for `raysgd.Engine`.

    Raises:
        UnknownArgumentError: A fixed field does not exist, or is not a strategy.
        ConfigError: The fixed choices cannot work, the model cannot be traced, or no strategy fits. The message has the
            numbers and what would help.
    """
    check_count("num_workers", num_workers, minimum=1)
    check_memory(memory_per_device)
    check_choice("device", device, ("cuda", "cpu"))
    if not 0 <= check_amount("margin", margin) < 1:
        raise ConfigError(
            f"margin={margin} is the part of the memory that is kept free: give 0 or more, and less than 1."
        )
    hardware = check_instance("hardware", hardware, Hardware)
    fixed = choose_fused_step(fixed, optimizer_fn, device)
    precision = check_fixed(fixed).precision
    model = TracedModel(model_fn, batch, loss_fn=loss_fn, precision=precision, device=device, tensor_plan=tensor_plan)
    support = EngineSupport(model.model, has_own_plan=tensor_plan is not None, refuse=refuse)
    planner = Planner(
        model,
        optimizer_fn,
        workers=Workers(num_workers, model.num_rows),
        limit_bytes=memory_per_device * (1 - margin),
        hardware=hardware,
        support=support,
    )
    candidates, refused = planner.compare(fixed)
    if not candidates:
        raise ConfigError(say_impossible(refused, fixed))
    if not candidates[0].is_fitting:
        helps = [*planner.find_freed_choice(fixed), *planner.find_more_workers(fixed), *planner.find_offload(fixed)]
        raise ConfigError(planner.say_what_would_help(candidates, memory_per_device, helps))
    return Plan(
        chosen=choose(candidates),
        candidates=candidates,
        refused=refused,
        profile=planner.profile,
        num_workers=num_workers,
        memory_per_device=memory_per_device,
        margin=margin,
        fixed=dict(fixed),
        hardware=hardware,
    )


@refuse_unknown("predict_memory")
def predict_memory(
    model_fn: Callable[[], nn.Module],
    batch: Batch,
    config: EngineConfig,
    num_workers: int,
    *,
    loss_fn: LossFn | None = None,
    optimizer_fn: OptimizerFn = torch.optim.AdamW,
    device: DeviceType = "cuda",
    tensor_plan: Any = None,
) -> MemoryEstimate:
    """Predict the memory of the rank that needs most under a given strategy. It is the prediction of ``Engine.memory()``.

    Args:
        model_fn: As of `plan`.
        batch: The rows of one micro-batch of one rank.
        config: The strategy.
        num_workers: Devices.
        loss_fn: As of `plan`.
        optimizer_fn: As of `plan`.
        device: As of `plan`.
        tensor_plan: As of `plan`.

    Raises:
        ConfigError: The strategy does not fit the number of workers, or the model cannot be traced.
    """
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config={config!r} is {with_article(type(config).__name__)}; give an EngineConfig(...).")
    data_parallel, remainder = divmod(check_count("num_workers", num_workers, minimum=1), config.workers_per_replica)
    if remainder:
        raise ConfigError(
            f"num_workers={num_workers} is not a multiple of tensor_parallel={config.tensor_parallel} x "
            f"pipeline_parallel={config.pipeline_parallel} = {config.workers_per_replica}."
        )
    model = TracedModel(
        model_fn, batch, loss_fn=loss_fn, precision=config.precision, device=device, tensor_plan=tensor_plan
    )
    profile = profile_model(model, optimizer_fn, [model.num_rows])
    support = EngineSupport(model.model, has_own_plan=tensor_plan is not None)
    sharding_obstacle = profile.tensor_parallel_obstacle if config.tensor_parallel > 1 else None
    if obstacle := support.find_obstacle(config) or sharding_obstacle:
        raise ConfigError(obstacle)
    profile = replace(profile, stage_blocks=support.stage_blocks)
    if config.fused_optimizer is None:
        config = replace(config, **choose_fused_step({}, optimizer_fn, device))
    return estimate_memory(profile, config, data_parallel=data_parallel, num_rows=model.num_rows)


def _find_simpler(candidates: tuple[Candidate, ...], chosen: Candidate) -> list[Candidate]:
    """Return the best of each simpler kind of strategy that a reader would try first.

    These are the ZeRO stages without checkpointing, and full checkpointing with the highest of them.
    """
    highest = max(one.config.zero_stage for one in candidates)
    best: dict[Any, Candidate] = {}
    for one in candidates:
        config = one.config
        kind = (
            config.tensor_parallel > 1,
            config.pipeline_parallel > 1,
            config.zero_stage,
            config.activation_checkpointing,
        )
        is_tried = config.activation_checkpointing is None or (
            config.activation_checkpointing == "full" and config.zero_stage in (highest, chosen.config.zero_stage)
        )
        if one.num_strategies >= chosen.num_strategies or not is_tried:
            continue
        if kind not in best or (not best[kind].is_fitting and one.memory.total < best[kind].memory.total):
            best[kind] = one
    return sorted(best.values(), key=lambda one: one.num_strategies)[:_EXPLAINED]


def _unique(candidates: list[Candidate]) -> list[Candidate]:
    return list({id(one): one for one in candidates}.values())


def _row(one: Candidate, chosen: Candidate) -> tuple[str, ...]:
    memory = one.memory
    parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.buffers, memory.total)
    return (
        ">" if one is chosen else "",
        one.describe(),
        str(one.num_rows),
        *(in_gb(part) for part in parts),
        f"{one.time.total_s:.3g}",
        "yes" if one.is_fitting else "no",
    )


def _explain_time(one: Candidate, chosen: Candidate) -> str:
    names = ("compute_s", "recompute_s", "tensor_s", "bubble_s", "data_s", "optimizer_s")
    extra = {name: getattr(one.time, name) - getattr(chosen.time, name) for name in names}
    worst = max(extra, key=lambda name: extra[name])
    words = {
        "compute_s": "computation",
        "recompute_s": "repeated forward passes",
        "tensor_s": "tensor-parallel communication",
        "bubble_s": "waiting in the pipeline",
        "data_s": "communication between replicas",
        "optimizer_s": "the optimizer's step",
    }
    return f"{words[worst]} takes {extra[worst]:.3g} s more"


def _seconds(one: Candidate) -> str:
    return f"{one.time.total_s:.3g} s"
