"""The cost model of memory and time: pure arithmetic on profiles."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.engine.config import EngineConfig
from raysgd.engine.planning import Hardware, MemoryEstimate
from raysgd.engine.planning.candidates import estimate_step
from raysgd.engine.planning.memory_prediction import estimate_memory
from raysgd.engine.planning.memory_tracker import Level
from raysgd.engine.planning.trace import Parameter, TracedModel

MB = 1_000_000
ROWS = 1


@dataclass
class Split:
    """Stages of equal numbers of blocks; the embedding is on the first one, and the head on the last one."""

    num_blocks: int
    num_ranks: int

    @property
    def ranges(self) -> list[range]:
        bounds = [stage * self.num_blocks // self.num_ranks for stage in range(self.num_ranks + 1)]
        return [range(first, last) for first, last in pairwise(bounds)]

    @property
    def rank_of(self) -> list[int]:
        return list(range(self.num_ranks))

    def has(self, rank: int, name: str) -> bool:
        if name.startswith("layers."):
            return int(name.split(".")[1]) in self.ranges[rank]
        return rank == (0 if name == "embedding" else self.num_ranks - 1)


@dataclass
class Model(TracedModel):
    """A model whose trace is known: ``parts`` are the bytes that a block has whole, gathered and sharded."""

    parameters: tuple[Parameter, ...]
    num_blocks: int
    parts: tuple[float, float, float]
    output: float
    buffer_bytes: int = 0
    _cache: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for count in range(2, 9):
            for schedule in (None, "GPipe"):
                self._cache["split", count, schedule] = Split(self.num_blocks, count)

    def levels(
        self, num_rows: int, tensor_parallel: int = 1, *, sequence_parallel: bool = False, has_copies: bool = True
    ) -> list[Level]:
        whole, gathered, sharded = self.parts
        factor, output = 1 / tensor_parallel, self.output
        if sequence_parallel:
            whole, output = whole * factor, output * factor
        inner = whole + gathered + sharded * factor
        block = Level(0, inner + output, output, inner, output, whole / 2 + sharded * factor / 2, 1)
        edge = Level(None, self.output, 0, self.output, 0, 0, 1)
        return [edge, *(block._replace(block=index) for index in range(self.num_blocks)), edge]

    def work(self, num_rows: int) -> tuple[float, float, float]:
        return 3e12 * ROWS * self.num_blocks, 60 * self.num_blocks, 1.0


def make_profile(
    *, num_blocks: int = 16, width: int = 1024, activation_mb: int = 40, output_mb: int = 4, num_rows: int = 1
) -> Model:
    """Make a model of blocks with a column- and a row-parallel weight, an embedding and a head."""
    kinds = [(("up", (4 * width, width), 0)), ("down", (width, 4 * width), 1), ("norm", (width,), None)]
    blocks = [
        _parameter(f"layers.{index}.{name}", shape, block=index, tensor_dim=dim)
        for index in range(num_blocks)
        for name, shape, dim in kinds
    ]
    outside = [_parameter(name, (8000, width), tensor_dim=0) for name in ("embedding", "head")]
    part = activation_mb * MB * num_rows / 4
    return Model((outside[0], *blocks, outside[1]), num_blocks, (part, part, 2 * part), output_mb * MB * num_rows)


def _parameter(name: str, shape: tuple[int, ...], *, block: int | None = None, tensor_dim: int | None) -> Parameter:
    return Parameter(
        names=(name,),
        shape=shape,
        itemsize=4,
        master_itemsize=0,
        block=block,
        tensor_dim=tensor_dim,
        is_trainable=True,
        state=(8, 4),
    )


def estimate(profile: Model, *, data_parallel: int = 1, **fields: Any) -> MemoryEstimate:
    return estimate_memory(profile, EngineConfig(**fields), data_parallel=data_parallel, num_rows=ROWS)


profiles = st.builds(
    make_profile,
    num_blocks=st.integers(8, 40),
    width=st.sampled_from([256, 1000, 4096]),
    activation_mb=st.integers(8, 400),
    output_mb=st.integers(1, 2),
)
ranks = st.sampled_from([2, 3, 4, 8, 16])
checkpointing = st.sampled_from([None, "selective", "full"])


@given(profiles, ranks, checkpointing)
def test_each_zero_stage_needs_no_more_than_the_one_before(profile: Model, data_parallel: int, kind: Any) -> None:
    estimates = [
        estimate(profile, data_parallel=data_parallel, zero_stage=stage, activation_checkpointing=kind)
        for stage in range(4)
    ]
    for before, after in pairwise(estimates):
        assert after.parameters <= before.parameters
        assert after.gradients <= before.gradients
        assert after.optimizer <= before.optimizer
    # The shards of the states: a quarter of the optimizer state on four ranks, and nothing of it twice.
    whole, sharded = estimates[0], estimates[3]
    for name in ("parameters", "gradients", "optimizer"):
        share = getattr(whole, name) / data_parallel
        assert share <= getattr(sharded, name) <= 1.03 * share


@given(profiles, st.sampled_from([(2, 4), (2, 8), (3, 6), (4, 16)]), st.integers(0, 3), checkpointing)
def test_more_data_parallel_ranks_never_need_more_memory(
    profile: Model, counts: tuple[int, int], stage: int, kind: Any
) -> None:
    few, many = (
        estimate(profile, data_parallel=count, zero_stage=stage, activation_checkpointing=kind).total
        for count in counts
    )
    assert many <= few


@given(profiles, st.sampled_from([1, 2, 4]), st.booleans(), checkpointing)
def test_more_tensor_parallel_ranks_never_need_more_memory(
    profile: Model, count: int, is_shared: bool, kind: Any
) -> None:
    fields = {"activation_checkpointing": kind}
    few = estimate(profile, tensor_parallel=count, sequence_parallel=is_shared and count > 1, **fields)
    many = estimate(profile, tensor_parallel=2 * count, sequence_parallel=is_shared, **fields)
    assert many.total < few.total


@given(profiles, ranks)
def test_checkpointing_needs_less_and_full_checkpointing_least(profile: Model, data_parallel: int) -> None:
    kinds: tuple[Any, ...] = (None, "selective", "full")
    kept, selective, full = (
        estimate(profile, data_parallel=data_parallel, activation_checkpointing=kind).activations for kind in kinds
    )
    assert full <= selective <= kept


@given(st.integers(8, 40), checkpointing, st.integers(0, 3))
def test_twice_the_layers_need_about_twice_the_memory(num_blocks: int, kind: Any, stage: int) -> None:
    small, large = (
        estimate(make_profile(num_blocks=count), data_parallel=4, zero_stage=stage, activation_checkpointing=kind)
        for count in (num_blocks, 2 * num_blocks)
    )
    outside = 2 * 8000 * 1024 * 16
    assert 2 * small.parameters - outside <= large.parameters <= 2 * small.parameters
    assert 2 * small.optimizer - outside <= large.optimizer <= 2 * small.optimizer
    assert large.activations <= 2 * small.activations
    if kind is None:
        assert large.activations >= 1.8 * small.activations


def test_zero_shares_what_its_paper_says() -> None:
    # ZeRO (2020), figure 1, with fp32: 16 bytes for each parameter; stages share the state, the gradients, the parameters.
    profile = make_profile(num_blocks=64)
    size = 4 * profile.num_parameters
    expected = [(1, 1, 1), (1, 1, 1 / 8), (1, 1 / 8, 1 / 8), (1 / 8, 1 / 8, 1 / 8)]
    for stage, (parameters, gradients, state) in enumerate(expected):
        # While batches add to them: ZeRO-1 divides gradients in the last one.
        found = estimate(profile, data_parallel=8, zero_stage=stage, accumulation_steps=2)
        assert found.parameters == pytest.approx(parameters * size, rel=0.001)
        assert found.gradients == pytest.approx(gradients * size, rel=0.001)
        assert found.optimizer == pytest.approx(2 * state * size, rel=0.001)


def test_gradients_are_whole_while_micro_batches_of_a_pipeline_add_to_them() -> None:
    profile = make_profile()
    for stage in (1, 2, 3):
        found = estimate(profile, data_parallel=4, zero_stage=stage, pipeline_parallel=2, micro_batches=8)
        whole = estimate(profile, pipeline_parallel=2, micro_batches=8).gradients
        # A quarter stays until the step; with ZeRO-1, gradients are whole between several batches too.
        assert found.gradients == pytest.approx(whole / 4, rel=0.01)
        assert found.gradients + found.buffers > whole
    batches: dict[str, Any] = {"zero_stage": 1, "pipeline_parallel": 2, "micro_batches": 8, "accumulation_steps": 2}
    assert estimate(profile, data_parallel=4, **batches).gradients == pytest.approx(whole, rel=0.01)


def test_zero_1_and_2_hold_copies_of_shards_that_are_not_contiguous() -> None:
    """Tensor parallelism cuts some weights by rows, so that ZeRO cuts them by columns."""
    profile = make_profile()
    by_rows = sum(4 * one.num_elements() for one in profile.parameters if one.tensor_dim == 0)
    for stage in (1, 2):
        alone, shared = (
            estimate(profile, data_parallel=4, zero_stage=stage, tensor_parallel=count).optimizer for count in (1, 2)
        )
        assert shared == pytest.approx(alone / 2 + by_rows / (4 * 2), rel=0.01)
    whole, sharded = (estimate(profile, data_parallel=4, zero_stage=3, tensor_parallel=count) for count in (1, 2))
    assert sharded.optimizer == pytest.approx(whole.optimizer / 2, rel=0.01)


def test_master_weights_are_those_of_the_optimizer_or_the_shards_of_zero_3() -> None:
    profile = make_profile()
    half = replace(
        profile,
        parameters=tuple(replace(one, itemsize=2, master_itemsize=4) for one in profile.parameters),
        _cache={},
    )
    size = 4 * profile.num_parameters
    expected = [(0.5, 1, 3), (0.5, 0.25, 0.75), (0.5, 0.25, 0.75), (0.25, 0.25, 0.5)]
    for stage, (parameters, gradients, optimizer) in enumerate(expected):
        found = estimate(half, data_parallel=4, zero_stage=stage)
        assert found.parameters == pytest.approx(parameters * size, rel=0.001)
        assert found.gradients == pytest.approx(gradients * size, rel=0.001)
        assert found.optimizer == pytest.approx(optimizer * size, rel=0.001)


def test_zero_3_has_two_blocks_and_everything_outside_them_whole() -> None:
    profile = make_profile(num_blocks=8, width=1024)
    block = 4 * (2 * 4 * 1024 * 1024 + 1024)
    outside = 4 * 2 * 8000 * 1024
    assert estimate(profile, data_parallel=4, zero_stage=3).buffers == 2 * (2 * block + outside)
    # A single rank with offload gathers from its host.
    assert estimate(profile, data_parallel=1, zero_stage=3, cpu_offload=True).buffers == 2 * (2 * block + outside)
    assert estimate(profile, data_parallel=1).buffers == 0


def test_offloaded_states_are_in_the_host() -> None:
    profile = make_profile()
    on_device = estimate(profile, data_parallel=4, zero_stage=3)
    offloaded = estimate(profile, data_parallel=4, zero_stage=3, cpu_offload=True)
    assert offloaded.parameters == offloaded.gradients == offloaded.optimizer == 0
    assert offloaded.host == on_device.parameters + on_device.gradients + on_device.optimizer
    assert offloaded.buffers == on_device.buffers


def test_first_pipeline_stage_holds_a_micro_batch_for_each_stage() -> None:
    profile = make_profile(num_blocks=16)
    few = estimate(profile, pipeline_parallel=4, micro_batches=1)
    many = estimate(profile, pipeline_parallel=4, micro_batches=8)
    kept = 4 * 44 * MB
    # Stage 0 keeps 4 micro-batches of its 4 blocks; a single one needs what one micro-batch needs.
    assert many.activations - few.activations == pytest.approx(3 * kept, rel=0.05)
    assert many.stage == 0


def test_each_stage_holds_all_micro_batches_with_gpipe() -> None:
    found = estimate(make_profile(num_blocks=16), pipeline_parallel=4, micro_batches=8, pipeline_schedule="GPipe")
    # The last stage has four blocks, the head, and what it has received.
    assert found.stage == 3
    assert found.kept_activations == 8 * (4 * 44 + 4 + 4) * MB <= found.activations


def test_foreach_step_needs_temporary_tensors_and_a_fused_one_does_not() -> None:
    profile = make_profile(activation_mb=1)
    foreach, fused = (estimate(profile, fused_optimizer=is_fused) for is_fused in (False, True))
    assert foreach.step == foreach.gradients
    assert fused.total < foreach.total


def step_s(profile: Model, *, data_parallel: int = 1, hardware: Hardware | None = None, **fields: Any) -> float:
    config = EngineConfig(**fields)
    return estimate_step(profile, config, hardware or Hardware(), data_parallel=data_parallel, num_rows=ROWS)


def test_recomputation_takes_time() -> None:
    profile = make_profile(num_rows=8)
    kept, selective, full = (step_s(profile, activation_checkpointing=kind) for kind in (None, "selective", "full"))  # type: ignore[arg-type]
    assert kept < selective < full
    # A third of the computation is the forward pass: full checkpointing repeats it.
    assert full / kept == pytest.approx(4 / 3, rel=0.05)


def test_more_micro_batches_make_a_pipeline_idle_less() -> None:
    profile = make_profile()
    few, many = (step_s(profile, pipeline_parallel=4, micro_batches=count) / count for count in (4, 32))
    # Narayanan et al. (2021): the idle time is (p - 1) / m of the computation.
    assert few / many == pytest.approx((1 + 3 / 4) / (1 + 3 / 32), rel=0.1)


def test_slower_connections_make_sharing_slower_and_computing_alone_not() -> None:
    profile = make_profile(width=4096)
    slow = Hardware(bandwidth_bytes_per_s=1e9)
    for fields in ({"tensor_parallel": 4}, {"data_parallel": 4}, {"data_parallel": 4, "zero_stage": 3}):
        assert step_s(profile, hardware=slow, **fields) > 1.5 * step_s(profile, **fields)  # type: ignore[arg-type]
    assert step_s(profile, hardware=slow) == step_s(profile)
