"""Averages gradients so that the result does not depend on how DDP lays out its buckets. Worker side.

DDP's all-reduce adds the ranks' values of an element in an order that depends on the element's place in its bucket, and
DDP rebuilds its buckets after the first step. A resumed run begins with the first layout again, so with three or more
ranks it differs in the last bits from an uninterrupted run. (Two values have the same sum in either order.)

`reduce_in_rank_order` is a DDP communication hook that adds every element in the order rank 0, 1, 2, ... Each rank gets
all ranks' values of its chunk of the bucket, adds them up in rank order, and sends the result to all. It sends as many
bytes as a ring all-reduce, but half of them only after the last bucket of the backward pass is ready. Because of that cost
only ``deterministic=True`` uses it.

Precision: the sum is divided by the number of ranks at the end (DDP divides first). Elements are sent in the bucket's own
type, as with DDP. float16 and bfloat16 are added up and divided in float32 and rounded once, so the sum neither overflows
nor loses bits, whereas DDP adds in the half type.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes, not with strings.

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from raysgd.session.progress import Stopwatch

_ACCUMULATED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
# Prefer the new name: torch 2.13 warns about the old one.
all_gather_into_one = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RankOrder:
    """The hook's state: the reductions of the current backward pass that are not complete.

    It must not refer to the DDP module: DDP's C++ part holds this object, in a cycle that the garbage collector cannot see.

    Args:
        group: The process group to average over.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._pending: list[_Reduction] = []

    def start(self, bucket: torch.Tensor, *, is_first: bool) -> torch.futures.Future[torch.Tensor]:
        """Start to send the chunks of a bucket to their ranks."""
        if is_first:
            self._pending.clear()  # left by a backward pass that failed
        kind = _SparseReduction if bucket.is_sparse else _DenseReduction
        self._pending.append(kind(bucket, self.group))
        return self._pending[-1].future

    def finish(self) -> None:
        """Complete all buckets.

        All in this thread, not in callbacks of the collectives: these run as data arrives, so ranks would start the second
        collectives in different orders.
        """
        pending, self._pending = self._pending, []
        for reduction in pending:
            reduction.add()
        for reduction in pending:
            reduction.deliver()


def reduce_in_rank_order(state: RankOrder, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a bucket over the ranks in rank order; a communication hook of DDP. See the module's docstring.

    Runs in autograd's thread. Every rank calls it for the buckets of a backward pass in the order of their index. The
    collective of a bucket overlaps with the backward pass; all futures complete in the call for the last bucket.

    Args:
        state: One object for all buckets of a module.
        bucket: Gradients, not divided by the number of ranks.

    Returns:
        A future of the averages, of the bucket's shape and type.
    """
    future = state.start(bucket.buffer(), is_first=bucket.index() == 0)
    if bucket.is_last():
        state.finish()
    return future


def use_rank_order(model: DistributedDataParallel) -> None:
    """Register the hook with a DDP module that has not run a backward pass yet; see `RankOrder`."""
    model.register_comm_hook(RankOrder(model.process_group), reduce_in_rank_order)


def mean_in_row_order(rows: torch.Tensor) -> torch.Tensor:
    """Average the rows of a [num_ranks, chunk] tensor, adding from the first row to the last; may overwrite ``rows``."""
    dtype = _ACCUMULATED_IN.get(rows.dtype, rows.dtype)
    total = rows[0].to(dtype)
    for row in rows[1:]:
        total += row
    return total.div_(len(rows)).to(rows.dtype)


class _Reduction(Protocol):
    """The reduction of one bucket. The constructor starts it; every rank then calls ``add`` and ``deliver`` once each."""

    future: torch.futures.Future[torch.Tensor]

    def add(self) -> None: ...

    def deliver(self) -> None: ...


class _DenseReduction:
    """An all-to-all and an all-gather of equal chunks, of which the last is padded with zeros."""

    def __init__(self, bucket: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.future = _future_of(bucket)
        self._group = group
        self._is_complex = bucket.is_complex()
        flat = torch.view_as_real(bucket).view(-1) if self._is_complex else bucket
        self._num_elements = flat.numel()
        padding = -flat.numel() % group.size()
        # Without padding the bucket itself is sent, and later overwritten by the result.
        self._values = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
        self._received = torch.empty_like(self._values)
        self._work: Any = dist.all_to_all_single(self._received, self._values, group=group, async_op=True)

    def add(self) -> None:
        self._work.wait()
        self._mean = mean_in_row_order(self._received.view(self._group.size(), -1))
        self._work = all_gather_into_one(self._values, self._mean, group=self._group, async_op=True)

    def deliver(self) -> None:
        self._work.wait()
        flat = self._values[: self._num_elements]
        self.future.set_result(torch.view_as_complex(flat.view(-1, 2)) if self._is_complex else flat)


class _SparseReduction:
    """The gradient of a sparse embedding, whose all-reduce gathers all ranks' rows and adds them in rank order anyway."""

    def __init__(self, bucket: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.future = _future_of(bucket)
        self._bucket = bucket
        self._num_ranks = group.size()
        self._work: Any = dist.all_reduce(bucket, group=group, async_op=True)

    def add(self) -> None:
        self._work.wait()

    def deliver(self) -> None:
        # Use the work's own result: a sparse tensor cannot be filled in place when its number of rows changes.
        self.future.set_result(self._work.result()[0].div_(self._num_ranks))


def _future_of(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Make a future that synchronizes the streams of the tensor's device, if it has any."""
    return torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)


def time_waiting(model: DistributedDataParallel, waiting: Stopwatch) -> None:
    """Add to ``waiting`` the time that backward passes of ``model`` wait for other ranks."""
    hook = _BackwardHook(waiting)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not (model.find_unused_parameters or model.static_graph):
        parameters = parameters[:1]  # each parameter gets a gradient in each pass, otherwise DDP raises
    for parameter in parameters:
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]


class _BackwardHook:
    """A parameter's hook: times what DDP does at the end of a backward pass, after autograd has finished."""

    #: The last timed pass, of all hooks: several models may take part in one pass, which waits once.
    _timed = -1

    def __init__(self, waiting: Stopwatch) -> None:
        self._waiting = waiting

    def __call__(self, gradient: torch.Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != _BackwardHook._timed:
            _BackwardHook._timed = backward
            call_at_the_end(self._begin)

    def _begin(self) -> None:
        began = time.monotonic()
        call_at_the_end(lambda: self._waiting.add(time.monotonic() - began))


def call_at_the_end(callback: Any) -> None:
    """Call ``callback`` at the end of the current backward pass."""
    Variable._execution_engine.queue_callback(callback)
