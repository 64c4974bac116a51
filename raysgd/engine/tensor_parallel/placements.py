"""Where the values of a parameter lie: cutting a full parameter, and describing the shards of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from raysgd.engine.local_tensors import make_dtensor
from raysgd.engine.tensor_parallel.collectives import broadcast_from_first
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: A box in the full tensor, and the same box in the local tensor.
Box = tuple[tuple[slice, ...], tuple[slice, ...]]


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
    local = _cut(full, placement, mesh.get_local_rank(), mesh.size())
    tensor = make_dtensor(local, mesh, [placement], full.shape)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def local_boxes(tensor: DTensor) -> list[Box]:
    """Say which boxes of the full tensor make up this rank's local tensor.

    A fused weight (GPT-2's ``c_attn``, the ``in_proj_weight`` of ``nn.MultiheadAttention``) has a box for each part. FSDP2
    over a data-parallel axis may have been applied on top of tensor parallelism.

    Returns:
        Pairs of a box in the full tensor and the same box in the local tensor. Empty boxes are left out.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return boxes_of(tensor.shape, tensor.device_mesh.shape, coordinate, tensor.placements)


def boxes_of(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[Box]:
    """Compute the boxes of `local_boxes` for one rank of a mesh.

    Args:
        shape: The full tensor's shape.
        mesh_shape: The sizes of the mesh's axes.
        coordinate: The rank's place on each axis.
        placements: How each axis shards the tensor.
    """
    runs = []
    for dim, size in enumerate(shape):
        own = [range(size)]
        for axis, parts in _cuts(dim, mesh_shape, placements):
            total = sum(len(run) for run in own)
            fused = [_between(own, part * total // parts, (part + 1) * total // parts) for part in range(parts)]
            own = [run for part in fused for run in _chunk(part, mesh_shape[axis], coordinate[axis])]
        runs.append(own)
    return [
        (tuple(slice(run.start, run.stop) for run, _ in corner), tuple(place for _, place in corner))
        for corner in product(*(_placed(own) for own in runs))
    ]


def fsdp_shard_placement(data_parallel_size: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return a `shard_placement_fn` for `fully_shard`, which shards another dim than tensor parallelism where it can.

    So every shard is one box, or one for each part of a fused weight. FSDP2 by itself shards dim 0, where a fused weight's
    description would be wrong, and its checkpoints with it: where it would have to, a ConfigError is raised.
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


def _cut(full: Tensor, placement: Placement, rank: int, size: int) -> Tensor:
    if isinstance(placement, Replicate):
        return full
    dim, parts = _dim_and_parts(placement)
    own = [part.chunk(size, dim)[rank] for part in full.chunk(parts, dim)]
    return (torch.cat(own, dim) if parts > 1 else own[0].clone()).contiguous()


def _dim_and_parts(placement: Placement) -> tuple[int, int]:
    if isinstance(placement, _StridedShard):
        return placement.dim, int(placement.split_factor)
    assert isinstance(placement, Shard)
    return placement.dim, 1


def _cuts(dim: int, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[tuple[int, int]]:
    """Return the mesh axes that cut a dim, in their order, with the number of fused parts that each cuts.

    FSDP2 writes `_StridedShard` where it cuts what the axes to the right have cut; otherwise the class marks a fused weight.
    """
    first: list[tuple[int, int]] = []
    last: list[tuple[int, int]] = []
    for axis, placement in enumerate(placements):
        if not isinstance(placement, (Shard, _StridedShard)) or placement.dim != dim:
            continue
        parts = _dim_and_parts(placement)[1]
        to_the_right = [
            size
            for size, other in zip(mesh_shape[axis + 1 :], placements[axis + 1 :], strict=True)
            if isinstance(other, (Shard, _StridedShard)) and other.dim == dim
        ]
        if parts > 1 and to_the_right:
            last.insert(0, (axis, 1))
        else:
            first.append((axis, parts))
    return first + last


def _chunk(runs: list[range], size: int, rank: int) -> list[range]:
    """Return one of the parts into which ``torch.chunk`` cuts."""
    total = sum(len(run) for run in runs)
    width = -(-total // size)
    return _between(runs, min(rank * width, total), min((rank + 1) * width, total))


def _between(runs: list[range], first: int, last: int) -> list[range]:
    """Return the elements between two places of some runs that lie one after the other."""
    found, at = [], 0
    for run in runs:
        inside = run[max(first - at, 0) : max(last - at, 0)]
        at += len(run)
        if len(inside):
            found.append(inside)
    return found


def _placed(runs: list[range]) -> list[tuple[range, slice]]:
    """Add to each run where it lies in the local tensor."""
    placed, at = [], 0
    for run in runs:
        placed.append((run, slice(at, at + len(run))))
        at += len(run)
    return placed
