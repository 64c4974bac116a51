"""The memory that one rank needs for a strategy. Pure arithmetic on a `ModelProfile`.

Sources: Rajbhandari et al., ZeRO (2020) for what each stage shards; Korthikanti et al., Reducing Activation Recomputation
in Large Transformer Models (2022) for activations under tensor, sequence and pipeline parallelism; Zhao et al., PyTorch
FSDP (2023) for the parameters that are gathered at a time. The activations themselves are not estimated by a formula: they
are traced, operation by operation.
"""

from __future__ import annotations

from dataclasses import dataclass

from raysgd.engine.config import RECOMPUTED_EVERY, EngineConfig
from raysgd.engine.optimizer_shards import BUCKET_BYTES
from raysgd.engine.planning.profile import Amount, ModelProfile, ParameterInfo, Segment

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
        stage: The pipeline stage of this rank.
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
        """What the passes need at their peak in addition to all gradients."""
        return self.activations + self.buffers - self.late_gradients

    def explain(self) -> str:
        """Return the parts of the peak in GB, the largest first; parts below 1 % are left out."""
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients - self.late_gradients,
            "optimizer state": self.optimizer,
            "activations": self.activations,
            "buffers": self.buffers,
        }
        if self.step > self._passes:
            parts |= {"activations": 0.0, "buffers": 0.0, "gradients": self.gradients}
            parts |= {"temporary tensors of the optimizer's step": self.step}
        shown = sorted(((size, name) for name, size in parts.items() if size >= self.total / 100), reverse=True)
        return ", ".join(f"{name} {in_gb(size)}" for size, name in shown)


def in_gb(size: float) -> str:
    """Return bytes as a number of GB (10^9 bytes) with two or three digits."""
    number = size / 1e9
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}" if number >= 0.1 else f"{number:.2g}"


def estimate_memory(
    profile: ModelProfile, config: EngineConfig, *, data_parallel: int, num_rows: int
) -> MemoryEstimate:
    """Estimate the memory of the rank that needs most.

    Args:
        profile: The traced model, with a step of ``num_rows``.
        config: The strategy.
        data_parallel: Replicas, between which ZeRO shards.
        num_rows: Rows of a micro-batch.
    """
    stages = range(config.pipeline_parallel)
    return max(
        (_estimate_stage(profile, config, data_parallel, num_rows, stage) for stage in stages),
        key=lambda one: one.total,
    )


def blocks_of_stage(profile: ModelProfile, num_stages: int, stage: int) -> range:
    """Return the blocks of a pipeline stage: contiguous, and as equal in number as possible if the profile does not say."""
    if num_stages in profile.stage_blocks:
        return profile.stage_blocks[num_stages][stage]
    return range(stage * profile.num_blocks // num_stages, (stage + 1) * profile.num_blocks // num_stages)


def segments_of_stage(profile: ModelProfile, num_rows: int, num_stages: int, stage: int) -> tuple[Segment, ...]:
    """Return the segments of a pipeline stage: the first stage also embeds, the last one also computes the loss."""
    segments = profile.steps[num_rows]
    if num_stages == 1:
        return segments
    blocks = blocks_of_stage(profile, num_stages, stage)
    chosen = []
    is_before = True
    for segment in segments:
        is_before = is_before and segment.block is None
        is_ours = (
            segment.block in blocks if segment.block is not None else stage == (0 if is_before else num_stages - 1)
        )
        if is_ours:
            chosen.append(segment)
    return tuple(chosen)


def parameters_of_stage(profile: ModelProfile, num_stages: int, stage: int) -> tuple[ParameterInfo, ...]:
    """Return the parameters of a pipeline stage. A tied weight that the first and the last stage use is on both."""
    if num_stages == 1:
        return profile.parameters
    blocks = blocks_of_stage(profile, num_stages, stage)
    side = {0: "first", num_stages - 1: "last"}.get(stage)
    return tuple(
        one
        for one in profile.parameters
        if (one.block in blocks if one.block is not None else side in (one.sides or {"first"}))
    )


def has_whole_gradients(config: EngineConfig) -> bool:
    """Whether each data-parallel rank has all gradients of its layers between two backward passes of a step.

    Without ZeRO they are whole. ZeRO-1 divides them in the backward pass that completes a step, ZeRO-2 and 3 in every one.
    The micro-batches of a pipeline add to whole gradients, which are divided after the last one.
    """
    several = (config.micro_batches or 1) > 1
    return config.zero_stage == 0 or several or (config.zero_stage == 1 and config.accumulation_steps > 1)


@dataclass(kw_only=True)
class StateSums:
    """Bytes of a stage's parameters, gradients and optimizer state, whole on one data-parallel rank and sharded.

    Attributes:
        parameters: All parameters, as the model computes with them.
        parameter_shards: The rank's shards of them, or of their master weights.
        gradients: Gradients of the parameters that are trained.
        gradient_shards: The rank's shards of them, in the type of the master weights.
        masters: Master weights.
        master_shards: The rank's shards of them, and of fp32 parameters those that ZeRO-1 and 2 cannot update in place: they cut
            them along another dimension than the first, so that their memory is not contiguous.
        state: The optimizer's state.
        state_shards: The rank's shards of it.
        largest_block: Parameters of the largest block.
        all_blocks: Parameters of all blocks.
        largest_parameter: The largest single parameter.
    """

    parameters: float = 0
    parameter_shards: float = 0
    gradients: float = 0
    gradient_shards: float = 0
    masters: float = 0
    master_shards: float = 0
    state: float = 0
    state_shards: float = 0
    largest_block: float = 0
    all_blocks: float = 0
    largest_parameter: float = 0

    @property
    def outside(self) -> float:
        """Parameters outside the blocks."""
        return self.parameters - self.all_blocks


def sum_states(
    profile: ModelProfile, *, tensor_parallel: int, data_parallel: int, num_stages: int, stage: int
) -> StateSums:
    """Sum the bytes of a pipeline stage's parameters, gradients and optimizer state on one rank."""
    key = ("states", tensor_parallel, data_parallel, num_stages, stage)
    return profile.cached(
        key, lambda: _sum_states(parameters_of_stage(profile, num_stages, stage), tensor_parallel, data_parallel)
    )


def _sum_states(parameters: tuple[ParameterInfo, ...], tensor_parallel: int, data_parallel: int) -> StateSums:
    sums = StateSums()
    blocks: dict[int, float] = {}
    for one in parameters:
        whole = one.num_elements(tensor_parallel=tensor_parallel)
        shard = one.num_elements(tensor_parallel=tensor_parallel, shards=data_parallel)
        kept_itemsize = one.master_itemsize or one.itemsize
        size = whole * one.itemsize
        sums.parameters += size
        sums.parameter_shards += shard * kept_itemsize
        if one.is_trainable:
            sums.gradients += size
            sums.gradient_shards += shard * kept_itemsize
            sums.masters += whole * one.master_itemsize
            is_in_place = one.zero_dim(tensor_parallel) == 0 or data_parallel == 1
            sums.master_shards += shard * (one.master_itemsize or (0 if is_in_place else one.itemsize))
            sums.state += whole * one.state_bytes_per_element + one.state_bytes
            sums.state_shards += shard * one.state_bytes_per_element + one.state_bytes
        sums.largest_parameter = max(sums.largest_parameter, size)
        if one.block is not None:
            blocks[one.block] = blocks.get(one.block, 0) + size
    sums.largest_block, sums.all_blocks = max(blocks.values(), default=0), sum(blocks.values())
    return sums


def _estimate_stage(
    profile: ModelProfile, config: EngineConfig, data_parallel: int, num_rows: int, stage: int
) -> MemoryEstimate:
    zero_stage = config.zero_stage if data_parallel > 1 or config.zero_stage == 3 else 0  # FSDP gathers on one rank too
    states = sum_states(
        profile,
        tensor_parallel=config.tensor_parallel,
        data_parallel=data_parallel,
        num_stages=config.pipeline_parallel,
        stage=stage,
    )
    kept, optimizer = states.parameters, states.state + states.masters
    if zero_stage == 3:
        kept, optimizer = states.parameter_shards, states.state_shards
    elif zero_stage >= 1:
        optimizer = states.state_shards + states.master_shards
    on_device = 0.0 if config.cpu_offload else 1.0
    gradients, summed = states.gradient_shards, 0.0
    if zero_stage == 0:
        gradients = max(states.gradients, states.masters)  # those of master weights replace those of the parameters
    elif zero_stage == 1 and config.accumulation_steps > 1:
        gradients = states.gradients
    elif has_whole_gradients(config):
        summed = states.gradients - gradients * on_device
    # torch's foreach optimizers compute on all parameters at once, with temporary tensors of their size.
    updated = max(states.gradients, states.masters) if zero_stage == 0 else states.gradient_shards
    step = 0 if config.fused_optimizer else updated
    # DDP's buckets and the sums over several batches exist before the backward pass; other gradients come with it.
    is_late = (zero_stage == 3 or (zero_stage == 0 and data_parallel == 1)) and not _has_several_passes(config)
    coming = gradients if is_late else 0.0
    kept_activations, activations, passes = _estimate_activations(profile, config, num_rows, stage, coming)
    return MemoryEstimate(
        parameters=kept * on_device + profile.buffer_bytes,
        gradients=gradients * on_device,
        optimizer=optimizer * on_device,
        activations=activations,
        kept_activations=kept_activations,
        buffers=_estimate_buffers(states, config, zero_stage, data_parallel) + summed,
        step=step * on_device,
        late_gradients=(activations + coming - passes) * on_device,
        host=(kept + gradients + optimizer) * (1 - on_device),
        stage=stage,
    )


def _estimate_buffers(states: StateSums, config: EngineConfig, zero_stage: int, data_parallel: int) -> float:
    """Estimate what is whole for a while.

    ZeRO-3 gathers two blocks at a time, and everything outside the blocks during both passes, since ``fully_shard`` keeps
    the outermost module gathered. It has as much of the gradients, before these are sharded; with the micro-batches of a
    pipeline these are whole anyway. ZeRO-1 and 2 copy a bucket of gradients to send it. DDP adds each gradient to a bucket;
    so does accumulation on one rank.
    """
    if zero_stage == 0:
        return states.largest_parameter if data_parallel > 1 or _has_several_passes(config) else 0
    if zero_stage < 3:
        bucket = min(states.gradients, BUCKET_BYTES + states.largest_parameter)
        return bucket if has_whole_gradients(config) else 2 * bucket
    blocks = min(_BLOCKS_IN_FLIGHT * states.largest_block, states.all_blocks)
    whole_gradients = states.largest_block if has_whole_gradients(config) else blocks + states.outside
    return blocks + states.outside + whole_gradients


def _has_several_passes(config: EngineConfig) -> bool:
    return config.accumulation_steps * (config.micro_batches or 1) > 1


def _estimate_activations(
    profile: ModelProfile, config: EngineConfig, num_rows: int, stage: int, gradients: float
) -> tuple[float, float, float]:
    """Estimate the activations of a pipeline stage: what is kept when a backward pass begins, and the peak.

    The third number is the peak of activations and of so many bytes of gradients, which come with the backward pass.

    With 1F1B, stage ``s`` of ``p`` holds ``p - s`` micro-batches, or all if there are fewer (Narayanan et al., Efficient
    Large-Scale Language Model Training, 2021): one that is computed, and others that wait for their backward pass.
    """
    in_flight = min(config.pipeline_parallel - stage, config.micro_batches or 1)
    key = (
        "activations", num_rows, stage, in_flight, config.pipeline_parallel, config.tensor_parallel,
        config.sequence_parallel, config.activation_checkpointing, _gathers_converted(config), gradients,
    )  # fmt: skip
    return profile.cached(key, lambda: _follow_micro_batches(profile, config, num_rows, stage, in_flight, gradients))


def _gathers_converted(config: EngineConfig) -> bool:
    """Whether FSDP gathers weights in the type of autocast, which then makes no copies; see `raysgd.engine.fully_sharded`."""
    return config.zero_stage == 3 and config.pipeline_parallel == 1


@dataclass(frozen=True)
class _Level:
    """What one segment adds on one rank, in bytes."""

    kept: float
    forward_peak: float
    recomputed: float
    carried: float
    output: float
    backward_peak: float


def _follow_micro_batches(
    profile: ModelProfile, config: EngineConfig, num_rows: int, stage: int, in_flight: int, gradients: float
) -> tuple[float, float, float]:
    num_stages = config.pipeline_parallel
    segments = segments_of_stage(profile, num_rows, num_stages, stage)
    received = segments[0].output.per_rank(config.tensor_parallel) if stage > 0 and segments else 0.0
    converted: dict[tuple[int, bool], _Level] = {}  # blocks that are built alike share their segment's amounts
    levels = []
    for one, is_recomputed in zip(segments, find_recomputed(segments, config), strict=True):
        key = id(one.retained), is_recomputed
        if key not in converted or one.block is None:
            converted[key] = _convert(one, config, is_recomputed)
        levels.append(converted[key])
    kept = sum(one.kept for one in levels) + received
    waiting, is_last = (in_flight - 1) * kept + received, stage == num_stages - 1
    shares = _share_gradients(profile, segments, num_stages, stage)
    alone, with_gradients = (
        waiting + _find_peak(levels, [size * share for share in shares], is_last=is_last) for size in (0.0, gradients)
    )
    return in_flight * kept, alone, with_gradients


def _share_gradients(profile: ModelProfile, segments: tuple[Segment, ...], num_stages: int, stage: int) -> list[float]:
    """Return which share of the gradients the backward pass of each segment adds; of a tied weight, the one that ends first."""
    places = {one.block: place for place, one in enumerate(segments)}  # of a block, or the last one outside of blocks
    first = next((place for place, one in enumerate(segments) if one.block is None), 0)
    sizes = [0.0] * len(segments)
    for one in parameters_of_stage(profile, num_stages, stage):
        place = places.get(one.block, 0) if one.block is not None or "last" in one.sides else first
        sizes[place] += one.num_elements() * one.itemsize * one.is_trainable
    return [size / max(1.0, sum(sizes)) for size in sizes]


def _find_peak(levels: list[_Level], gradients: list[float], *, is_last: bool) -> float:
    """Follow one micro-batch forward and back, and return the highest level, with the gradients of each segment."""
    level = peak = left = 0.0
    before = []
    for one in levels:
        before.append(level)
        peak = max(peak, level + one.forward_peak)
        level += one.kept
    for one, start, gradient in zip(reversed(levels), reversed(before), reversed(gradients), strict=True):
        left += gradient
        # What checkpointing dropped is computed again at the start of the backward pass.
        peak = max(peak, start + one.recomputed + (one.carried if is_last else one.output) + one.backward_peak + left)
    return peak


def find_recomputed(segments: tuple[Segment, ...], config: EngineConfig) -> list[bool]:
    """Return which segments of a pipeline stage activation checkpointing computes again; without blocks, the whole model."""
    if config.activation_checkpointing is None:
        return [False] * len(segments)
    if all(one.block is None for one in segments):
        return [True] * len(segments)
    every = RECOMPUTED_EVERY[config.activation_checkpointing]
    first = min((one.block for one in segments if one.block is not None), default=0)
    return [one.block is not None and (one.block - first) % every == 0 for one in segments]


def _convert(segment: Segment, config: EngineConfig, is_recomputed: bool) -> _Level:
    is_shared = config.sequence_parallel and segment.block is not None

    def per_rank(amount: Amount) -> float:
        return amount.per_rank(config.tensor_parallel, sequence_parallel=is_shared)

    copies = per_rank(segment.weight_copies) if _gathers_converted(config) else 0.0
    retained, output = per_rank(segment.retained) - copies, per_rank(segment.output)
    return _Level(
        kept=min(output, retained) if is_recomputed else retained,
        forward_peak=max(map(per_rank, segment.forward_peaks)) - copies,
        recomputed=retained,
        carried=per_rank(segment.carried),
        output=output,
        backward_peak=max(map(per_rank, segment.backward_peaks)),
    )
