"""What a plan knows of a model: sizes of its parameters, and the memory and work of one training step. Plain data, no torch.

`raysgd.engine.planning.trace` makes these records; `memory` and `step_time` compute with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, cast

T = TypeVar("T")

#: Where a parameter outside the blocks is used: before the first block, or after the last one.
Side = Literal["first", "last"]


class Amount(NamedTuple):
    """An amount of bytes or FLOPs, split by what tensor parallelism does to it.

    Attributes:
        whole: Each tensor-parallel rank has all of it; sequence parallelism divides it by the ranks.
        gathered: Inputs of column-parallel layers, which each rank has whole even with sequence parallelism.
        sharded: Each tensor-parallel rank has its shard of it.
    """

    whole: float = 0
    gathered: float = 0
    sharded: float = 0

    def plus(self, other: Amount) -> Amount:
        return Amount(self.whole + other.whole, self.gathered + other.gathered, self.sharded + other.sharded)

    def minus(self, other: Amount) -> Amount:
        return Amount(self.whole - other.whole, self.gathered - other.gathered, self.sharded - other.sharded)

    def per_rank(self, tensor_parallel: int, *, sequence_parallel: bool = False) -> float:
        """Return what one tensor-parallel rank has of it."""
        whole = self.whole / tensor_parallel if sequence_parallel else self.whole
        return whole + self.gathered + self.sharded / tensor_parallel


_NOTHING = Amount()


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """One parameter; tied parameters are one.

    Attributes:
        name: Its first name in the model.
        shape: Its whole shape.
        itemsize: Bytes of an element that the model computes with.
        master_itemsize: Bytes of an element of the fp32 master weight, with ``precision="bf16-true"``; 0 if there is none.
        block: Index of its block, or None for a parameter outside the blocks.
        sides: Where a parameter outside the blocks is used; pipeline stages of both sides hold a copy.
        tensor_dim: The dimension that tensor parallelism shards; None if each rank has it whole.
        is_trainable: Whether it has a gradient and optimizer state.
        state_bytes_per_element: Optimizer state that has the parameter's shape.
        state_bytes: Optimizer state of other shapes, such as step counts.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    master_itemsize: int = 0
    block: int | None = None
    sides: frozenset[Side] = frozenset()
    tensor_dim: int | None = None
    is_trainable: bool = True
    state_bytes_per_element: float = 0
    state_bytes: float = 0

    def num_elements(self, *, tensor_parallel: int = 1, shards: int = 1) -> int:
        """Count the elements on the rank that has most of them.

        Tensor parallelism shards `tensor_dim`. ZeRO shards a dimension that it leaves, the first if possible, as FSDP2's
        ``fully_shard`` does: each rank gets ``ceil(rows / shards)`` rows, the last ones fewer.
        """
        shape = list(self.shape)
        if self.tensor_dim is not None:
            shape[self.tensor_dim] = _ceil(shape[self.tensor_dim], tensor_parallel)
        if shape:
            dim = self.zero_dim(tensor_parallel)
            shape[dim] = _ceil(shape[dim], shards)
        count = 1
        for size in shape:
            count *= size
        return count

    def zero_dim(self, tensor_parallel: int) -> int:
        """Return the dimension that ZeRO shards; see `num_elements`."""
        return 1 if tensor_parallel > 1 and self.tensor_dim == 0 and len(self.shape) > 1 else 0


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of the step in forward order: one block, or what lies between stacks of blocks.

    All bytes are activations: neither parameters, buffers nor gradients of parameters. Peaks are relative, so that the
    segment can be placed anywhere: to what is in memory when its forward or its backward pass starts.

    Attributes:
        block: Index of the block; None outside the blocks.
        retained: What stays in memory between its forward and its backward pass.
        output: What its forward pass leaves with activation checkpointing: the output, which is the next block's input.
        weight_copies: The part of `retained` that is parameters in another type, as autocast makes them.
        forward_peaks: Highest states of memory of the forward pass, relative to its start.
        carried: What is in memory when its backward pass starts in addition to what was there when its forward pass ended:
            the gradient of its output, and what the caller still holds, such as logits.
        backward_peaks: Highest states of memory of the backward pass, relative to its start.
        forward_flops: FLOPs of its forward pass.
        backward_flops: FLOPs of its backward pass.
        forward_kernels: Operations of the forward pass that compute something.
        backward_kernels: The same of the backward pass.
        forward_reduced_bytes: What tensor-parallel ranks add up in the forward pass: outputs of row-parallel layers.
        backward_reduced_bytes: The same of the backward pass: gradients of the inputs of column-parallel layers.
    """

    block: int | None = None
    retained: Amount = _NOTHING
    output: Amount = _NOTHING
    weight_copies: Amount = _NOTHING
    forward_peaks: tuple[Amount, ...] = (_NOTHING,)
    carried: Amount = _NOTHING
    backward_peaks: tuple[Amount, ...] = (_NOTHING,)
    forward_flops: Amount = _NOTHING
    backward_flops: Amount = _NOTHING
    forward_kernels: int = 0
    backward_kernels: int = 0
    forward_reduced_bytes: float = 0
    backward_reduced_bytes: float = 0


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model, and its training step for each size of a micro-batch that was traced.

    Attributes:
        parameters: All parameters.
        buffer_bytes: Bytes of all buffers.
        num_blocks: Repeated layers in all stacks.
        stacks: The name of each stack of blocks, and how many it has.
        stage_blocks: The blocks of each pipeline stage, by the number of stages; contiguous and equal parts if not given.
        head_counts: Numbers of attention heads, which ``tensor_parallel`` must divide.
        tensor_parallel_obstacle: Why layers cannot be sharded; None if they can.
        steps: The segments of a step by rows of the micro-batch.
        cache: Sums that several strategies share, by what they depend on; see `cached`.
    """

    parameters: tuple[ParameterInfo, ...]
    buffer_bytes: int = 0
    num_blocks: int = 0
    stacks: Mapping[str, int]
    stage_blocks: Mapping[int, tuple[range, ...]] = field(default_factory=dict)
    head_counts: tuple[int, ...] = ()
    tensor_parallel_obstacle: str | None = None
    steps: Mapping[int, tuple[Segment, ...]]
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def cached(self, key: tuple[Any, ...], compute: Callable[[], T]) -> T:
        """Return what was computed for a key, or compute it. The cache is not shared by profiles that were made apart."""
        if key not in self.cache:
            self.cache[key] = compute()
        return cast(T, self.cache[key])

    @property
    def num_parameters(self) -> int:
        return sum(one.num_elements() for one in self.parameters)


def find_highest(states: list[Amount]) -> tuple[Amount, ...]:
    """Return the states that no other state exceeds in every part: one of them is the peak, for any number of ranks."""
    highest: list[Amount] = []
    for state in sorted(set(states), reverse=True):
        if not any(all(a >= b for a, b in zip(other, state, strict=True)) for other in highest):
            highest.append(state)
    return tuple(highest) or (Amount(),)


def _ceil(size: int, parts: int) -> int:
    return -(-size // parts)
