"""How a parameter is sharded: the placements of fused weights, and a DTensor of a full parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from raysgd.engine.model.local_tensors import make_dtensor
from raysgd.engine.tensor_parallel.collectives import broadcast_from_first
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def fused_shard(dim: int, num_parts: int) -> Placement:
    """Return the placement of a fused weight: each of its `num_parts` parts is cut among the ranks, along `dim`."""
    return _StridedShard(dim, split_factor=num_parts) if num_parts > 1 else Shard(dim)


def distribute_parameter(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Make a DTensor parameter on a one-axis mesh, with the values of the mesh's first rank.

    Args:
        parameter: The full parameter, of equal shape on all ranks. On the meta device nothing is communicated.
        mesh: The tensor-parallel mesh.
        placement: How the values are cut. The cut must be even.
    """
    full = parameter.detach().clone(memory_format=torch.contiguous_format)
    broadcast_from_first(full, mesh.get_group())
    if not placement.is_replicate():
        shards, _ = placement._split_tensor(full, mesh.size(), with_padding=False, contiguous=True)  # type: ignore[attr-defined]
        # A shard along the first dim is a view, with which the whole parameter would stay in memory.
        local = shards[mesh.get_local_rank()].clone()
    else:
        local = full
    tensor = make_dtensor(local, mesh, [placement], full.shape)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def fsdp_shard_placement(data_parallel_size: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return a `shard_placement_fn` for `fully_shard`, which shards another dim than tensor parallelism where it can.

    FSDP2 by itself shards dim 0, where a fused weight's description would be wrong, and its checkpoints with it: where it
    would have to, a ConfigError is raised.
    """

    def placement_of(parameter: nn.Parameter) -> Shard | None:
        if not isinstance(parameter, DTensor) or parameter.ndim < 2:
            return None
        taken = {placement.dim for placement in parameter.placements if isinstance(placement, (Shard, _StridedShard))}
        if 0 not in taken:
            return None
        free = [dim for dim in range(parameter.ndim) if dim not in taken]
        even = [dim for dim in free if parameter.shape[dim] % data_parallel_size == 0]
        if not even and any(
            isinstance(placement, _StridedShard) and placement.dim == 0 for placement in parameter.placements
        ):
            shape = tuple(parameter.shape)
            raise ConfigError(
                f"zero_stage=3 with tensor_parallel cannot divide a fused weight of shape {shape} over {data_parallel_size} "
                f"replicas: {data_parallel_size} does not divide "
                f"{' or '.join(str(shape[dim]) for dim in free) or 'a free dimension'}. Give another number of workers, or "
                "zero_stage=2."
            )
        return Shard(even[0]) if even else None

    return placement_of
