"""Gradient averages whose bits do not depend on how DDP lays out its buckets. Worker side.

DDP's all-reduce adds the ranks' values of an element in an order that depends on where the element lies in its bucket,
and DDP lays out the buckets anew after the first step. With three or more ranks a run that was resumed, and so begins
with the first layout again, therefore differs in the last bits from one that was not interrupted. (Two values have the
same sum in either order.) `reduce_in_rank_order` is a DDP communication hook that fixes the order of every element to
rank 0, 1, 2, ..., whatever the layout: each rank gets everyone's values of its own share of the bucket, adds them up in
rank order, and gives the result to all. It sends as many bytes as a ring all-reduce, half of them only after the last
bucket of the backward pass is ready; that is the price, and why only ``deterministic=True`` uses it.

Numbers: the sum is divided by the number of ranks at the end (DDP divides first). Elements travel, and come back, in the
bucket's own type as with DDP; float16 and bfloat16 are added up and divided in float32 and rounded once, so their sum
neither overflows nor loses bits on the way, where DDP adds in the half type.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes, not with strings.

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_ACCUMULATED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
# The new name first: torch 2.13 warns at the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Reduction(Protocol):
    """One bucket on its way. The constructor starts it; every rank then calls ``add`` and ``deliver``, once each."""

    future: torch.futures.Future[torch.Tensor]

    def add(self) -> None: ...

    def deliver(self) -> None: ...


class RankOrder:
    """The hook's state: the buckets of the current backward pass that are on their way.

    It must not refer to the DDP module: DDP's C++ part holds it, and the garbage collector does not see that cycle.

    Args:
        waiting: Entered while buckets are completed.

    Attributes:
        group: The process group to average over.
    """

    def __init__(self, group: dist.ProcessGroup, waiting: AbstractContextManager[Any] | None = None) -> None:
        self.group = group
        self._waiting = waiting or nullcontext()
        self._pending: list[_Reduction] = []

    def start(self, bucket: torch.Tensor, *, is_first: bool) -> torch.futures.Future[torch.Tensor]:
        """Send a bucket's shares to their ranks, without waiting."""
        if is_first:
            self._pending.clear()  # of a backward pass that failed half-way
        kind = _SparseReduction if bucket.is_sparse else _DenseReduction
        self._pending.append(kind(bucket, self.group))
        return self._pending[-1].future

    def finish(self) -> None:
        """Complete all buckets.

        In one go and in this thread, not in callbacks of the collectives: those run as data arrives, so ranks would
        start the second collectives in different orders.
        """
        pending, self._pending = self._pending, []
        with self._waiting:
            for reduction in pending:
                reduction.add()
            for reduction in pending:
                reduction.deliver()


def reduce_in_rank_order(state: RankOrder, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a bucket over the ranks in rank order; a communication hook for DDP. See the module's docstring.

    Runs in autograd's thread, for the buckets of a backward pass in the order of their index, on every rank alike. The
    collective of a bucket goes on beside the backward pass; the futures of all complete in the call for the last.

    Args:
        state: The same for all buckets of a module.
        bucket: Gradients, not divided by the number of ranks.

    Returns:
        A future of the averages, of the bucket's shape and type.
    """
    future = state.start(bucket.buffer(), is_first=bucket.index() == 0)
    if bucket.is_last():
        state.finish()
    return future


def use_rank_order(model: DistributedDataParallel, waiting: AbstractContextManager[Any] | None = None) -> None:
    """Register the hook with a DDP module that has run no backward pass yet; see `RankOrder`."""
    model.register_comm_hook(RankOrder(model.process_group, waiting), reduce_in_rank_order)


def mean_in_row_order(rows: torch.Tensor) -> torch.Tensor:
    """The mean over the rows of a [N, chunk] tensor, added up from the first row to the last; may overwrite ``rows``."""
    dtype = _ACCUMULATED_IN.get(rows.dtype, rows.dtype)
    total = rows[0].to(dtype)
    for row in rows[1:]:
        total += row
    return total.div_(len(rows)).to(rows.dtype)


class _DenseReduction:
    """Shares out, sums, sums back: an all-to-all and an all-gather of equal chunks, the last one padded with zeros."""

    def __init__(self, bucket: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.future = _future_of(bucket)
        self._group = group
        self._is_complex = bucket.is_complex()
        flat = torch.view_as_real(bucket).view(-1) if self._is_complex else bucket
        self._num_elements = flat.numel()
        padding = -flat.numel() % group.size()
        # Without padding the bucket itself is sent, and later written to.
        self._values = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
        self._received = torch.empty_like(self._values)
        self._work: Any = dist.all_to_all_single(self._received, self._values, group=group, async_op=True)

    def add(self) -> None:
        self._work.wait()
        self._mine = mean_in_row_order(self._received.view(self._group.size(), -1))
        self._work = _all_gather(self._values, self._mine, group=self._group, async_op=True)

    def deliver(self) -> None:
        self._work.wait()
        flat = self._values[: self._num_elements]
        self.future.set_result(torch.view_as_complex(flat.view(-1, 2)) if self._is_complex else flat)


class _SparseReduction:
    """The gradient of a sparse embedding. Its all-reduce gathers all ranks' rows and adds them in rank order already."""

    def __init__(self, bucket: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.future = _future_of(bucket)
        self._bucket = bucket
        self._num_ranks = group.size()
        self._work: Any = dist.all_reduce(bucket, group=group, async_op=True)

    def add(self) -> None:
        self._work.wait()

    def deliver(self) -> None:
        # The work's own result: a sparse tensor cannot be filled in place where the number of its rows changes.
        self.future.set_result(self._work.result()[0].div_(self._num_ranks))


def _future_of(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that orders the streams of the tensor's device, if it has any."""
    return torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
