"""Where the values of a parameter lie: cutting a full parameter, and describing the pieces of a sharded one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

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
    full = parameter.detach()
    if not full.is_meta:
        full = full.clone(memory_format=torch.contiguous_format)
        dist.broadcast(full, group=mesh.get_group(), group_src=0)
    local = _cut(full, placement, mesh.get_local_rank(), mesh.size())
    stride = torch.empty(full.shape, device="meta").stride()
    tensor = DTensor.from_local(local, mesh, [placement], run_check=False, shape=full.shape, stride=stride)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def local_boxes(tensor: DTensor) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Say which boxes of the full tensor make up this rank's local tensor, for a DTensor on a one-axis mesh.

    A fused weight (GPT-2's ``c_attn``, the ``in_proj_weight`` of ``nn.MultiheadAttention``) has a box for each part.

    Returns:
        Pairs of a box in the full tensor and the same box in the local tensor, both as slices.
    """
    (placement,), mesh = tensor.placements, tensor.device_mesh
    whole = tuple(slice(0, size) for size in tensor.shape)
    if isinstance(placement, Replicate):
        return [(whole, whole)]
    dim, parts = _dim_and_parts(placement)
    width = tensor.shape[dim] // parts // mesh.size()
    first = mesh.get_local_rank() * width
    boxes = []
    for part in range(parts):
        start = part * (tensor.shape[dim] // parts) + first
        boxes.append((_replaced(whole, dim, start, width), _replaced(whole, dim, part * width, width)))
    return boxes


def fsdp_shard_placement(data_parallel_size: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return a `shard_placement_fn` for `fully_shard`, which shards another dim than tensor parallelism where it can.

    So every piece is one box, or one for each part of a fused weight. FSDP2 by itself shards dim 0, where a fused weight's
    description would be wrong, and its checkpoints with it.
    """

    def placement_of(parameter: nn.Parameter) -> Shard | None:
        if not isinstance(parameter, DTensor) or parameter.ndim < 2:
            return None
        taken = {placement.dim for placement in parameter.placements if isinstance(placement, (Shard, _StridedShard))}
        if 0 not in taken:
            return None
        free = [dim for dim in range(parameter.ndim) if dim not in taken]
        even = [dim for dim in free if parameter.shape[dim] % data_parallel_size == 0]
        return Shard(even[0]) if even else None

    return placement_of


def _cut(full: Tensor, placement: Placement, rank: int, size: int) -> Tensor:
    if isinstance(placement, Replicate):
        return full
    dim, parts = _dim_and_parts(placement)
    pieces = [part.chunk(size, dim)[rank] for part in full.chunk(parts, dim)]
    return (torch.cat(pieces, dim) if parts > 1 else pieces[0].clone()).contiguous()


def _dim_and_parts(placement: Placement) -> tuple[int, int]:
    if isinstance(placement, _StridedShard):
        return placement.dim, int(placement.split_factor)
    assert isinstance(placement, Shard)
    return placement.dim, 1


def _replaced(box: tuple[slice, ...], dim: int, start: int, width: int) -> tuple[slice, ...]:
    return (*box[:dim], slice(start, start + width), *box[dim + 1 :])
