"""The memory that one rank needs for a strategy: arithmetic on a `TracedModel`.

Sources: Rajbhandari et al., ZeRO (2020) for what each stage shards; Korthikanti et al., Reducing Activation Recomputation
in Large Transformer Models (2022) for activations under tensor, sequence and pipeline parallelism; Zhao et al., PyTorch
FSDP (2023) for the parameters that are gathered at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from raysgd.engine.config import RECOMPUTED_EVERY, EngineConfig
from raysgd.engine.gradients.averaging import BUCKET_BYTES
from raysgd.engine.pipeline.stages import StageSplit, read_model
from raysgd.engine.planning.memory_tracker import Level
from raysgd.engine.planning.trace import TracedModel

# FSDP2 gathers the next block while the current one computes, and reduces the gradients of one while those of the next
# are computed (Zhao et al. 2023, section 3.3: at most two all-gathers are in flight).
_BLOCKS_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory of the rank that needs most, in bytes.

    Attributes:
        parameters: Parameters and buffers that stay on the device, with ZeRO-3 the rank's shards.
        gradients: Gradients that stay until the optimizer's step.
        optimizer: The optimizer's state; with ``precision="bf16-true"`` also the fp32 master weights.
        activations: The peak of what the forward pass keeps for the backward pass and of what both compute with. A pipeline
            keeps several micro-batches.
        kept_activations: Of it, what the forward pass keeps until the backward pass begins.
        buffers: Whole parameters and gradients of the blocks that ZeRO works on, or the gradient on its way into DDP's bucket.
            With the micro-batches of a pipeline, what whole gradients take in addition to the shards that stay.
        step: What the optimizer's step needs in addition to its state, after the activations were freed.
        late_gradients: Of the gradients, what does not exist yet at the peak of the passes.
        host: With ``cpu_offload``, what the host holds instead of the device.
        stage: The pipeline rank that this is.
    """

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    kept_activations: float = 0
    buffers: float = 0
    step: float = 0
    late_gradients: float = 0
    host: float = 0
    stage: int = 0

    @property
    def total(self) -> float:
        """The peak on the device: in the passes or in the optimizer's step, whichever is higher."""
        return self.parameters + self.gradients + self.optimizer + max(self._passes, self.step)

    @property
    def _passes(self) -> float:
        return self.activations + self.buffers - self.late_gradients

    def explain(self) -> str:
        """Return the parts of the peak in GB, the largest first; parts below 1 % are left out."""
        parts = {"parameters": self.parameters, "optimizer state": self.optimizer}
        if self.step > self._passes:
            parts |= {"gradients": self.gradients, "temporary tensors of the optimizer's step": self.step}
        else:
            parts |= {"gradients": self.gradients - self.late_gradients}
            parts |= {"activations": self.activations, "buffers": self.buffers}
        shown = sorted(((size, name) for name, size in parts.items() if size >= self.total / 100), reverse=True)
        return ", ".join(f"{name} {in_gb(size)}" for size, name in shown)


def in_gb(size: float) -> str:
    """Return bytes as a number of GB (10^9 bytes) with two or three digits."""
    number = size / 1e9
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}" if number >= 0.1 else f"{number:.2g}"


def estimate_memory(model: TracedModel, config: EngineConfig, *, data_parallel: int, num_rows: int) -> MemoryEstimate:
    """Estimate the memory of the rank that needs most.

    Args:
        model: The traced model.
        config: The strategy.
        data_parallel: Replicas, between which ZeRO shards.
        num_rows: Rows of a micro-batch.
    """
    ranks = range(config.pipeline_parallel)
    return max(
        (_estimate_rank(model, config, data_parallel, num_rows, rank) for rank in ranks), key=lambda one: one.total
    )


def split_of(model: TracedModel, config: EngineConfig) -> StageSplit:
    """Return the stages of a pipeline.

    Raises:
        ConfigError: The engine cannot split the model.
    """
    key = "split", config.pipeline_parallel, config.pipeline_schedule
    return model.cached(key, lambda: read_model(model.model, config.pipeline_parallel, config.pipeline_schedule))


def sum_states(model: TracedModel, config: EngineConfig, data_parallel: int, rank: int) -> Mapping[str, float]:
    """Sum the bytes of a pipeline rank's parameters, gradients and optimizer state, whole and sharded.

    ``masters`` are master weights. To their shards belong those of fp32 parameters that ZeRO-1 and 2 cannot update in place: cut
    along another dimension than the first, their memory is not contiguous. ``block`` and ``tensor`` are the largest ones.
    """
    tensor = config.tensor_parallel

    def compute() -> Mapping[str, float]:
        sums: dict[str, float] = defaultdict(float)
        blocks: dict[int, float] = defaultdict(float)
        split = split_of(model, config) if config.pipeline_parallel > 1 else None
        for one in model.parameters:
            if split is not None and not any(split.has(rank, name) for name in one.names):
                continue
            whole, shard = one.num_elements(tensor), one.num_elements(tensor, data_parallel)
            size, kept_itemsize = whole * one.itemsize, one.master_itemsize or one.itemsize
            sums["parameters"] += size
            sums["parameter_shards"] += shard * kept_itemsize
            sums["tensor"] = max(sums["tensor"], size)
            if one.block is not None:
                blocks[one.block] += size
            if one.is_trainable:
                is_in_place = one.zero_dim(tensor) == 0 or data_parallel == 1
                sums["gradients"] += size
                sums["gradient_shards"] += shard * kept_itemsize
                sums["masters"] += whole * one.master_itemsize
                sums["master_shards"] += shard * (one.master_itemsize or (0 if is_in_place else one.itemsize))
                sums["state"] += whole * one.state[0] + one.state[1]
                sums["state_shards"] += shard * one.state[0] + one.state[1]
        return {**sums, "block": max(blocks.values(), default=0), "blocks": sum(blocks.values())}

    key = "states", tensor, config.pipeline_parallel, config.pipeline_schedule, data_parallel, rank
    return defaultdict(float, model.cached(key, compute))


def _estimate_rank(
    model: TracedModel, config: EngineConfig, data_parallel: int, num_rows: int, rank: int
) -> MemoryEstimate:
    zero_stage = config.zero_stage if data_parallel > 1 or config.zero_stage == 3 else 0  # FSDP gathers on one rank too
    on_device = 0.0 if config.cpu_offload else 1.0
    sums = sum_states(model, config, data_parallel, rank)
    kept, optimizer = sums["parameters"], sums["state"] + sums["masters"]
    if zero_stage == 3:
        kept, optimizer = sums["parameter_shards"], sums["state_shards"]
    elif zero_stage >= 1:
        optimizer = sums["state_shards"] + sums["master_shards"]
    updated = sums["gradient_shards"] if zero_stage else max(sums["gradients"], sums["masters"])
    # Gradients are whole without ZeRO, between the batches of ZeRO-1, and while micro-batches of a pipeline add to them.
    is_adding = zero_stage == 1 and config.accumulation_steps > 1
    are_whole = zero_stage == 0 or is_adding or (config.micro_batches or 1) > 1
    gradients = sums["gradients"] if is_adding else updated
    # DDP's buckets and the sums over several batches exist before the backward pass; other gradients come with it.
    has_several = config.accumulation_steps * (config.micro_batches or 1) > 1
    is_late = (zero_stage == 3 or (zero_stage == 0 and data_parallel == 1)) and not has_several
    coming = gradients if is_late else 0.0
    kept_activations, activations, passes = _estimate_activations(model, config, num_rows, rank, coming)
    if zero_stage == 0:  # DDP adds each gradient to a bucket; so does accumulation on one rank
        buffers = sums["tensor"] if data_parallel > 1 or has_several else 0
    elif zero_stage < 3:  # a bucket of gradients is copied to be sent
        buffers = (1 if are_whole else 2) * min(sums["gradients"], BUCKET_BYTES + sums["tensor"])
    else:  # two blocks, and what is outside of them, since fully_shard keeps the outermost module gathered; and their gradients
        buffers = min(_BLOCKS_IN_FLIGHT * sums["block"], sums["blocks"]) + sums["parameters"] - sums["blocks"]
        buffers += sums["block"] if are_whole else buffers
    if zero_stage > 0 and are_whole:
        buffers += sums["gradients"] - gradients * on_device
    return MemoryEstimate(
        parameters=kept * on_device + model.buffer_bytes,
        gradients=gradients * on_device,
        optimizer=optimizer * on_device,
        activations=activations,
        kept_activations=kept_activations,
        buffers=buffers,
        # torch's foreach optimizers compute on all parameters at once, with temporary tensors of their size.
        step=0 if config.fused_optimizer else updated * on_device,
        late_gradients=(activations + coming - passes) * on_device,
        host=(kept + gradients + optimizer) * (1 - on_device),
        stage=rank,
    )


def _estimate_activations(
    model: TracedModel, config: EngineConfig, num_rows: int, rank: int, gradients: float
) -> tuple[float, float, float]:
    """Estimate the activations of a pipeline rank: what is kept when a backward pass begins, and the peak.

    The third number is the peak of activations and of so many bytes of gradients, which come with the backward pass. With 1F1B,
    rank ``r`` of ``p`` holds ``p - r`` micro-batches, or all if there are fewer (Narayanan et al., Efficient Large-Scale Language
    Model Training, 2021): one that is computed, and others that wait for their backward pass. With GPipe all of them wait.
    """
    num_ranks, kind = config.pipeline_parallel, config.activation_checkpointing
    # FSDP gathers weights in the type of autocast, which then makes no copies; see `raysgd.engine.data_parallel.fully_sharded`.
    has_copies = config.zero_stage < 3 or num_ranks > 1
    shared = {"sequence_parallel": config.sequence_parallel, "has_copies": has_copies}
    levels = model.levels(num_rows, config.tensor_parallel, **shared)
    in_flight = config.micro_batches or 1
    if config.pipeline_schedule != "GPipe":
        in_flight = min(num_ranks - rank, in_flight)
    key = (
        rank,
        num_ranks,
        config.pipeline_schedule,
        config.tensor_parallel,
        *shared.values(),
        kind,
        num_rows,
        in_flight,
    )

    def compute() -> tuple[float, float, float]:
        own = _levels_of_rank(model, config, levels, rank) if num_ranks > 1 else levels
        blocks: list[int | None] = [one.block for one in own if one.block is not None]
        # Without blocks, the whole model is computed again.
        repeated = set() if kind is None else set(blocks[:: RECOMPUTED_EVERY[kind]] or [None])
        kept = [min(one.output, one.kept) if one.block in repeated else one.kept for one in own]
        received = own[0].output if rank > 0 and own else 0.0
        waiting = (in_flight - 1) * (sum(kept) + received) + received
        share = gradients / max(1.0, sum(one.gradients for one in own))
        peaks = []
        for factor in (0.0, share):
            level = peak = left = 0.0
            for one, size in zip(own, kept, strict=True):
                peak = max(peak, level + one.forward_peak)
                level += size
            for one, size in zip(reversed(own), reversed(kept), strict=True):
                level -= size
                left += one.gradients * factor
                carried = one.carried if rank == num_ranks - 1 else one.output
                # What checkpointing dropped is computed again at the start of the backward pass.
                peak = max(peak, level + one.kept + carried + one.backward_peak + left)
            peaks.append(waiting + peak)
        return in_flight * (sum(kept) + received), peaks[0], peaks[1]

    return model.cached(("activations", *key, gradients), compute)


def _levels_of_rank(model: TracedModel, config: EngineConfig, levels: list[Level], rank: int) -> list[Level]:
    """Return the levels of a pipeline rank: the one with the first stage also embeds, the one with the last computes the loss."""
    split = split_of(model, config)
    blocks = {one for stage, own in enumerate(split.ranges) if split.rank_of[stage] == rank for one in own}
    front = next((place for place, one in enumerate(levels) if one.block is not None), 0)
    has_ends = split.rank_of[0] == rank, split.rank_of[-1] == rank
    return [
        one
        for place, one in enumerate(levels)
        if (has_ends[place >= front] if one.block is None else one.block in blocks)
    ]
