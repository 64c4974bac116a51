"""DTensors and this rank's local tensors of them, and the two collectives that torch has renamed. Worker side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.checkpoint.placing import place_like
from raysgd.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

# Prefer the new names: torch 2.13 warns about the old ones.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Make a DTensor of this rank's shard, without communication; ``shape`` is that of the whole tensor."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def place_as(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a local tensor, distributed as ``tensor`` is."""
    if not is_dtensor(tensor):
        return local
    return make_dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape)


def place_gradient(parameter: torch.nn.Parameter) -> None:
    """Distribute a gradient as its parameter is.

    That of torch's ``SequenceParallel`` is a part of the sum on each rank, that of ``RowwiseParallel`` for an embedding is whole.
    """
    gradient = parameter.grad
    if is_dtensor(parameter) and is_dtensor(gradient) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def free_dims(tensor: DTensor) -> list[int]:
    """Return the dims along which a DTensor is not divided."""
    taken = {getattr(placement, "dim", None) for placement in tensor.placements}
    return [dim for dim in range(tensor.ndim) if dim not in taken]


def make_data_settable() -> None:
    """Make ``parameter.data = value`` exchange the elements of DTensors: torch changes a tensor that they do not use.

    The value may be a DTensor, whose memory the parameter has then, or a whole tensor. What ``parameter.data`` returned before
    keeps its elements, so that a loop can exchange the two and exchange them back.
    """
    from torch.distributed.tensor import DTensor

    if "data" in vars(DTensor):
        return
    get_data: Any = torch.Tensor.data

    def set_data(self: DTensor, value: torch.Tensor) -> None:
        if value.shape != self.shape:
            raise UsageError(
                f"a parameter of shape {tuple(self.shape)}, which ranks divide, got data of shape {tuple(value.shape)}: "
                "keep shapes after engine.compose."
            )
        if is_dtensor(value):
            placed = value.redistribute(self.device_mesh, self.placements)
        else:
            placed = place_like("data", value, self, "parameter.data")
        held = local_of(self)
        held.data = local_of(placed.detach()).to(held).contiguous()  # as torch has described it

    DTensor.data = property(get_data.__get__, set_data)  # type: ignore[assignment]
