"""What an optimizer updates in place of the model's parameters: its shards of them, and master weights. Worker side.

`OptimizerShards` holds whole tensors: the parameters themselves, or fp32 master weights of those in a smaller type (mixed
precision training, Micikevicius et al., arXiv 1710.03740). `DividedShards` holds this rank's shard of each, by rows as a rule:
gradients come in by reduce-scatter, and an all-gather brings the parameters up to date, as in the stages "P_os" and "P_os+g" of
ZeRO (Rajbhandari et al., arXiv 1910.02054).

The optimizer finds the shards only while it runs (`OptimizerShards.in_place`). At all other times its groups and its state have
the parameters, as the loop sees them, and what the loop has done to these is taken into the shards first. Between a backward
pass and the optimizer's step, the gradient of a shard is also that of its parameter. See
doc/design/0046-user-objects-are-the-truth.md.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.checkpoint.placing import place_like
from raysgd.engine.gradients.averaging import average_gradients, average_rows, in_buckets
from raysgd.engine.model.local_tensors import (
    all_gather,
    free_dims,
    local_of,
    make_data_settable,
    make_dtensor,
    place_as,
    place_gradient,
)
from raysgd.errors import UsageError

#: Elements of master weights that are compared at a time, so that there is no second copy of a large one.
_PIECE = 1 << 20


@dataclass
class _Shard:
    """What the optimizer updates of one parameter.

    Attributes:
        parameter: The parameter that the model computes with.
        tensor: What the optimizer updates; the parameter itself if nothing is divided or converted.
        dtype: Of the parameter.
        memory: Of the parameter, as `_memory_of` returns it, of which ``tensor`` is a view; None if it is a copy.
        shown: The gradient that the parameter and the shard have in common for the loop, if they have one.
    """

    parameter: nn.Parameter
    tensor: torch.Tensor
    dtype: torch.dtype
    memory: tuple[Any, ...] | None = None
    shown: torch.Tensor | None = None

    def take(self, own: torch.Tensor) -> None:
        """Make the shard what its parameter holds now.

        Args:
            own: This rank's part of the parameter, in the parameter's memory.

        Raises:
            UsageError: The parameter has another shape or type than before.
        """
        held = local_of(self.tensor)
        if own.shape != held.shape or own.dtype != self.dtype:
            raise UsageError(
                f"a parameter has the shape {tuple(self.parameter.shape)} and the type {own.dtype} now, and this is not what "
                "the optimizer's state was made for: keep shapes and types after engine.compose, or convert the model before it."
            )
        if own.dtype != held.dtype:
            _take_changed(held, own)
        elif own.is_contiguous():
            held.data = own
            self.memory = _memory_of(self.parameter)
        elif self.memory is None:
            held.copy_(own)
        else:  # it was a view until now
            held.data = own.clone(memory_format=torch.contiguous_format)
            self.memory = None

    def show(self) -> None:
        """Let the loop find the gradient of the shard at the parameter."""
        if self.tensor is self.parameter:
            return
        self.parameter.grad, self.shown = None, self.tensor.grad
        if self.shown is not None and self.shown.dtype != self.parameter.dtype:
            if hasattr(self.parameter, "grad_dtype"):
                self.parameter.grad_dtype = None  # it may have a gradient of another type: that of its master weights
            else:  # before torch 2.10 it cannot
                self.parameter.grad, self.shown = self.shown.to(self.parameter.dtype), None
                return
        self.parameter.grad = self.shown

    def hold(self) -> None:
        """Take what the loop has left at the parameter, or else at the shard, as the gradient of the shard."""
        if self.tensor is self.parameter:
            return
        found, self.parameter.grad = self.parameter.grad, None
        if found is not self.shown:
            self.tensor.grad = found if found is None else self._placed(found)
        self.shown = None

    def add(self, local: torch.Tensor) -> None:
        """Add a local tensor to the gradient of the shard."""
        if self.tensor.grad is None:
            self.tensor.grad = place_as(self.tensor, local)
        else:
            local_of(self.tensor.grad).add_(local)

    def _placed(self, gradient: torch.Tensor) -> torch.Tensor:
        if is_dtensor(gradient) == is_dtensor(self.tensor):
            if not is_dtensor(self.tensor):
                return gradient.to(self.tensor.dtype)
            if is_dtensor(gradient) and gradient.device_mesh == self.tensor.device_mesh:
                placed: torch.Tensor = gradient.redistribute(placements=self.tensor.placements).to(self.tensor.dtype)
                return placed
        raise UsageError(
            f"a parameter of shape {tuple(self.parameter.shape)} got a gradient that is not divided as the optimizer's "
            "state is. If it is of another model's loss, as in a GAN, call optimizer.zero_grad() before this pass. In the loop, "
            "change the gradient that is there, as by parameter.grad.mul_(factor), or make the new one of it, as by "
            "torch.zeros_like(parameter.grad)."
        )


@dataclass
class _Bucket:
    """Parameters that communicate together.

    Attributes:
        shards: Their shards.
        places: Where each begins in a rank's row of the bucket, if they are divided.
        row: The elements of such a row: those of the first rank, which has the most.
        num_ready: The parameters whose gradient of this backward pass is there.
    """

    shards: list[_Shard]
    places: list[int] = field(default_factory=list)
    row: int = 0
    num_ready: int = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [each.parameter for each in self.shards]


class GradientHook:
    """A hook of a parameter that counts the gradients of its bucket."""

    def __init__(self, shards: OptimizerShards, number: int) -> None:
        # Python's garbage collector does not find a cycle through a hook of a tensor: the model and its groups would stay.
        self._shards, self._number = weakref.ref(shards), number

    def __call__(self, parameter: torch.Tensor) -> None:
        if (shards := self._shards()) is not None:
            shards.on_gradient(self._number)


class OptimizerShards:
    """The tensors that an optimizer updates in place of a model's parameters; here, all of each parameter.

    Args:
        parameters: Those that the optimizer updates; plain tensors, or DTensors of tensor parallelism.
        group: The ranks over which gradients are averaged; None: something else averages them, such as DDP, or there is
            nothing to average.
        is_early: Whether gradients may be collected during the backward pass.
        whole_on: The ranks that hold plain parameters whole, where others are DTensors: the optimizer finds DTensors only.

    Attributes:
        is_collecting: Whether gradients are collected during the backward pass, as soon as those of a bucket are there. The
            gradients of parameters are freed then.
        tensor_of: The tensors that the optimizer updates, by the parameters that they replace.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        is_early: bool = True,
        whole_on: DeviceMesh | None = None,
    ) -> None:
        self._group, self._is_early, self._whole_on = group, is_early, whole_on
        self._num_collected = 0  # buckets, in this backward pass
        self.is_collecting = False
        self._buckets: list[_Bucket] = []
        self._known: set[torch.Tensor] = set()  # parameters that have a shard
        self.tensor_of: dict[torch.Tensor, torch.Tensor] = {}
        self.add(parameters)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make shards of the parameters that require a gradient and have none yet. All ranks call it, between passes."""
        new = [each for each in parameters if each.requires_grad and each not in self._known]
        self._known.update(new)
        for bucket in in_buckets(new):
            number = len(self._buckets)
            self._buckets.append(self._make_bucket(bucket))
            for parameter in bucket if self._is_early and self._group is not None else []:
                parameter.register_post_accumulate_grad_hook(GradientHook(self, number))  # type: ignore[no-untyped-call]
            shards = self._buckets[-1].shards
            self.tensor_of |= {each.parameter: each.tensor for each in shards if each.tensor is not each.parameter}

    @contextmanager
    def in_place(self, optimizer: Optimizer, *, with_gradients: bool) -> Iterator[None]:
        """Let an optimizer find the shards in place of the parameters, as these are now; afterwards these are what it has made.

        Args:
            optimizer: Its groups have parameters, and its state is by parameter.
            with_gradients: Whether the gradients at the parameters are complete, so that it may use and drop them.

        Raises:
            UsageError: The loop has given a parameter or a gradient another shape or layout.
        """
        self.take_parameters()
        if with_gradients:
            self.hold_gradients()
        _exchange(optimizer, self.tensor_of)
        try:
            yield
        finally:
            _exchange(optimizer, {tensor: parameter for parameter, tensor in self.tensor_of.items()})
        self.update_parameters()
        if with_gradients:
            self.show_gradients()

    def collect_gradients(self) -> None:
        """Add the gradients of the parameters, averaged over the ranks, to those of the shards.

        Call it after a backward pass, on all ranks.
        """
        for bucket in self._buckets[self._num_collected :]:
            self._collect(bucket)
        self._num_collected = 0
        for bucket in self._buckets:
            bucket.num_ready = 0

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Set the parameters to what the optimizer has made of the shards."""
        for bucket in self._buckets:
            self._update(bucket)

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Set the shards to what their parameters hold, as the loop has changed, exchanged or loaded them."""
        for each in self._shards():
            is_same = each.tensor is each.parameter or each.memory == _memory_of(each.parameter)
            if not is_same:
                each.take(self._own(each.parameter))

    def show_gradients(self) -> None:
        """Make the gradients of the shards those of their parameters, for the loop to read and to change."""
        for each in self._shards():
            each.show()

    def hold_gradients(self) -> None:
        """Take the gradients back from the parameters, as the loop has changed them.

        Raises:
            UsageError: The loop has set a gradient that is not divided as the shards are.
        """
        for each in self._shards():
            each.hold()

    def drop_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget the gradients of parameters and of their shards."""
        dropped = set(parameters)
        for each in dropped:
            each.grad = None
        for shard in self._shards():
            if shard.parameter in dropped:
                shard.tensor.grad = shard.shown = None

    def on_gradient(self, number: int) -> None:
        """Count a gradient of a bucket, and collect the buckets whose gradients are all there."""
        if not self.is_collecting:
            return
        self._buckets[number].num_ready += 1
        # In one order on all ranks, whatever the order in which gradients come.
        while self._num_collected < len(self._buckets):
            first = self._buckets[self._num_collected]
            if first.num_ready < len(first.shards):
                break
            self._collect(first)
            self._num_collected += 1

    def _collect(self, bucket: _Bucket) -> None:
        for parameter in bucket.parameters:
            place_gradient(parameter)
        self._reduce(bucket)

    def _shards(self) -> Iterable[_Shard]:
        return (each for bucket in self._buckets for each in bucket.shards)

    # -- what depends on how parameters are divided ----------------------------------------------------------------------

    def _own(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return what this rank updates of a parameter's local tensor, in the parameter's own memory."""
        return local_of(parameter).detach()

    def _make_bucket(self, parameters: Sequence[nn.Parameter]) -> _Bucket:
        return _Bucket([_Shard(each, self._make_tensor(each), each.dtype) for each in parameters])

    def _make_tensor(self, parameter: nn.Parameter) -> torch.Tensor:
        own = self._own(parameter)
        whole_on = None if is_dtensor(parameter) else self._whole_on
        if own.dtype != (dtype := _master_type(own)):
            own = own.to(dtype, copy=True, memory_format=torch.contiguous_format)
        elif whole_on is None:
            return parameter
        if whole_on is None:
            return place_as(parameter, own).requires_grad_()
        from torch.distributed.tensor import Replicate

        return make_dtensor(own, whole_on, [Replicate()], own.shape).requires_grad_()

    def _reduce(self, bucket: _Bucket) -> None:
        if self._group is not None:
            average_gradients(bucket.parameters, self._group)
        for each in bucket.shards:
            if each.tensor is not each.parameter and each.parameter.grad is not None:
                each.add(local_of(each.parameter.grad).to(each.tensor.dtype))
                each.parameter.grad = None

    def _update(self, bucket: _Bucket) -> None:
        for each in bucket.shards:
            if each.tensor is not each.parameter:
                local_of(each.parameter).copy_(local_of(each.tensor))


class DividedShards(OptimizerShards):
    """This rank's rows of each parameter, or of another dim that tensor parallelism leaves; all of a scalar.

    They are DTensors over the data-parallel ranks, and over those of tensor parallelism. In fp32 they are views of the
    parameters, and take no memory.

    Args:
        parameters: Those that the optimizer updates; plain tensors, or DTensors of tensor parallelism.
        mesh: The mesh of all workers.
        is_early: Whether gradients may be collected during the backward pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: DeviceMesh, *, is_early: bool = True) -> None:
        self._replicas = mesh["dp"]
        self._with_tensor = mesh["dp", "tp"]
        self._num_ranks, self._rank = self._replicas.size(), self._replicas.get_local_rank()
        super().__init__(parameters, self._replicas.get_group(), is_early=is_early)
        make_data_settable()

    def _make_bucket(self, parameters: Sequence[nn.Parameter]) -> _Bucket:
        bucket = super()._make_bucket(parameters)
        for parameter in parameters:
            bucket.places.append(bucket.row)
            bucket.row += self._cut(local_of(parameter), parameter, 0).numel()
        return bucket

    def _cut(self, tensor: torch.Tensor, parameter: nn.Parameter, rank: int) -> torch.Tensor:
        """Return a rank's part of a tensor that has the local shape of ``parameter``.

        The first ranks have the most, as torch divides tensors.
        """
        if not tensor.ndim:
            return tensor
        dim = _divided_dim(parameter)
        each = math.ceil(tensor.shape[dim] / self._num_ranks)
        begin, end = (min(tensor.shape[dim], at * each) for at in (rank, rank + 1))
        return tensor.narrow(dim, begin, end - begin)

    def _own(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._cut(local_of(parameter).detach(), parameter, self._rank)

    def _make_tensor(self, parameter: nn.Parameter) -> torch.Tensor:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.placement_types import Placement, _StridedShard

        own = self._own(parameter)
        if own.dtype != (dtype := _master_type(own)) or not own.is_contiguous():
            own = own.to(dtype, copy=True, memory_format=torch.contiguous_format)
        dim = _divided_dim(parameter)
        placement: Placement = Shard(dim) if own.ndim else Replicate()
        if not is_dtensor(parameter):
            is_alone = self._with_tensor.size(1) == 1
            mesh, places = (self._replicas, [placement]) if is_alone else (self._with_tensor, [placement, Replicate()])
            return make_dtensor(own, mesh, places, parameter.shape).requires_grad_()
        (of_tensor,) = parameter.placements
        if own.ndim and of_tensor.is_shard(dim):  # it is divided by tensor parallelism first
            placement = _StridedShard(dim, split_factor=parameter.device_mesh.size())
        return make_dtensor(own, self._with_tensor, [placement, of_tensor], parameter.shape).requires_grad_()

    def _reduce(self, bucket: _Bucket) -> None:
        """Reduce-scatter the gradients of a bucket."""
        first, row = local_of(bucket.parameters[0]), bucket.row
        gradients = [parameter.grad for parameter in bucket.parameters]
        is_used = [gradient is not None for gradient in gradients]
        sent = first.new_zeros(self._num_ranks, row + len(is_used), dtype=_master_type(first))
        self._exchange(bucket, sent, gradients, fills_rows=True)
        for parameter in bucket.parameters:
            parameter.grad = None
        received, are_used = average_rows(sent, is_used, self._replicas.get_group())
        for each, at, is_there in zip(bucket.shards, bucket.places, are_used, strict=True):
            if is_there:
                shape = local_of(each.tensor).shape
                each.add(received[at : at + shape.numel()].view(shape))

    def _update(self, bucket: _Bucket) -> None:
        """All-gather the parameters of a bucket."""
        first = local_of(bucket.parameters[0])
        sent = first.new_empty(bucket.row)
        for each, at in zip(bucket.shards, bucket.places, strict=True):
            local = local_of(each.tensor)
            sent[at : at + local.numel()] = local.reshape(-1)
        received = first.new_empty(self._num_ranks, bucket.row)
        all_gather(received.view(-1), sent, group=self._group)
        self._exchange(bucket, received, bucket.parameters, fills_rows=False)

    @torch.no_grad()
    def _exchange(
        self, bucket: _Bucket, rows: torch.Tensor, tensors: Sequence[torch.Tensor | None], *, fills_rows: bool
    ) -> None:
        """Copy tensors of the bucket's parameters into the rows of the ranks, or the rows into the tensors, in one operation."""
        in_rows, in_tensors = [], []
        for parameter, at, tensor in zip(bucket.parameters, bucket.places, tensors, strict=True):
            if tensor is None:
                continue
            local = local_of(tensor)
            # Each rank has its own value of a scalar, which may differ in rounding: all take the first one.
            for rank in range(self._num_ranks if fills_rows or local.ndim else 1):
                in_tensors.append(part := self._cut(local, parameter, rank))
                in_rows.append(rows[rank, at : at + part.numel()].view(part.shape))
        if in_rows:
            torch._foreach_copy_(*((in_rows, in_tensors) if fills_rows else (in_tensors, in_rows)))


def _memory_of(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return what differs if a parameter has got other memory, another layout or another type."""
    local = local_of(parameter)
    return local.data_ptr(), local.stride(), local.shape, local.dtype


def _take_changed(master: torch.Tensor, own: torch.Tensor) -> None:
    """Set elements of a master weight to those of its parameter, in a smaller type, where this is not its rounded value."""
    pieces = torch.split(master.view(-1), _PIECE), torch.split(own.reshape(-1), _PIECE)
    for held, given in zip(*pieces, strict=True):
        rounded = held.to(given.dtype)
        if given.device.type != "cpu" or not _has_same_bits(rounded, given):  # a GPU is faster than the host that asks
            held.copy_(torch.where(rounded == given, held, given))


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two flat tensors of two bytes per element are equal."""
    is_aligned = not any(int(each) % 4 for each in (one.numel(), one.storage_offset(), other.storage_offset()))
    dtype = torch.int64 if is_aligned else torch.int16
    return torch.equal(one.view(dtype), other.view(dtype))


def _exchange(optimizer: Optimizer, others: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Put other tensors in the place of those that an optimizer updates, in its groups and its state."""
    if not others:
        return
    for group in optimizer.param_groups:
        group["params"] = [others.get(each, each) for each in group["params"]]
    moved = {others.get(each, each): value for each, value in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(moved)
    for each, state in moved.items():
        if not is_dtensor(each) or not isinstance(state, dict):
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and not is_dtensor(value):  # set by the loop, as to reset momenta
                state[key] = place_like(key, value, each, f"the optimizer's {key}")


def _master_type(tensor: torch.Tensor) -> torch.dtype:
    """Return the type in which the optimizer updates a tensor: fp32 in place of smaller ones."""
    return torch.float32 if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor.dtype


def _divided_dim(parameter: nn.Parameter) -> int:
    """Return the dim along which data-parallel ranks divide a parameter: one that tensor parallelism leaves, if possible."""
    if not is_dtensor(parameter) or parameter.ndim < 2:
        return 0
    return next(iter(free_dims(parameter)), 0)
