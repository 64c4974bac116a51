"""ZeRO stages 1 and 2, and master weights: the optimizer works on its own pieces of the parameters. Worker side.

A piece is the part of a parameter that this rank updates: what a DTensor divided over the copies of the model gives it, by rows
as a rule, or all of it where nothing is divided. It is in fp32 if the parameter is in a smaller type. In each step,
gradients come in by reduce-scatter, the optimizer updates the pieces, and an all-gather brings the parameters up to date: the
stages "P_os" and "P_os+g" of ZeRO (Rajbhandari et al., arXiv 1910.02054), and the master weights of mixed precision training
(Micikevicius et al., arXiv 1710.03740).

Between a backward pass and the optimizer's step, the gradient of a piece is also that of its parameter: what the loop reads and
changes there is what the optimizer uses. See doc/design/0042-gradients-of-the-loop.md.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from raysgd.errors import UsageError

# Prefer the new names: torch 2.13 warns about the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: Bytes of the parameters that communicate together, as in DDP.
BUCKET_BYTES = 25 << 20


@dataclass
class _Part:
    """One parameter in a bucket.

    Attributes:
        parameter: The parameter that the model computes with.
        piece: What the optimizer updates; the parameter itself if nothing is divided or converted.
        offset: Where its chunk begins in each rank's row of the bucket.
        chunk: Elements of the chunk: those of the rank with the most.
        shown: The gradient that the parameter and the piece have in common for the loop, if they have one.
    """

    parameter: nn.Parameter
    piece: torch.Tensor
    offset: int
    chunk: int
    shown: torch.Tensor | None = None

    def show(self) -> None:
        """Let the loop find the gradient of the piece at the parameter."""
        if self.piece is self.parameter:
            return
        self.parameter.grad, self.shown = None, self.piece.grad
        if self.shown is not None and self.shown.dtype != self.parameter.dtype:
            if hasattr(self.parameter, "grad_dtype"):
                self.parameter.grad_dtype = None  # it may have a gradient of another type: that of its master weights
            else:  # before torch 2.10 it cannot
                self.parameter.grad, self.shown = self.shown.to(self.parameter.dtype), None
                return
        self.parameter.grad = self.shown

    def hold(self) -> None:
        """Take what the loop has left at the parameter, or else at the piece, as the gradient of the piece."""
        if self.piece is self.parameter:
            return
        found, self.parameter.grad = self.parameter.grad, None
        if found is not self.shown:
            self.piece.grad = found if found is None else self._like_piece(found)
        self.shown = None

    def _like_piece(self, gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor) == isinstance(self.piece, DTensor):
            if not isinstance(self.piece, DTensor):
                return gradient.to(self.piece.dtype)
            if isinstance(gradient, DTensor) and gradient.device_mesh == self.piece.device_mesh:
                placed: torch.Tensor = gradient.redistribute(placements=self.piece.placements).to(self.piece.dtype)
                return placed
        raise UsageError(
            f"a parameter of shape {tuple(self.parameter.shape)} got a gradient from the loop that is not divided as the "
            "optimizer's state is: change the gradient that is there, as by parameter.grad.mul_(factor), or make the new one of "
            "it, as by torch.zeros_like(parameter.grad)."
        )


@dataclass
class _Bucket:
    parts: list[_Part] = field(default_factory=list)
    row: int = 0  # elements of each rank's row
    num_ready: int = 0  # parameters whose gradient of this backward pass is there

    @property
    def num_bytes(self) -> int:
        return sum(part.parameter.numel() * part.parameter.element_size() for part in self.parts)


class OptimizerPieces:
    """The pieces of all parameters of an optimizer.

    Args:
        parameters: Those that the optimizer updates; plain tensors, or DTensors of tensor parallelism.
        mesh: The mesh of all workers.
        is_divided: Whether each data-parallel rank updates some rows only.
        is_averaged: Whether something else, such as DDP, averages the gradients over the copies of the model.
        is_early: Whether gradients may be collected during the backward pass.

    Attributes:
        is_collecting: Whether gradients are collected during the backward pass, as soon as those of a bucket are there. The
            gradients of parameters are freed then.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: DeviceMesh,
        *,
        is_divided: bool,
        is_averaged: bool = False,
        is_early: bool = True,
    ) -> None:
        self._mesh = mesh
        self._group = mesh["dp"].get_group()
        self._num_ranks = mesh["dp"].size() if is_divided else 1
        self._rank = mesh["dp"].get_local_rank() if is_divided else 0
        self._is_divided = is_divided
        self._averages = not is_divided and not is_averaged and mesh["dp"].size() > 1
        self._buckets: list[_Bucket] = []
        self._num_collected = 0  # buckets, in this backward pass
        self.is_collecting = False
        for parameter in reversed(parameters):  # about the order in which their gradients come
            self._add(parameter)
        if is_early and (is_divided or self._averages):
            for number, bucket in enumerate(self._buckets):
                for part in bucket.parts:
                    part.parameter.register_post_accumulate_grad_hook(_make_hook(weakref.ref(self), number))  # type: ignore[no-untyped-call]

    @property
    def piece_of(self) -> dict[nn.Parameter, torch.Tensor]:
        """The pieces, by their parameters."""
        return {part.parameter: part.piece for part in self._parts()}

    def collect_gradients(self) -> None:
        """Add the gradients of the parameters, averaged over the copies of the model, to those of the pieces.

        Call it after a backward pass, on all ranks.
        """
        for bucket in self._buckets[self._num_collected :]:
            self._collect(bucket)
        self._num_collected = 0
        for bucket in self._buckets:
            bucket.num_ready = 0

    def average_gradients(self) -> None:
        """Average the gradients of the parameters over the copies of the model, whole, and leave them at the parameters."""
        for bucket in self._buckets:
            self._average(bucket)

    def update_parameters(self) -> None:
        """Set the parameters to what the optimizer has made of the pieces."""
        for bucket in self._buckets:
            if self._is_divided and self._num_ranks > 1:
                self._all_gather(bucket)
            else:
                for part in bucket.parts:
                    _local(part.parameter).copy_(_local(part.piece))

    def take_parameters(self) -> None:
        """Set the pieces to what their parameters hold, after these were loaded."""
        with torch.no_grad():
            for part in self._parts():
                if part.piece is not part.parameter:
                    own = self._own(_local(part.parameter), part.parameter, self._rank)
                    _local(part.piece).copy_(own)

    def show_gradients(self) -> None:
        """Make the gradients of the pieces those of their parameters, for the loop to read and to change."""
        for part in self._parts():
            part.show()

    def hold_gradients(self) -> None:
        """Take the gradients back from the parameters, as the loop has changed them.

        Raises:
            UsageError: The loop has set a gradient that is not divided as the pieces are.
        """
        for part in self._parts():
            part.hold()

    def drop_gradients(self) -> None:
        """Forget the gradients of the parameters and of the pieces."""
        for part in self._parts():
            part.parameter.grad = part.piece.grad = part.shown = None

    def _on_gradient(self, number: int) -> None:
        """Count a gradient of a bucket, and collect the buckets whose gradients are all there."""
        if not self.is_collecting:
            return
        self._buckets[number].num_ready += 1
        # In one order on all ranks, whatever the order in which gradients come.
        while self._num_collected < len(self._buckets):
            first = self._buckets[self._num_collected]
            if first.num_ready < len(first.parts):
                break
            self._collect(first)
            self._num_collected += 1

    def _parts(self) -> Iterable[_Part]:
        return (part for bucket in self._buckets for part in bucket.parts)

    def _add(self, parameter: nn.Parameter) -> None:
        last = self._buckets[-1] if self._buckets else None
        is_alike = last is not None and _traits(last.parts[0].parameter) == _traits(parameter)
        if last is None or not is_alike or last.num_bytes >= BUCKET_BYTES:
            last = _Bucket()
            self._buckets.append(last)
        chunk = self._own(_local(parameter), parameter, 0).numel()
        last.parts.append(_Part(parameter, self._make_piece(parameter), last.row, chunk))
        last.row += chunk

    def _own(self, tensor: torch.Tensor, parameter: nn.Parameter, rank: int) -> torch.Tensor:
        """Return a rank's part of a tensor that has the local shape of ``parameter``; all of a scalar.

        The first ranks have the most, as torch divides tensors.
        """
        if not tensor.ndim:
            return tensor
        dim = _divided_dim(parameter)
        each = math.ceil(tensor.shape[dim] / self._num_ranks)
        begin, end = (min(tensor.shape[dim], at * each) for at in (rank, rank + 1))
        return tensor.narrow(dim, begin, end - begin)

    def _make_piece(self, parameter: nn.Parameter) -> torch.Tensor:
        own = self._own(_local(parameter).detach(), parameter, self._rank)
        dtype = torch.float32 if own.dtype.itemsize < 4 and own.is_floating_point() else own.dtype
        if not self._is_divided and dtype == own.dtype:
            return parameter
        if dtype != own.dtype or not own.is_contiguous():
            own = own.to(dtype, copy=True, memory_format=torch.contiguous_format)
        # Otherwise it is a view of the parameter's own rows, and takes no memory.
        if not self._is_divided:
            placed = _like(parameter, own) if isinstance(parameter, DTensor) else own
            return placed.requires_grad_()
        return self._distribute(parameter, own).requires_grad_()

    def _distribute(self, parameter: nn.Parameter, own: torch.Tensor) -> DTensor:
        """Return this rank's rows as a DTensor over the copies of the model, and over the ranks that share the parameter."""
        dim = _divided_dim(parameter)
        placement: Placement = Shard(dim) if own.ndim else Replicate()
        if not isinstance(parameter, DTensor):
            return _dtensor(own, self._mesh["dp"], [placement], parameter.shape)
        (of_tensor,) = parameter.placements
        if own.ndim and of_tensor.is_shard(dim):  # it is divided by tensor parallelism first
            placement = _StridedShard(dim, split_factor=self._mesh["tp"].size())
        return _dtensor(own, self._mesh["dp", "tp"], [placement, of_tensor], parameter.shape)

    # -- communication ------------------------------------------------------------------------------------------------

    def _collect(self, bucket: _Bucket) -> None:
        for part in bucket.parts:
            _place_gradient(part.parameter)
        if self._is_divided:
            self._reduce_scatter(bucket)
            return
        if self._averages:
            self._average(bucket)
        self._copy_gradients(bucket)

    def _average(self, bucket: _Bucket) -> None:
        """Average the gradients over the ranks. Ranks that have not used a parameter count as zeros, if any has."""
        first = _local(bucket.parts[0].parameter)
        is_used = [part.parameter.grad is not None for part in bucket.parts]
        gradients = [
            _local(part.parameter if part.parameter.grad is None else part.parameter.grad) for part in bucket.parts
        ]
        flat = torch.cat(
            [
                each.reshape(-1) if has else torch.zeros(each.numel(), dtype=each.dtype, device=each.device)
                for each, has in zip(gradients, is_used, strict=True)
            ]
            + [_flags(is_used, first.dtype, first.device)]
        )
        dist.all_reduce(flat, group=self._group)
        num_used = flat[-len(is_used) :].clone()
        flat /= self._mesh["dp"].size()
        used_somewhere = _are_used(is_used, num_used)
        sizes = [each.numel() for each in gradients]
        for number, averaged in enumerate(torch.split(flat[: -len(is_used)], sizes)):
            parameter = bucket.parts[number].parameter
            if is_used[number]:
                gradients[number].copy_(averaged.view(gradients[number].shape))
            elif used_somewhere[number]:
                parameter.grad = _like(parameter, averaged.view(_local(parameter).shape).clone())

    def _reduce_scatter(self, bucket: _Bucket) -> None:
        first, num_parts = _local(bucket.parts[0].parameter), len(bucket.parts)
        dtype = torch.float32 if first.dtype.itemsize < 4 else first.dtype
        is_used = [part.parameter.grad is not None for part in bucket.parts]
        # Each rank's row ends with which gradients there are: their sum says how many ranks have one.
        sent = torch.zeros(self._num_ranks, bucket.row + num_parts, dtype=dtype, device=first.device)
        sent[:, bucket.row :] = _flags(is_used, dtype, first.device)
        for part in bucket.parts:
            gradient = part.parameter.grad
            if gradient is None:
                continue
            local = _local(gradient)
            for rank in range(self._num_ranks):
                own = self._own(local, part.parameter, rank)
                sent[rank, part.offset : part.offset + own.numel()] = own.reshape(-1)
            part.parameter.grad = None
        received = sent[0]
        if self._num_ranks > 1:
            received = torch.empty_like(sent[0])
            _reduce_scatter(received, sent.view(-1), group=self._group)
        used_somewhere = _are_used(is_used, received[bucket.row :])
        if self._num_ranks > 1:
            received /= self._num_ranks
        for part, is_there in zip(bucket.parts, used_somewhere, strict=True):
            if not is_there:
                continue
            local = _local(part.piece)
            piece = received[part.offset : part.offset + local.numel()].view(local.shape)
            if part.piece.grad is None:
                part.piece.grad = _like(part.piece, piece)
            else:
                _local(part.piece.grad).add_(piece)

    def _copy_gradients(self, bucket: _Bucket) -> None:
        for part in bucket.parts:
            if part.piece is part.parameter or part.parameter.grad is None:
                continue
            gradient = _like(part.piece, _local(part.parameter.grad).to(part.piece.dtype))
            part.piece.grad = gradient if part.piece.grad is None else part.piece.grad.add_(gradient)
            part.parameter.grad = None

    def _all_gather(self, bucket: _Bucket) -> None:
        first = _local(bucket.parts[0].parameter)
        sent = torch.zeros(bucket.row, dtype=first.dtype, device=first.device)
        for part in bucket.parts:
            local = _local(part.piece).detach()
            sent[part.offset : part.offset + local.numel()] = local.reshape(-1)
        received = torch.empty(self._num_ranks, bucket.row, dtype=first.dtype, device=first.device)
        _all_gather(received.view(-1), sent, group=self._group)
        for part in bucket.parts:
            target = _local(part.parameter).detach()
            for rank in range(self._num_ranks):
                own = self._own(target, part.parameter, rank)
                own.copy_(received[rank, part.offset : part.offset + own.numel()].view(own.shape))


def _make_hook(pieces: weakref.ref[OptimizerPieces], number: int) -> Callable[[torch.Tensor], None]:
    # Python's garbage collector does not find a cycle through a hook of a tensor: the model and its groups would stay.
    def on_gradient(_: torch.Tensor) -> None:
        if (found := pieces()) is not None:
            found._on_gradient(number)

    return on_gradient


def _flags(is_used: list[bool], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if all(is_used):
        return torch.ones(len(is_used), dtype=dtype, device=device)  # no copy to the device
    return torch.tensor(is_used, dtype=dtype, device=device)


def _are_used(is_used: list[bool], num_ranks_using: torch.Tensor) -> list[bool]:
    """Return which parameters any rank has used; the device is asked only if this rank has not used them all."""
    return is_used if all(is_used) else [number > 0 for number in num_ranks_using.tolist()]


def _place_gradient(parameter: nn.Parameter) -> None:
    """Distribute a gradient as its parameter is; that of torch's ``SequenceParallel`` is a part of the sum on each rank."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _divided_dim(parameter: nn.Parameter) -> int:
    """Return the dim along which the copies of the model divide a parameter: one that tensor parallelism leaves, if possible."""
    if not isinstance(parameter, DTensor) or parameter.ndim < 2:
        return 0
    taken = {place.dim for place in parameter.placements if isinstance(place, (Shard, _StridedShard))}
    return next((dim for dim in range(parameter.ndim) if dim not in taken), 0)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a local tensor, distributed as ``tensor`` is."""
    if not isinstance(tensor, DTensor):
        return local
    return _dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape)


def _dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _traits(parameter: nn.Parameter) -> tuple[Any, ...]:
    local = _local(parameter)
    return local.dtype, local.device
