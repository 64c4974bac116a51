"""Which strategies a plan considers, and which of them cannot work at all. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from raysgd.config.argument_names import nearest
from raysgd.engine.config import PLAN_FIELDS, EngineConfig
from raysgd.engine.planning.memory import MemoryEstimate, estimate_memory
from raysgd.engine.planning.profile import ModelProfile
from raysgd.engine.planning.step_time import Hardware, TimeEstimate, estimate_time
from raysgd.errors import ConfigError, UnknownArgumentError

#: Why the engine refuses a strategy, or None.
Refuse = Callable[[EngineConfig], str | None]
_CHECKPOINTING = (None, "selective", "full")
_VARIED = (
    "zero_stage", "tensor_parallel", "sequence_parallel", "pipeline_parallel", "micro_batches", "accumulation_steps",
    "activation_checkpointing",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with its estimates.

    Attributes:
        config: The strategy.
        data_parallel: Replicas.
        num_rows: Rows of a micro-batch.
        memory: What the rank that needs most needs.
        time: The time of one optimizer step.
        limit_bytes: What a device has for it.
    """

    config: EngineConfig
    data_parallel: int
    num_rows: int
    memory: MemoryEstimate
    time: TimeEstimate
    limit_bytes: float

    @property
    def is_fitting(self) -> bool:
        return self.memory.total <= self.limit_bytes

    @property
    def loader_batch_size(self) -> int:
        """Rows of a batch of a worker's loader, which a pipeline cuts into micro-batches."""
        return self.num_rows * (self.config.micro_batches or 1)

    @property
    def num_strategies(self) -> int:
        """Count the strategies in addition to plain data parallelism; of two equally fast candidates the simpler is chosen."""
        one = self.config
        return (
            4 * (one.pipeline_parallel > 1)
            + 3 * (one.tensor_parallel > 1)
            + one.sequence_parallel
            + one.zero_stage
            + {None: 0, "selective": 2, "full": 1}[one.activation_checkpointing]
            + (one.accumulation_steps > 1)
        )

    def describe(self) -> str:
        """Return the strategy in words, such as ``ZeRO-3, full checkpointing``."""
        one = self.config
        words = [f"data x{self.data_parallel}"] if self.data_parallel > 1 else []
        words += [f"ZeRO-{one.zero_stage}"] if one.zero_stage else []
        words += [f"tensor x{one.tensor_parallel}"] if one.tensor_parallel > 1 else []
        words += ["sequence"] if one.sequence_parallel else []
        words += [f"pipeline x{one.pipeline_parallel}"] if one.pipeline_parallel > 1 else []
        words += ["offload"] if one.cpu_offload else []
        words += [f"{one.activation_checkpointing} checkpointing"] if one.activation_checkpointing else []
        words += [f"{one.accumulation_steps} accumulated"] if one.accumulation_steps > 1 else []
        words += [f"{one.micro_batches} micro-batches"] if one.micro_batches else []
        return ", ".join(words) or "one device"


@dataclass(frozen=True)
class Space:
    """The strategies between which a plan chooses.

    Attributes:
        configs: Strategies with replicas and rows of a micro-batch.
        refused: Why others cannot work, by the strategy in words.
    """

    configs: tuple[tuple[EngineConfig, int, int], ...]
    refused: Mapping[str, str]


def check_fixed(fixed: Mapping[str, Any]) -> EngineConfig:
    """Check the choices that were made by hand.

    Raises:
        UnknownArgumentError: A name is not a field of `EngineConfig`.
        ConfigError: A value, or the choices together, are not allowed.
    """
    known = [one.name for one in fields(EngineConfig) if one.name not in PLAN_FIELDS]
    for name in fixed:
        if name not in known:
            raise UnknownArgumentError(
                f"plan({name}=...) is not an argument or a field of EngineConfig{nearest(name, known)}."
            )
    # Choices that need another one, which the plan makes, are allowed: sequence_parallel needs tensor_parallel.
    completed = dict(fixed)
    if fixed.get("cpu_offload"):
        completed.setdefault("zero_stage", 3)
    if fixed.get("sequence_parallel"):
        completed.setdefault("tensor_parallel", 2)
    if fixed.get("micro_batches") is not None or fixed.get("pipeline_schedule") is not None:
        completed.setdefault("pipeline_parallel", 2)
    return EngineConfig(**completed)


def list_space(
    profile: ModelProfile,
    fixed: Mapping[str, Any],
    *,
    num_workers: int,
    batch_rows: int,
    refuse: Refuse | None,
    workers_per_replica: int | None = None,
) -> Space:
    """List the strategies that can work, and why others cannot.

    Args:
        profile: The model; its steps are not needed.
        fixed: Fields of `EngineConfig` that are not varied.
        num_workers: Devices.
        batch_rows: Rows of all micro-batches of an optimizer step.
        refuse: What the engine refuses.
        workers_per_replica: Devices that hold one replica; others are not listed. None: any number.
    """
    configs: list[tuple[EngineConfig, int, int]] = []
    refused: dict[str, str] = {}
    # cpu_offload needs zero_stage=3, so that it is set together with what is varied.
    passed = {name: value for name, value in fixed.items() if name not in _VARIED}
    divisors = _divisors(num_workers)
    for tensor, pipeline in product(
        _choices(fixed, "tensor_parallel", divisors), _choices(fixed, "pipeline_parallel", divisors)
    ):
        if workers_per_replica not in (None, tensor * pipeline):
            continue
        name = f"tensor_parallel={tensor}, pipeline_parallel={pipeline}"
        if reason := _find_obstacle(profile, tensor, pipeline, num_workers, batch_rows):
            refused[name] = reason
            continue
        data_parallel = num_workers // (tensor * pipeline)
        for choice, num_rows in _vary(fixed, tensor, pipeline, data_parallel, batch_rows // data_parallel):
            try:
                config = EngineConfig(**passed, **choice)
            except ConfigError as error:
                refused[", ".join(f"{key}={value}" for key, value in choice.items())] = str(error)
                continue
            if refuse is not None and (reason := refuse(config)):
                refused.setdefault(f"{name}, sequence_parallel={config.sequence_parallel}", reason)
                continue
            configs.append((config, data_parallel, num_rows))
    return Space(tuple(configs), refused)


def evaluate(profile: ModelProfile, space: Space, hardware: Hardware, limit_bytes: float) -> tuple[Candidate, ...]:
    """Estimate all strategies of a space, the fastest first; what does not fit comes after what fits."""
    candidates = [
        Candidate(
            config=config,
            data_parallel=data_parallel,
            num_rows=num_rows,
            memory=estimate_memory(profile, config, data_parallel=data_parallel, num_rows=num_rows),
            time=estimate_time(profile, config, hardware, data_parallel=data_parallel, num_rows=num_rows),
            limit_bytes=limit_bytes,
        )
        for config, data_parallel, num_rows in space.configs
    ]
    return tuple(sorted(candidates, key=lambda one: (not one.is_fitting, one.time.total_s)))


def _vary(
    fixed: Mapping[str, Any], tensor: int, pipeline: int, data_parallel: int, rows: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """Vary what is not fixed, for given numbers of ranks; yield fields and the rows of a micro-batch."""
    stages = (0, 1, 2, 3) if data_parallel > 1 else (0,)
    stages = _choices(fixed, "zero_stage", (3,) if fixed.get("cpu_offload") else stages)
    sequence = _choices(fixed, "sequence_parallel", (False, True) if tensor > 1 else (False,))
    checkpointing = _choices(fixed, "activation_checkpointing", _CHECKPOINTING)
    for accumulated in _choices(fixed, "accumulation_steps", _divisors(rows) if pipeline == 1 else (1,)):
        per_batch = rows // accumulated
        # Fewer micro-batches than stages leave stages idle throughout.
        enough = tuple(one for one in _divisors(per_batch) if one >= pipeline) or (per_batch,)
        for micro in _choices(fixed, "micro_batches", enough if pipeline > 1 else (None,)):
            if rows % accumulated or per_batch % (micro or 1):
                continue
            for zero, shared, kind in product(stages, sequence, checkpointing):
                yield (
                    {
                        "tensor_parallel": tensor,
                        "pipeline_parallel": pipeline,
                        "zero_stage": zero,
                        "sequence_parallel": shared,
                        "activation_checkpointing": kind,
                        "accumulation_steps": accumulated,
                        "micro_batches": micro,
                    },
                    per_batch // (micro or 1),
                )


def _find_obstacle(profile: ModelProfile, tensor: int, pipeline: int, num_workers: int, batch_rows: int) -> str | None:
    """Return why numbers of ranks cannot work, with the arithmetic."""
    product_of_both = tensor * pipeline
    if num_workers % product_of_both:
        return (
            f"{tensor} x {pipeline} = {product_of_both} ranks hold one replica, which does not divide "
            f"{num_workers} workers"
        )
    data_parallel = num_workers // product_of_both
    if batch_rows % data_parallel:
        return (
            f"{num_workers} / ({tensor} x {pipeline}) = {data_parallel} replicas do not divide the batch of "
            f"{batch_rows} rows"
        )
    if tensor > 1:
        if profile.tensor_parallel_obstacle:
            return profile.tensor_parallel_obstacle
        for heads in profile.head_counts:
            if heads % tensor:
                return (
                    f"{tensor} ranks do not divide {heads} attention heads: {heads} / {tensor} = {heads / tensor:.2f}"
                )
    if pipeline > 1:
        if not profile.stacks:
            return "no repeated layers were found in the model"
        if pipeline > profile.num_blocks:
            return f"{pipeline} stages are more than the model's {profile.num_blocks} layers"
    return None


def _choices(fixed: Mapping[str, Any], name: str, varied: Any) -> Any:
    return (fixed[name],) if name in fixed else varied


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(one for one in range(1, number + 1) if number % one == 0)
