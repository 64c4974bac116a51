"""Differentiable collectives of a tensor-parallel group.

`exchange` has one collective in the forward pass, and in the backward pass the one that gives every rank the gradient of the
whole computation, which all ranks of the group carry out together (Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raysgd.engine.model.local_tensors import all_gather, local_of, reduce_scatter

#: Takes this rank's tensor, a dim and the group.
Collective = Callable[[Tensor, int, dist.ProcessGroup], Tensor]


def keep(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor as it is."""
    return tensor.view_as(tensor)


def add_up(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Add up the ranks' tensors."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def take_own(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a tensor that all ranks have."""
    width = tensor.shape[dim] // dist.get_world_size(group)
    return tensor.narrow(dim, dist.get_rank(group) * width, width).contiguous()


def concatenate(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' tensors."""
    size = dist.get_world_size(group)
    rows = tensor.movedim(dim, 0).contiguous()
    whole = rows.new_empty((size * rows.shape[0], *rows.shape[1:]))
    all_gather(whole, rows, group=group)
    return whole.movedim(0, dim).contiguous()


def add_up_own(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Add up the ranks' tensors, and return this rank's part of the sum."""
    size = dist.get_world_size(group)
    rows = tensor.movedim(dim, 0).contiguous()
    part = rows.new_empty((rows.shape[0] // size, *rows.shape[1:]))
    reduce_scatter(part, rows, group=group)
    return part.movedim(0, dim).contiguous()


def exchange(tensor: Tensor, dim: int, group: dist.ProcessGroup, forward: Collective, backward: Collective) -> Tensor:
    """Apply a collective to a tensor, and another one to its gradient."""
    result: Tensor = _Exchange.apply(tensor, dim, group, forward, backward)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def broadcast_from_first(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Give a tensor, or what is local of a DTensor, the values of the group's first rank; nothing happens on the meta device."""
    if tensor.is_meta:
        return
    tensor = local_of(tensor)
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(whole, group=group, group_src=0)
    if not torch.equal(whole, tensor):
        tensor.copy_(whole)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup, forward: Collective, backward: Collective
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.backward_collective = dim, group, backward
        return forward(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.backward_collective(grads[0], ctx.dim, ctx.group), None, None, None, None
