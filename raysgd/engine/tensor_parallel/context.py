"""What the layers of one tensor-parallel model share: the group, the state of sequence parallelism, and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from raysgd.engine.tensor_parallel.collectives import add_up, add_up_own, concatenate, exchange, keep, take_own
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class SequenceStack:
    """Blocks that run one after the other on parts of the sequence.

    Attributes:
        dim: The sequence's dim in the hidden states.
        is_sharded: Whether the current forward pass is on parts. The first block decides it.
    """

    dim: int
    is_sharded: bool = False


class TensorContext:
    """The state that the layers of one tensor-parallel model share in one process.

    A layer's inputs and outputs are ordinary tensors. Outside a region all ranks have the same tensors; under sequence
    parallelism, each has its part of the sequence. Inside a region each rank has its own heads or features.

    Random numbers: outside regions all ranks draw the same, from the default generator, which `bind` makes equal. Inside,
    each draws its own, from a seed that is drawn from the default generator. So a block that is computed again by
    activation checkpointing, which restores the default generator, draws the same numbers.

    Attributes:
        mesh: The tensor-parallel mesh, of one axis.
        group: Its process group.
        rank: This process's rank in the group.
        size: The group's size.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    rank: int
    size: int

    def __init__(self) -> None:
        self._stack: SequenceStack | None = None
        self._outer: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> TensorContext:
        return self

    def bind(self, mesh: DeviceMesh) -> None:
        """Take the mesh, and give all its ranks the generator state of the first."""
        self.mesh, self.group = mesh, mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self._share_generator_state(torch.default_generator)
        if mesh.device_type == "cuda":
            self._share_generator_state(torch.cuda.default_generators[torch.cuda.current_device()])

    def _share_generator_state(self, generator: torch.Generator) -> None:
        state = generator.get_state().to(self.mesh.device_type)
        dist.broadcast(state, group=self.group, group_src=0)
        generator.set_state(state.cpu())

    # Parameters

    def local(self, parameter: Tensor | None) -> Any:
        """Return this rank's values of a parameter, differentiably."""
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def replicated(self, parameter: Tensor | None) -> Any:
        """Return the values of a replicated parameter of a layer between regions.

        Under sequence parallelism each rank's gradient is that of its part of the sequence, and they are added up.
        """
        values = self.local(parameter)
        if self._is_on_parts and isinstance(parameter, DTensor) and parameter.placements == (Replicate(),):
            return self.copy(values)
        return values

    def own_of_fused(self, bias: Tensor, num_parts: int) -> Tensor:
        """Return this rank's values of each part of a fused bias, as rows.

        It is replicated: small, and so never cut into several parts by FSDP2 too.
        """
        parts = self.copy(self.local(bias)).view(num_parts, -1)
        width = parts.shape[1] // self.size
        return parts.narrow(1, self.rank * width, width)

    # Regions

    def enter(self, hidden: Tensor) -> Tensor:
        """Bring hidden states into a region."""
        if self._is_on_parts:
            assert self._stack is not None
            return exchange(hidden, self._stack.dim, self.group, concatenate, add_up_own)
        return self.copy(hidden)

    def leave(self, partial: Tensor) -> Tensor:
        """Bring the ranks' partial sums out of a region."""
        if self._is_on_parts:
            assert self._stack is not None
            return exchange(partial, self._stack.dim, self.group, add_up_own, concatenate)
        return self.sum(partial)

    def copy(self, tensor: Tensor) -> Tensor:
        """Bring a tensor that all ranks have into a region, where the gradient of each rank is one of its own values."""
        return exchange(tensor, 0, self.group, keep, add_up) if tensor.requires_grad else tensor

    def sum(self, partial: Tensor) -> Tensor:
        """Add up the ranks' partial sums; all ranks have the gradient of the sum."""
        return exchange(partial, 0, self.group, add_up, keep)

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor that all ranks have."""
        return exchange(tensor, dim, self.group, take_own, concatenate)

    def concatenate(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the whole tensor of which each rank has a part, for a computation that all ranks repeat."""
        return exchange(tensor, dim, self.group, concatenate, take_own)

    # Sequence parallelism

    @property
    def _is_on_parts(self) -> bool:
        return self._stack is not None and self._stack.is_sharded

    def set_stack(self, stack: SequenceStack | None) -> SequenceStack | None:
        """Run blocks of a stack from now on, and return the stack of until now."""
        outer, self._stack = self._stack, stack
        return outer

    def open_sequence(self, hidden: Tensor, stack: SequenceStack, is_training: bool) -> Tensor:
        """Return this rank's part of the sequence, before the first block.

        Raises:
            ConfigError: A training batch has a sequence length that the group's size does not divide.
        """
        length = hidden.shape[stack.dim]
        stack.is_sharded = length % self.size == 0
        if stack.is_sharded:
            return self.split(hidden, stack.dim)
        if is_training:
            raise ConfigError(
                f"sequence_parallel=True needs sequence lengths that tensor_parallel={self.size} divides: "
                f"{length} % {self.size} = {length % self.size}. Pad batches to a multiple of {self.size}."
            )
        return hidden

    def close_sequence(self, hidden: Tensor, stack: SequenceStack) -> Tensor:
        """Return the whole sequence, after the last block."""
        return self.concatenate(hidden, stack.dim) if stack.is_sharded else hidden

    # Random numbers

    @contextmanager
    def own_generator(self) -> Iterator[None]:
        """Draw this rank's own random numbers, until the end or until the row layer of the region."""
        if self._outer is not None:
            yield
            return
        generator = self._generator()
        seed = int(torch.randint(2**62, (), device="cpu"))
        self._outer = generator.get_state()
        generator.manual_seed((seed + self.rank * 0x9E3779B97F4A7C15) % 2**63)
        try:
            yield
        finally:
            self._draw_alike()

    def end_own_draws(self) -> None:
        """Draw as all ranks do after a region's row layer, whose output all ranks have, unless it is a part of the sequence."""
        if not self._is_on_parts:
            self._draw_alike()

    def _draw_alike(self) -> None:
        if self._outer is not None:
            self._generator().set_state(self._outer)
            self._outer = None

    def _generator(self) -> torch.Generator:
        if self.mesh.device_type == "cuda":
            return torch.cuda.default_generators[torch.cuda.current_device()]
        return torch.default_generator
