"""The time of one optimizer step for a strategy. Pure arithmetic on a `ModelProfile` and a `Hardware`.

The numbers serve to compare strategies. Computation takes its FLOPs at a given rate, or the launch of its kernels where
that takes longer. Collectives are rings: all-reduce moves ``2 (n - 1) / n`` of the bytes, all-gather and reduce-scatter
half of that (Rajbhandari et al., ZeRO, 2020, section 7). A 1F1B pipeline of ``p`` stages idles for ``p - 1`` micro-batches
(Narayanan et al., 2021). Communication between replicas overlaps with computation, that of tensor parallelism
does not.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from raysgd.config.argument_names import refuse_unknown_fields
from raysgd.config.checks import check_amount, check_count
from raysgd.engine.config import EngineConfig
from raysgd.engine.planning.memory import find_recomputed, segments_of_stage, sum_states
from raysgd.engine.planning.profile import Amount, ModelProfile, Segment


@refuse_unknown_fields()
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Speeds of the devices and their connections. The defaults are of a current data-center GPU, rounded.

    Attributes:
        flops_per_s: FLOPs that a device reaches in the chosen precision; about half of its peak.
        kernel_s: Time to launch one operation.
        memory_bytes_per_s: Bandwidth of a device's memory.
        bandwidth_bytes_per_s: Bandwidth between devices of a node.
        internode_bytes_per_s: Bandwidth of a device to other nodes.
        host_bytes_per_s: Bandwidth between a device and its host, for ``cpu_offload``.
        latency_s: Time of a message without its bytes.
        devices_per_node: Devices that are connected with the higher bandwidth.
    """

    flops_per_s: float = 1e14
    kernel_s: float = 5e-6
    memory_bytes_per_s: float = 1.5e12
    bandwidth_bytes_per_s: float = 1e11
    internode_bytes_per_s: float = 1e10
    host_bytes_per_s: float = 2e10
    latency_s: float = 1e-5
    devices_per_node: int = 8

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name != "devices_per_node":
                check_amount(one.name, getattr(self, one.name), positive=True)
        check_count("devices_per_node", self.devices_per_node, minimum=1)

    def bandwidth(self, num_devices: int) -> float:
        """Return the bandwidth of a group of neighbouring devices."""
        is_local = num_devices <= self.devices_per_node
        return self.bandwidth_bytes_per_s if is_local else self.internode_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """The time of one optimizer step, in seconds.

    Attributes:
        compute_s: Forward and backward passes.
        recompute_s: Forward passes that activation checkpointing repeats.
        tensor_s: All-reduces (or, with sequence parallelism, gathers and reduce-scatters) of tensor parallelism.
        bubble_s: Waiting of a pipeline's stages, and sending between them.
        data_s: Communication between replicas that does not overlap with computation.
        optimizer_s: Reading and writing parameters, gradients and state in the optimizer's step.
    """

    compute_s: float = 0
    recompute_s: float = 0
    tensor_s: float = 0
    bubble_s: float = 0
    data_s: float = 0
    optimizer_s: float = 0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.recompute_s + self.tensor_s + self.bubble_s + self.data_s + self.optimizer_s


@dataclass(frozen=True)
class _Passes:
    """Seconds of one micro-batch on one stage."""

    forward_s: float
    backward_s: float
    recompute_s: float
    tensor_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.recompute_s + self.tensor_s


def estimate_time(
    profile: ModelProfile, config: EngineConfig, hardware: Hardware, *, data_parallel: int, num_rows: int
) -> TimeEstimate:
    """Estimate the time of one optimizer step; arguments as of `estimate_memory`."""
    num_stages = config.pipeline_parallel
    num_batches = config.accumulation_steps * (config.micro_batches or 1)
    key = ("passes", num_rows, num_stages, config.tensor_parallel, config.activation_checkpointing, hardware)
    passes, sent = profile.cached(key, lambda: _time_stages(profile, config, hardware, num_rows))
    slowest = max(passes, key=lambda one: one.total_s)
    bubble_s = (num_stages - 1) * slowest.total_s
    if num_stages > 1:
        reach = config.tensor_parallel * num_stages
        bubble_s += 2 * num_batches * (sent / hardware.bandwidth(reach) + hardware.latency_s)
    data_s, optimizer_s = max(
        _time_data(profile, config, hardware, data_parallel, stage, passes[stage]) for stage in range(num_stages)
    )
    return TimeEstimate(
        compute_s=num_batches * (slowest.forward_s + slowest.backward_s),
        recompute_s=num_batches * slowest.recompute_s,
        tensor_s=num_batches * slowest.tensor_s,
        bubble_s=bubble_s,
        data_s=data_s,
        optimizer_s=optimizer_s,
    )


def _time_stages(
    profile: ModelProfile, config: EngineConfig, hardware: Hardware, num_rows: int
) -> tuple[list[_Passes], float]:
    """Time one micro-batch on each pipeline stage, and find the bytes that stages send to each other."""
    steps, num_stages = profile.steps[num_rows], config.pipeline_parallel
    stages = [segments_of_stage(profile, num_rows, num_stages, stage) for stage in range(num_stages)]
    sent = max((one.output.per_rank(config.tensor_parallel) for one in steps), default=0)
    return [_time_passes(one, config, hardware) for one in stages], sent


def _time_passes(segments: tuple[Segment, ...], config: EngineConfig, hardware: Hardware) -> _Passes:
    forward_s = backward_s = recompute_s = tensor_s = 0.0
    tensor_parallel = config.tensor_parallel

    def seconds(flops: Amount, kernels: int) -> float:
        return max(flops.per_rank(tensor_parallel) / hardware.flops_per_s, kernels * hardware.kernel_s)

    for one, is_recomputed in zip(segments, find_recomputed(segments, config), strict=True):
        forward_s += seconds(one.forward_flops, one.forward_kernels)
        backward_s += seconds(one.backward_flops, one.backward_kernels)
        reduced = one.forward_reduced_bytes + one.backward_reduced_bytes
        if is_recomputed:
            recompute_s += seconds(one.forward_flops, one.forward_kernels)
            reduced += one.forward_reduced_bytes
        if tensor_parallel > 1 and reduced:
            tensor_s += _all_reduce(reduced, tensor_parallel, hardware, tensor_parallel) + 4 * hardware.latency_s
    return _Passes(forward_s, backward_s, recompute_s, tensor_s)


def _time_data(
    profile: ModelProfile, config: EngineConfig, hardware: Hardware, data_parallel: int, stage: int, passes: _Passes
) -> tuple[float, float]:
    """Time the communication between replicas that computation does not hide, and the optimizer's step."""
    sums = sum_states(
        profile,
        tensor_parallel=config.tensor_parallel,
        data_parallel=data_parallel,
        num_stages=config.pipeline_parallel,
        stage=stage,
    )
    whole, trained, state = sums.parameters, sums.gradients, sums.state
    num_batches = config.accumulation_steps * (config.micro_batches or 1)
    shards = data_parallel if config.zero_stage >= 1 else 1
    touched = (3 * trained + 2 * state) / shards  # parameters are read and written, gradients read, state both
    moved_s = touched / hardware.memory_bytes_per_s
    if config.cpu_offload:
        moved_s += (2 * whole * num_batches + trained) / data_parallel / hardware.host_bytes_per_s
    if data_parallel == 1:
        return 0.0, moved_s
    reach = data_parallel * config.workers_per_replica
    # ZeRO-2 and 3 divide the gradients in every backward pass, the others once in a step, as a pipeline does.
    reductions = config.accumulation_steps if config.zero_stage >= 2 and config.pipeline_parallel == 1 else 1
    if config.zero_stage == 3:
        gathered = 2 * num_batches * _all_reduce(whole, data_parallel, hardware, reach) / 2
        communicated = gathered + reductions * _all_reduce(trained, data_parallel, hardware, reach) / 2
        hidden = passes.total_s * num_batches
    else:
        communicated = (1 + reductions) * _all_reduce(trained, data_parallel, hardware, reach) / 2
        hidden = passes.backward_s
    return max(0.0, communicated - hidden) + hardware.latency_s * data_parallel, moved_s


def _all_reduce(size: float, num_ranks: int, hardware: Hardware, reach: int) -> float:
    return 2 * (num_ranks - 1) / num_ranks * size / hardware.bandwidth(reach)
