"""Sends and receives are recorded, and those that gloo cannot make are refused. Groups and tensors are fakes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import GroupMember, distributed_c10d

from raysgd.backends import torch_transfers
from raysgd.errors import UsageError


class FakeGroup:
    group_name, group_desc = "0", "undefined"

    def __init__(self, library: str) -> None:
        self.library = library
        self.made: list[Any] = []

    def rank(self) -> int:
        return 0

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self.library)


class Work:
    """A reference to it can be weak, as to those of torch."""

    def is_completed(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    torch_transfers.forget_all()
    yield
    torch_transfers.forget_all()


def send(group: FakeGroup, tensors: Any, *args: Any, **kwargs: Any) -> Work:
    group.made.append((tensors, args, kwargs))
    return Work()


ON_GPU = SimpleNamespace(is_cpu=False, device=torch.device("cuda", 0))


def test_tensor_of_a_gpu_is_refused_for_gloo_before_it_ends_the_process() -> None:
    group = FakeGroup("gloo")
    recorded = torch_transfers._recorded_transfer("send", send)
    with pytest.raises(UsageError, match=r"gloo cannot send or receive a tensor on cuda:0: send tensor\.cpu\(\)"):
        recorded(group, [ON_GPU], 1, 0)
    assert group.made == []


def test_transfers_of_nccl_are_left_to_torchs_own_recorder() -> None:
    group = FakeGroup("nccl")
    assert isinstance(torch_transfers._recorded_transfer("send", send)(group, [ON_GPU], 1, 0), Work)
    assert len(group.made) == 1 and torch_transfers._transfers == {}


@pytest.mark.parametrize(("args", "kwargs"), [((1, 3), {}), ((), {"dstRank": 1, "tag": 3})])
def test_sends_are_counted_for_each_rank_and_tag(args: tuple[int, ...], kwargs: dict[str, int]) -> None:
    group, tensor = FakeGroup("gloo"), torch.ones(2)
    recorded = torch_transfers._recorded_transfer("send", send)
    works = [recorded(group, [tensor], *args, **kwargs) for _ in range(3)]
    recorded(group, [tensor], 2, 3)
    assert group.made[0] == ([tensor], args, kwargs) and len(works) == 3
    assert {key: last[0] for key, last in torch_transfers._transfers.items()} == {
        ("0", "send", 1, 3): 3,
        ("0", "send", 2, 3): 1,
    }
    (pending, dropped) = (last[2]() for last in torch_transfers._transfers.values())
    assert pending is works[-1] and dropped is None, "a record keeps no tensors alive"


class Groups:
    """The groups of a process that is not in all groups, as torch lists them."""

    pg_group_ranks: ClassVar[dict[Any, Any]] = {}


def test_process_that_is_not_in_all_groups_reads_its_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeGroup("gloo")
    monkeypatch.setattr(distributed_c10d, "_world", Groups())
    monkeypatch.setattr(Groups, "pg_group_ranks", {GroupMember.NON_GROUP_MEMBER: 0, group: {0: 0, 1: 1}})
    work = torch_transfers._recorded_transfer("send", send)(group, [torch.ones(2)], 1, 0)
    (transfer,) = torch_transfers.read_transfers()
    assert transfer.place == "send 1 of 0 from rank 0 to rank 1" and work is not None
