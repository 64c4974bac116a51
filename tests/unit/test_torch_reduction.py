"""Reduction in rank order within one process; tests/integration/test_torch_processes.py runs it with several."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysgd.torch.reduction import RankOrder, mean_in_row_order, reduce_in_rank_order, use_rank_order
from support.groups import group_of_one


@pytest.fixture
def state() -> Iterator[RankOrder]:
    with group_of_one():
        assert dist.group.WORLD is not None
        yield RankOrder(dist.group.WORLD)


def bucket(values: torch.Tensor, index: int, is_last: bool) -> Any:
    return SimpleNamespace(buffer=lambda: values, index=lambda: index, is_last=lambda: is_last)


def test_rows_are_added_from_first_to_last() -> None:
    rows = torch.rand(5, 1000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-2, 3).unsqueeze(1)
    expected = rows[0].clone()
    for row in rows[1:]:
        expected += row
    expected /= 5
    other_way = rows.flip(0).clone()
    assert torch.equal(mean_in_row_order(rows), expected)
    assert not torch.equal(mean_in_row_order(other_way), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_added_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    rows = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    mean = mean_in_row_order(rows.clone())
    assert mean.dtype == dtype
    exact = rows.double().mean(0)
    # Half a unit in the last place, plus a little for the additions in float32.
    assert torch.all((mean.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps * 0.501 + 1e-6)


def test_sum_larger_than_float16_does_not_overflow() -> None:
    assert mean_in_row_order(torch.full((4, 1), 60000.0, dtype=torch.float16)).item() == 60000


def test_buckets_complete_with_the_last_one(state: RankOrder) -> None:
    first = reduce_in_rank_order(state, bucket(torch.tensor([1.0, 2.0]), 0, False))
    assert not first.done()
    last = reduce_in_rank_order(state, bucket(torch.tensor([3.0]), 1, True))
    assert (first.wait().tolist(), last.wait().tolist()) == ([1, 2], [3])


def test_buckets_of_a_failed_backward_pass_are_dropped(state: RankOrder) -> None:
    stale = reduce_in_rank_order(state, bucket(torch.tensor([1.0]), 0, False))
    only = reduce_in_rank_order(state, bucket(torch.tensor([2.0]), 0, True))
    assert only.wait().tolist() == [2]
    assert not stale.done()


def test_deleted_model_releases_the_hook(state: RankOrder) -> None:
    """A reference to the process group keeps its sockets open; a cycle through DDP's C++ part would keep them forever."""
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    use_rank_order(model)
    model(torch.ones(1, 2)).sum().backward()
    held = [weakref.ref(model), weakref.ref(model._comm_hooks[0][1])]
    del model
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_complex_gradients_are_averaged(state: RankOrder) -> None:
    values = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    assert torch.equal(reduce_in_rank_order(state, bucket(values.clone(), 0, True)).wait(), values)


def test_sparse_gradients_are_averaged(state: RankOrder) -> None:
    values = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), torch.ones(3, 2), (4, 2), check_invariants=True)
    found = cast(Any, reduce_in_rank_order(state, bucket(values.clone(), 0, True)).wait())
    assert torch.equal(found.to_dense(), values.to_dense())
