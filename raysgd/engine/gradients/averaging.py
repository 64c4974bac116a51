"""The division of gradients by the number of data-parallel ranks, which makes them those of the mean loss. Worker side.

DDP divides in its buckets, and FSDP2 (ZeRO 3) in its reduce-scatter. Where the engine averages itself, it does it here: by
all-reduce, or for shards (ZeRO 1 and 2) by reduce-scatter. The division by the batches of a step is in `raysgd.engine.step`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from raysgd.engine.model.local_tensors import local_of, place_as, reduce_scatter

#: Bytes of the parameters that communicate together, as in DDP.
BUCKET_BYTES = 25 << 20


def in_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters that communicate together, in about the order in which their gradients come."""
    buckets: list[list[nn.Parameter]] = []
    num_bytes, traits = 0, (torch.float32, torch.device("meta"))
    for parameter in reversed(parameters):
        local = local_of(parameter)
        if not buckets or (local.dtype, local.device) != traits or num_bytes >= BUCKET_BYTES:
            buckets.append([])
            num_bytes, traits = 0, (local.dtype, local.device)
        buckets[-1].append(parameter)
        num_bytes += parameter.numel() * parameter.element_size()
    return buckets


def average_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of a bucket of parameters over ranks, whole, and leave them at the parameters.

    Ranks that have not used a parameter count as zeros, if any has.
    """
    first = local_of(parameters[0])
    is_used = [each.grad is not None for each in parameters]
    sizes = [local_of(each).numel() for each in parameters]
    flat = torch.cat(
        [
            first.new_zeros(size) if each.grad is None else local_of(each.grad).reshape(-1)
            for each, size in zip(parameters, sizes, strict=True)
        ]
        + [_flags(is_used, first.dtype, first.device)]
    )
    dist.all_reduce(flat, group=group)
    are_used = _are_used(is_used, flat[-len(is_used) :].clone())
    flat /= group.size()
    for parameter, averaged, is_there in zip(
        parameters, torch.split(flat[: -len(is_used)], sizes), are_used, strict=True
    ):
        averaged = averaged.view(local_of(parameter).shape)
        if parameter.grad is not None:
            local_of(parameter.grad).copy_(averaged)
        elif is_there:
            parameter.grad = place_as(parameter, averaged.clone())


def average_rows(sent: torch.Tensor, is_used: list[bool], group: dist.ProcessGroup) -> tuple[torch.Tensor, list[bool]]:
    """Average the gradients of shards over ranks, and return this rank's row of them, and which any rank has.

    Args:
        sent: A row of gradients for each rank. Each ends with a place for which gradients there are: their sum says how many
            ranks have one.
        is_used: Which gradients this rank has.
        group: The ranks.
    """
    row = sent.shape[1] - len(is_used)
    sent[:, row:] = _flags(is_used, sent.dtype, sent.device)
    received = torch.empty_like(sent[0])
    reduce_scatter(received, sent.view(-1), group=group)
    are_used = _are_used(is_used, received[row:])
    received /= group.size()
    return received, are_used


def _flags(is_used: list[bool], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if all(is_used):
        return torch.ones(len(is_used), dtype=dtype, device=device)  # no copy to the device
    return torch.tensor(is_used, dtype=dtype, device=device)


def _are_used(is_used: list[bool], num_ranks_using: torch.Tensor) -> list[bool]:
    """Return which parameters any rank has used; the device is asked only if this rank has not used them all."""
    return is_used if all(is_used) else [number > 0 for number in num_ranks_using.tolist()]
