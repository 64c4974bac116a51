"""Differentiable collectives of a tensor-parallel group.

Each function is named after its forward pass. The backward pass is the one that gives every rank the gradient of the
whole computation, which all ranks of the group carry out together (Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raysgd.engine.local_tensors import all_gather, reduce_scatter


def copy_to_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor, which all ranks have; in the backward pass, add up the gradients of the ranks' shares."""
    return _apply(_Copy, tensor, group) if tensor.requires_grad else tensor


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add up the ranks' tensors; in the backward pass, every rank has the whole gradient already."""
    return _apply(_Sum, tensor, group)


def split_among_ranks(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a tensor that all ranks have; in the backward pass, concatenate the gradients."""
    return _apply(_Split, tensor, dim, group)


def concatenate_ranks(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' tensors for a computation that all ranks repeat; in the backward pass, take the own part."""
    return _apply(_Concatenate, tensor, dim, group)


def gather_for_shares(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' tensors for a computation of which each rank does a share.

    In the backward pass, add up the gradients of the shares, and take the own part of the sum.
    """
    return _apply(_GatherForShares, tensor, dim, group)


def sum_and_split(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Add up the ranks' tensors, and return this rank's part; in the backward pass, concatenate the gradients."""
    return _apply(_SumAndSplit, tensor, dim, group)


@torch.no_grad()
def broadcast_from_first(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Give a tensor the values of the group's first rank; nothing happens on the meta device."""
    if tensor.is_meta:
        return
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(whole, group=group, group_src=0)
    if not torch.equal(whole, tensor):
        tensor.copy_(whole)


def _apply(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    rows = tensor.movedim(dim, 0).contiguous()
    whole = rows.new_empty((size * rows.shape[0], *rows.shape[1:]))
    all_gather(whole, rows, group=group)
    return whole.movedim(0, dim).contiguous()


def _reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    rows = tensor.movedim(dim, 0).contiguous()
    part = rows.new_empty((rows.shape[0] // size, *rows.shape[1:]))
    reduce_scatter(part, rows, group=group)
    return part.movedim(0, dim).contiguous()


def _own_part(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    width = tensor.shape[dim] // dist.get_world_size(group)
    return tensor.narrow(dim, dist.get_rank(group) * width, width).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _all_reduce(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _own_part(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _all_gather(grads[0], ctx.dim, ctx.group), None, None


class _Concatenate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _own_part(grads[0], ctx.dim, ctx.group), None, None


class _GatherForShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _reduce_scatter(grads[0], ctx.dim, ctx.group), None, None


class _SumAndSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _all_gather(grads[0], ctx.dim, ctx.group), None, None
