"""What an optimizer updates in place of the model's parameters: its shards of them, and master weights. Worker side.

`OptimizerShards` holds whole tensors: the parameters themselves, or fp32 master weights of those in a smaller type (mixed
precision training, Micikevicius et al., arXiv 1710.03740). `DividedShards` holds this rank's shard of each, by rows as a rule:
gradients come in by reduce-scatter, and an all-gather brings the parameters up to date, as in the stages "P_os" and "P_os+g" of
ZeRO (Rajbhandari et al., arXiv 1910.02054).

Between a backward pass and the optimizer's step, the gradient of a shard is also that of its parameter: what the loop reads and
changes there is what the optimizer uses. See doc/design/0042-gradients-of-the-loop.md.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.engine.local_tensors import all_gather, local_of, make_dtensor, place_as, reduce_scatter
from raysgd.errors import UsageError

#: Bytes of the parameters that communicate together, as in DDP.
BUCKET_BYTES = 25 << 20


@dataclass
class _Shard:
    """What the optimizer updates of one parameter.

    Attributes:
        parameter: The parameter that the model computes with.
        tensor: What the optimizer updates; the parameter itself if nothing is divided or converted.
        shown: The gradient that the parameter and the shard have in common for the loop, if they have one.
    """

    parameter: nn.Parameter
    tensor: torch.Tensor
    shown: torch.Tensor | None = None

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


class OptimizerShards:
    """The tensors that an optimizer updates in place of a model's parameters; here, all of each parameter.

    Args:
        parameters: Those that the optimizer updates; plain tensors, or DTensors of tensor parallelism.
        group: The ranks over which gradients are averaged; None: something else averages them, such as DDP, or there is
            nothing to average.
        is_early: Whether gradients may be collected during the backward pass.

    Attributes:
        is_collecting: Whether gradients are collected during the backward pass, as soon as those of a bucket are there. The
            gradients of parameters are freed then.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, is_early: bool = True
    ) -> None:
        self._group = group
        self._num_collected = 0  # buckets, in this backward pass
        self.is_collecting = False
        self._buckets = [
            _Bucket([_Shard(each, self._make_tensor(each)) for each in bucket]) for bucket in in_buckets(parameters)
        ]
        if is_early and group is not None:
            for number, bucket in enumerate(self._buckets):
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(_make_hook(weakref.ref(self), number))  # type: ignore[no-untyped-call]

    @property
    def tensor_of(self) -> dict[nn.Parameter, torch.Tensor]:
        """The tensors that the optimizer updates, by their parameters."""
        return {each.parameter: each.tensor for each in self._shards()}

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
        """Set the shards to what their parameters hold, after these were loaded."""
        for each in self._shards():
            if each.tensor is not each.parameter:
                local_of(each.tensor).copy_(self._own(each.parameter))

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

    def drop_gradients(self) -> None:
        """Forget the gradients of the parameters and of the shards."""
        for each in self._shards():
            each.parameter.grad = each.tensor.grad = each.shown = None

    def _on_gradient(self, number: int) -> None:
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
            _place_gradient(parameter)
        self._reduce(bucket)

    def _shards(self) -> Iterable[_Shard]:
        return (each for bucket in self._buckets for each in bucket.shards)

    # -- what depends on how parameters are divided ----------------------------------------------------------------------

    def _own(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return what this rank updates of a parameter's local tensor, in the parameter's own memory."""
        return local_of(parameter).detach()

    def _make_tensor(self, parameter: nn.Parameter) -> torch.Tensor:
        own = self._own(parameter)
        if own.dtype == (dtype := _master_type(own)):
            return parameter
        return place_as(parameter, own.to(dtype, copy=True, memory_format=torch.contiguous_format)).requires_grad_()

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
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                bucket.places.append(bucket.row)
                bucket.row += self._cut(local_of(parameter), parameter, 0).numel()

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
            return make_dtensor(own, self._replicas, [placement], parameter.shape).requires_grad_()
        (of_tensor,) = parameter.placements
        if own.ndim and of_tensor.is_shard(dim):  # it is divided by tensor parallelism first
            placement = _StridedShard(dim, split_factor=parameter.device_mesh.size())
        return make_dtensor(own, self._with_tensor, [placement, of_tensor], parameter.shape).requires_grad_()

    def _reduce(self, bucket: _Bucket) -> None:
        """Reduce-scatter the gradients of a bucket.

        Each rank's row ends with which gradients there are: their sum says how many ranks have one.
        """
        first, row = local_of(bucket.parameters[0]), bucket.row
        gradients = [parameter.grad for parameter in bucket.parameters]
        is_used = [gradient is not None for gradient in gradients]
        sent = first.new_zeros(self._num_ranks, row + len(is_used), dtype=_master_type(first))
        sent[:, row:] = _flags(is_used, sent.dtype, sent.device)
        self._exchange(bucket, sent, gradients, fills_rows=True)
        for parameter in bucket.parameters:
            parameter.grad = None
        received = torch.empty_like(sent[0])
        reduce_scatter(received, sent.view(-1), group=self._group)
        are_used = _are_used(is_used, received[row:])
        received /= self._num_ranks
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


def _make_hook(shards: weakref.ref[OptimizerShards], number: int) -> Callable[[torch.Tensor], None]:
    # Python's garbage collector does not find a cycle through a hook of a tensor: the model and its groups would stay.
    def on_gradient(_: torch.Tensor) -> None:
        if (found := shards()) is not None:
            found._on_gradient(number)

    return on_gradient


def _place_gradient(parameter: nn.Parameter) -> None:
    """Distribute a gradient as its parameter is; that of torch's ``SequenceParallel`` is a part of the sum on each rank."""
    gradient = parameter.grad
    if is_dtensor(parameter) and is_dtensor(gradient) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _master_type(tensor: torch.Tensor) -> torch.dtype:
    """Return the type in which the optimizer updates a tensor: fp32 in place of smaller ones."""
    return torch.float32 if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor.dtype


def _flags(is_used: list[bool], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if all(is_used):
        return torch.ones(len(is_used), dtype=dtype, device=device)  # no copy to the device
    return torch.tensor(is_used, dtype=dtype, device=device)


def _are_used(is_used: list[bool], num_ranks_using: torch.Tensor) -> list[bool]:
    """Return which parameters any rank has used; the device is asked only if this rank has not used them all."""
    return is_used if all(is_used) else [number > 0 for number in num_ranks_using.tolist()]


def _divided_dim(parameter: nn.Parameter) -> int:
    """Return the dim along which data-parallel ranks divide a parameter: one that tensor parallelism leaves, if possible."""
    if not is_dtensor(parameter) or parameter.ndim < 2:
        return 0
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    taken = {place.dim for place in parameter.placements if isinstance(place, (Shard, _StridedShard))}
    return next((dim for dim in range(parameter.ndim) if dim not in taken), 0)
