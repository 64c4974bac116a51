"""`plan`: choose the strategies that fit a model into the memory of the devices, the fastest first.

It runs anywhere: the model is on the meta device, and neither Ray, nor a process group, nor a GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from raysgd._util.text import with_article
from raysgd.config.argument_names import nearest, refuse_unknown
from raysgd.config.checks import check_amount, check_choice, check_count, check_instance
from raysgd.engine.config import PLAN_FIELDS, EngineConfig, check_memory
from raysgd.engine.planning.candidates import Candidate, Hardware, Refuse, Search, find_obstacle
from raysgd.engine.planning.memory_prediction import MemoryEstimate, estimate_memory, in_gb
from raysgd.engine.planning.trace import Batch, DeviceType, LossFn, OptimizerFn, TracedModel
from raysgd.errors import ConfigError, UnknownArgumentError

_SHOWN, _EXPLAINED = 4, 6
# Of candidates whose times differ by less than this, the one with the fewest strategies is chosen.
_SAME_TIME = 0.02
#: Multiples of the workers that are tried if nothing fits.
FACTORS = (2, 4, 8)
#: A change with which a model may fit: what to do, and fields of `Search`.
Change = tuple[str, Mapping[str, Any]]
_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "total")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice of strategies and what it was chosen from. Printing it shows a table and the reason.

    Attributes:
        chosen: The strategy, with its estimates of memory and time.
        candidates: All strategies that can work, the fastest that fit first, then those that do not fit.
        refused: Why other strategies cannot work.
        parameters: The shape of each parameter, by its first name.
        stacks: How many layers each list of repeated layers has.
        num_workers: Devices.
        memory_per_device: Bytes of a device.
        margin: The part of it that is kept free.
        fixed: The fields that were not varied.
        hardware: The speeds from which the times were estimated.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...] = field(repr=False)
    refused: Mapping[str, str] = field(repr=False)
    parameters: Mapping[str, tuple[int, ...]] = field(repr=False)
    stacks: Mapping[str, int]
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
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.parameters.values())

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
        limit = in_gb(self.memory_per_device * (1 - self.margin))
        lines = [
            f"Chosen: {self.chosen.describe()}. {len(fitting)} of {len(self.candidates)} strategies fit into {limit} GB; a step "
            f"takes an estimated {self.chosen.step_s:.3g} s{assumed}."
        ]
        for one in self._find_simpler():
            why = f"{one.step_s:.3g} s a step"
            if not one.is_fitting:
                why = f"needs {in_gb(one.memory.total)} GB, {one.memory.explain()}"
            lines.append(f"Not {one.describe()}: {why}.")
        return "\n".join(lines)

    def __str__(self) -> str:
        """Return a table of the best strategies, and the reason."""
        stacks = ", ".join(f"{count} {name or 'model'}" for name, count in self.stacks.items()) or "none"
        title = (
            f"Plan for {self.num_parameters:,} parameters (layers: {stacks}) on {self.num_workers} x "
            f"{in_gb(self.memory_per_device)} GB, of which {self.margin:.0%} are kept free"
        )
        shown = [one for one in self.candidates if one.is_fitting and one is not self.chosen][:_SHOWN]
        shown = [self.chosen, *shown, *self._find_simpler()[:_SHOWN]]
        rows: list[tuple[str, ...]] = [("", "strategy", "rows", *_PARTS[:-1], "total GB", "s/step", "fits")]
        for one in {id(one): one for one in shown}.values():
            parts = [in_gb(getattr(one.memory, name)) for name in _PARTS]
            mark, fits = ">" * (one is self.chosen), "yes" if one.is_fitting else "no"
            rows.append((mark, one.describe(), str(one.num_rows), *parts, f"{one.step_s:.3g}", fits))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([title, "", *lines, "", self.reason])

    def _find_simpler(self) -> list[Candidate]:
        """Return the best of each simpler kind of strategy that a reader would try first.

        These are the ZeRO stages without checkpointing, and full checkpointing with the highest of them.
        """
        stages = (max(one.config.zero_stage for one in self.candidates), self.config.zero_stage)
        best: dict[Any, Candidate] = {}
        for one in self.candidates:
            of = one.config
            kind = of.tensor_parallel > 1, of.pipeline_parallel > 1, of.zero_stage, of.activation_checkpointing
            is_tried = kind[3] is None or (kind[3] == "full" and of.zero_stage in stages)
            if one.num_strategies < self.chosen.num_strategies and is_tried:
                known = best.setdefault(kind, one)
                if not known.is_fitting and one.memory.total < known.memory.total:
                    best[kind] = one
        return sorted(best.values(), key=lambda one: one.num_strategies)[:_EXPLAINED]


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
    fixed = choose_fused_step(fixed, optimizer_fn, device)
    model = TracedModel(
        model_fn,
        batch,
        optimizer_fn,
        loss_fn=loss_fn,
        precision=_check_fixed(fixed).precision,
        device=device,
        tensor_plan=tensor_plan,
    )
    search = Search(
        model=model,
        num_workers=num_workers,
        batch_rows=model.num_rows,
        limit_bytes=memory_per_device * (1 - margin),
        fixed=fixed,
        hardware=check_instance("hardware", hardware, Hardware),
        refuse=refuse,
    )
    more = [(f"{num_workers * one} workers", {"num_workers": num_workers * one}) for one in FACTORS]
    return make_plan(search, memory_per_device, [more])


def make_plan(search: Search, memory_per_device: float, changes: Iterable[Iterable[Change]], *, kept: str = "") -> Plan:
    """Choose between the strategies of a search.

    Args:
        search: The search.
        memory_per_device: Bytes of a device; the search has what of it may be used.
        changes: What may help if nothing fits, in groups of which the first that helps is named. That a choice made by hand is
            given up, and offload, are tried in any case.
        kept: A fixed field that was not chosen by hand.

    Raises:
        ConfigError: No strategy works, or none fits.
    """
    candidates, refused = search.compare()
    by_hand = {name: one for name, one in search.fixed.items() if name not in ("fused_optimizer", kept)}
    if not candidates:
        chosen = ", ".join(f"{name}={value!r}" for name, value in by_hand.items())
        reasons = list(dict.fromkeys(refused.values())) or ["no size of a micro-batch divides the batch"]
        text = f"No strategy {f'with {chosen} ' if chosen else ''}can work: {'; '.join(reasons[:3])}."
        each = search.workers_per_replica
        trainer = f" Each replica is on {each} workers, as the Trainer's workers_per_replica says." if each else ""
        raise ConfigError(text + trainer)
    if not candidates[0].is_fitting:
        fixed = search.fixed
        others = {
            name: {key: value for key, value in fixed.items() if key != name} for name in by_hand if name != "precision"
        }
        freed = [(f"leaving out {name}={fixed[name]!r}", {"fixed": other}) for name, other in others.items()]
        may_offload = not fixed.get("cpu_offload") and fixed.get("zero_stage", 3) == 3
        offload = [("cpu_offload=True", {"fixed": {**fixed, "cpu_offload": True}})] if may_offload else []
        helps = [text for group in (freed, *changes, offload) for text in _find_help(search, group)]
        smallest = min(candidates, key=lambda one: one.memory.total)
        raise ConfigError(
            f"The model fits nowhere: {search.model.num_parameters:,} parameters on {search.num_workers} x "
            f"{in_gb(memory_per_device)} GB, of which {in_gb(search.limit_bytes)} GB may be used. The smallest need is "
            f"{in_gb(smallest.memory.total)} GB per device, with {smallest.describe()} and {smallest.num_rows} rows in a "
            f"micro-batch: {smallest.memory.explain()}. "
            + (f"What would help: {'; '.join(helps)}." if helps else "A smaller model or larger devices are needed.")
        )
    fastest = candidates[0].step_s
    equal = [one for one in candidates if one.is_fitting and one.step_s <= fastest * (1 + _SAME_TIME)]
    return Plan(
        chosen=min(equal, key=lambda one: (one.num_strategies, one.step_s)),
        candidates=candidates,
        refused=refused,
        parameters={one.names[0]: one.shape for one in search.model.parameters},
        stacks={name: len(blocks) for name, blocks in search.model.stacks.items()},
        num_workers=search.num_workers,
        memory_per_device=memory_per_device,
        margin=1 - search.limit_bytes / memory_per_device,
        fixed=search.fixed,
        hardware=search.hardware,
    )


def _find_help(search: Search, changes: Iterable[Change]) -> Iterator[str]:
    """Yield the first change with which the model fits."""
    for name, changed in changes:
        candidates, _ = replace(search, **changed).compare()
        if candidates and candidates[0].is_fitting:
            yield f"{name} ({in_gb(candidates[0].memory.total)} GB)"
            return


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
        model_fn,
        batch,
        optimizer_fn,
        loss_fn=loss_fn,
        precision=config.precision,
        device=device,
        tensor_plan=tensor_plan,
    )
    if obstacle := find_obstacle(model, config):
        raise ConfigError(obstacle)
    if config.fused_optimizer is None:
        config = replace(config, **choose_fused_step({}, optimizer_fn, device))
    return estimate_memory(model, config, data_parallel=data_parallel, num_rows=model.num_rows)


def choose_fused_step(fixed: Mapping[str, Any], optimizer_fn: Any, device: str) -> dict[str, Any]:
    """Choose a fused step where torch has one with every strategy: it needs no temporary tensors of the size of the parameters.

    On a CPU, torch's optimizers work parameter by parameter, so that there is nothing to save.
    """
    is_fusible = getattr(optimizer_fn, "func", optimizer_fn) in (torch.optim.Adam, torch.optim.AdamW)
    if fixed.get("fused_optimizer") is not None or device == "cpu" or not is_fusible:
        return dict(fixed)
    return {**fixed, "fused_optimizer": True}


def _check_fixed(fixed: Mapping[str, Any]) -> EngineConfig:
    """Check the choices that were made by hand. Those that need another one, which the plan makes, are allowed."""
    known = [one.name for one in fields(EngineConfig) if one.name not in PLAN_FIELDS]
    for name in fixed:
        if name not in known:
            raise UnknownArgumentError(
                f"plan({name}=...) is not an argument or a field of EngineConfig{nearest(name, known)}."
            )
    completed = dict(fixed)
    if fixed.get("cpu_offload"):
        completed.setdefault("zero_stage", 3)
    if fixed.get("sequence_parallel"):
        completed.setdefault("tensor_parallel", 2)
    if fixed.get("micro_batches") is not None or fixed.get("pipeline_schedule") is not None:
        completed.setdefault("pipeline_parallel", 2)
    return EngineConfig(**completed)
