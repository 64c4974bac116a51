"""The strategies that a plan considers, the time that each takes, and which of them cannot work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from raysgd.config.argument_names import refuse_unknown_fields
from raysgd.config.checks import check_amount, check_count
from raysgd.engine.config import OWN_PLAN_OF_SEQUENCES, RECOMPUTED_EVERY, EngineConfig
from raysgd.engine.planning.memory_prediction import MemoryEstimate, estimate_memory, split_of, sum_states
from raysgd.engine.planning.trace import TracedModel
from raysgd.engine.tensor_parallel import make_tensor_plan
from raysgd.errors import ConfigError

#: Why a strategy is refused, or None.
Refuse = Callable[[EngineConfig], str | None]
# Seconds to launch an operation and to send an empty message, and bytes per second between a device and its host.
_LAUNCH_S, _LATENCY_S, _HOST_BYTES_PER_S = 1e-5, 1e-5, 2e10


@refuse_unknown_fields()
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Speeds of the devices and their connections. The defaults are of a current data-center GPU, rounded.

    Attributes:
        flops_per_s: FLOPs that a device reaches in the chosen precision; about half of its peak.
        memory_bytes_per_s: Bandwidth of a device's memory.
        bandwidth_bytes_per_s: Bandwidth between devices of a node.
        internode_bytes_per_s: Bandwidth between devices of different nodes.
        devices_per_node: Devices that are connected by the faster network.
    """

    flops_per_s: float = 2e14
    memory_bytes_per_s: float = 1.5e12
    bandwidth_bytes_per_s: float = 1e11
    internode_bytes_per_s: float = 1e10
    devices_per_node: int = 8

    def __post_init__(self) -> None:
        for one in fields(self):
            check_amount(one.name, getattr(self, one.name), positive=True)
        check_count("devices_per_node", self.devices_per_node, minimum=1)

    def gather_s(self, size: float, num_devices: int, reach: int) -> float:
        """Return the time in which a ring of devices gathers or scatters bytes; ``reach`` devices are as far apart as it is."""
        is_local = reach <= self.devices_per_node
        bandwidth = self.bandwidth_bytes_per_s if is_local else self.internode_bytes_per_s
        return (num_devices - 1) / num_devices * size / bandwidth


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with its estimates.

    Attributes:
        config: The strategy.
        data_parallel: Replicas.
        num_rows: Rows of a micro-batch.
        memory: What the rank that needs most needs.
        step_s: The time of one optimizer step.
        is_fitting: Whether a device has the memory.
    """

    config: EngineConfig
    data_parallel: int
    num_rows: int
    memory: MemoryEstimate
    step_s: float
    is_fitting: bool

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
        words = {
            f"data x{self.data_parallel}": self.data_parallel > 1,
            f"ZeRO-{one.zero_stage}": one.zero_stage,
            f"tensor x{one.tensor_parallel}": one.tensor_parallel > 1,
            "sequence": one.sequence_parallel,
            f"pipeline x{one.pipeline_parallel}": one.pipeline_parallel > 1,
            "offload": one.cpu_offload,
            f"{one.activation_checkpointing} checkpointing": one.activation_checkpointing,
            f"{one.accumulation_steps} accumulated": one.accumulation_steps > 1,
            f"{one.micro_batches} micro-batches": one.micro_batches,
        }
        return ", ".join(word for word, is_used in words.items() if is_used) or "one device"


def estimate_step(
    model: TracedModel, config: EngineConfig, hardware: Hardware, *, data_parallel: int, num_rows: int
) -> float:
    """Estimate the seconds of one optimizer step, to compare strategies; arguments as of `estimate_memory`.

    Computation takes its FLOPs at a given rate, or the launch of its operations where that takes longer; a third of it is the
    forward pass, which activation checkpointing repeats. Collectives are rings (Rajbhandari et al., ZeRO, 2020, section 7). A
    1F1B pipeline of ``p`` ranks idles for ``p - 1`` micro-batches (Narayanan et al., 2021). Communication between replicas
    overlaps with computation, that of tensor parallelism does not.
    """
    tensor, pipeline = config.tensor_parallel, config.pipeline_parallel
    num_batches = config.accumulation_steps * (config.micro_batches or 1)
    kind = config.activation_checkpointing
    flops, num_operations, share_of_blocks = model.work(num_rows)
    again = 0 if kind is None else (share_of_blocks or 1) / RECOMPUTED_EVERY[kind]
    compute_s = max(flops / tensor / hardware.flops_per_s, num_operations * _LAUNCH_S) * (1 + again / 3)
    outputs = [one.output for one in model.levels(num_rows, tensor) if one.block is not None]
    reach = tensor * pipeline
    if tensor > 1:  # two layers of each block are added up over the ranks, in each pass
        summed_s = 2 * hardware.gather_s(1, tensor, tensor) * sum(outputs) + _LATENCY_S * len(outputs)
        compute_s += (4 + 2 * again) * summed_s
    batch_s = compute_s / pipeline
    step_s = (num_batches + pipeline - 1) * batch_s
    if pipeline > 1:
        step_s += 2 * num_batches * (hardware.gather_s(2 * max(outputs, default=0), 2, reach) + _LATENCY_S)
    sums = [sum_states(model, config, data_parallel, rank) for rank in range(pipeline)]
    whole, trained, state = (max(one[key] for one in sums) for key in ("parameters", "gradients", "state"))
    # The optimizer reads and writes parameters, reads gradients, and reads and writes its state.
    step_s += (3 * trained + 2 * state) / (data_parallel if config.zero_stage else 1) / hardware.memory_bytes_per_s
    if config.cpu_offload:
        step_s += (2 * whole * num_batches + trained) / data_parallel / _HOST_BYTES_PER_S
    if data_parallel == 1:
        return step_s
    # ZeRO-2 and 3 divide the gradients in every backward pass, the others once in a step, as a pipeline does.
    reductions = config.accumulation_steps if config.zero_stage >= 2 and pipeline == 1 else 1
    if config.zero_stage == 3:
        moved, hidden_s = 2 * num_batches * whole + reductions * trained, batch_s * num_batches
    else:
        moved, hidden_s = (1 + reductions) * trained, batch_s * 2 / 3
    moved_s = hardware.gather_s(moved, data_parallel, data_parallel * reach)
    return step_s + max(0.0, moved_s - hidden_s) + _LATENCY_S * data_parallel


@dataclass(frozen=True, kw_only=True)
class Search:
    """Compares the strategies for one model.

    Attributes:
        model: The model.
        num_workers: Devices.
        batch_rows: Rows of one optimizer step, of all devices together.
        limit_bytes: What a device has for a strategy.
        fixed: Fields of `EngineConfig` that are not varied.
        hardware: Speeds.
        workers_per_replica: Devices that hold one replica between them; None: any number.
        refuse: Returns more reasons against a strategy, or None.
    """

    model: TracedModel
    num_workers: int
    batch_rows: int
    limit_bytes: float
    fixed: Mapping[str, Any]
    hardware: Hardware
    workers_per_replica: int | None = None
    refuse: Refuse | None = None

    def compare(self) -> tuple[tuple[Candidate, ...], Mapping[str, str]]:
        """Estimate all strategies; return them, the fastest that fit first, with the reasons against those that cannot work."""
        refused: dict[str, str] = {}
        found = []
        divisors = _divisors(self.num_workers)
        for tensor, pipeline in product(
            *(self._choices(f"{one}_parallel", divisors) for one in ("tensor", "pipeline"))
        ):
            if self.workers_per_replica not in (None, tensor * pipeline):
                continue
            name = f"tensor_parallel={tensor}, pipeline_parallel={pipeline}"
            if reason := self._find_obstacle(tensor, pipeline):
                refused[name] = reason
                continue
            data_parallel = self.num_workers // (tensor * pipeline)
            for choice, num_rows in self._vary(tensor, pipeline, data_parallel):
                try:
                    config = EngineConfig(**{**self.fixed, **choice})
                    reason = find_obstacle(self.model, config) or (self.refuse and self.refuse(config))
                except ConfigError as error:
                    reason = str(error)
                if reason:
                    refused.setdefault(f"{name}, {choice}", reason)
                    continue
                options = {"data_parallel": data_parallel, "num_rows": num_rows}
                memory = estimate_memory(self.model, config, **options)
                step_s = estimate_step(self.model, config, self.hardware, **options)
                is_fitting = memory.total <= self.limit_bytes
                found.append(Candidate(config=config, memory=memory, step_s=step_s, is_fitting=is_fitting, **options))
        return tuple(sorted(found, key=lambda one: (not one.is_fitting, one.step_s))), refused

    def _vary(self, tensor: int, pipeline: int, data_parallel: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Vary what is not fixed, for given numbers of ranks; yield fields and the rows of a micro-batch."""
        rows = self.batch_rows // data_parallel
        stages = (3,) if self.fixed.get("cpu_offload") else (0, 1, 2, 3) if data_parallel > 1 else (0,)
        for accumulated in self._choices("accumulation_steps", _divisors(rows) if pipeline == 1 else (1,)):
            # Fewer micro-batches than ranks leave ranks idle throughout.
            per_batch = rows // accumulated
            enough = tuple(one for one in _divisors(per_batch) if one >= pipeline) or (per_batch,)
            varied: dict[str, tuple[Any, ...]] = {
                "micro_batches": enough if pipeline > 1 else (None,),
                "sequence_parallel": (False, True) if tensor > 1 else (False,),
                "zero_stage": stages,
                "activation_checkpointing": (None, "selective", "full"),
            }
            for values in product(*(self._choices(name, every) for name, every in varied.items())):
                parts = values[0] or 1
                if rows % accumulated == 0 and per_batch % parts == 0:
                    ranks = {
                        "tensor_parallel": tensor,
                        "pipeline_parallel": pipeline,
                        "accumulation_steps": accumulated,
                    }
                    yield {**ranks, **dict(zip(varied, values, strict=True))}, per_batch // parts

    def _choices(self, name: str, varied: Any) -> Any:
        return (self.fixed[name],) if name in self.fixed else varied

    def _find_obstacle(self, tensor: int, pipeline: int) -> str | None:
        """Return why numbers of ranks cannot work, with the arithmetic."""
        each, workers, rows, blocks = tensor * pipeline, self.num_workers, self.batch_rows, self.model.blocks
        if workers % each:
            return f"{tensor} x {pipeline} = {each} ranks hold one replica, which does not divide {workers} workers"
        if rows % (replicas := workers // each):
            return f"{workers} / ({tensor} x {pipeline}) = {replicas} replicas do not divide the batch of {rows} rows"
        for heads in self.model.head_counts:
            if heads % tensor:
                return (
                    f"{tensor} ranks do not divide {heads} attention heads: {heads} / {tensor} = {heads / tensor:.2f}"
                )
        if pipeline > max(1, len(blocks)):
            return f"{pipeline} stages are more than the model's {len(blocks)} layers"
        return None


def find_obstacle(model: TracedModel, config: EngineConfig) -> str | None:
    """Return why the engine cannot apply a strategy to a model, or None."""
    if config.sequence_parallel and model.has_own_plan:
        return OWN_PLAN_OF_SEQUENCES
    reason = model.obstacle if config.tensor_parallel > 1 else None
    if config.tensor_parallel > 1 and not model.has_own_plan:
        shards = config.tensor_parallel, config.sequence_parallel
        reason = model.cached(("shards", *shards), lambda: _error_of(lambda: make_tensor_plan(model.model, *shards)))
    if config.pipeline_parallel > 1 and reason is None:
        stages = config.pipeline_parallel, config.pipeline_schedule
        reason = model.cached(("stages", *stages), lambda: _error_of(lambda: split_of(model, config)))
    return reason


def _error_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(one for one in range(1, number + 1) if number % one == 0)
