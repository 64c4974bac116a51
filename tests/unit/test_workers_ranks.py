"""Workers get ranks in the order frameworks expect, and see the right GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.backends.base import Member
from raysgd.workers.group.ranks import assign_ranks, assign_visible_gpus, close_gaps, make_members
from raysgd.workers.orders import WorkerInfo


def worker(node: str, *gpus: int | str) -> WorkerInfo:
    return WorkerInfo(node, f"address of {node}", node, 1, gpus)


def members_on(nodes: Sequence[str], gpus_per_worker: float = 0.0) -> list[Member]:
    return make_members([worker(node) for node in nodes], gpus_per_worker)


def test_workers_of_a_node_have_consecutive_ranks() -> None:
    assert assign_ranks(["b", "a", "b", "a", "c"]) == [0, 2, 1, 3, 4]


def test_local_ranks_count_the_workers_of_a_node() -> None:
    members = members_on(["b", "b", "a", "c", "a"])  # the last one joined later
    assert [(m.rank, m.node_rank, m.local_rank, m.local_world_size) for m in members] == [
        (0, 0, 0, 2),
        (1, 0, 1, 2),
        (2, 1, 0, 2),
        (3, 2, 0, 1),
        (4, 1, 1, 2),
    ]
    assert [member.node_ip for member in members] == [f"address of {node}" for node in "bbaca"]


def test_single_worker_is_a_world_of_one() -> None:
    assert members_on(["a"]) == [Member(0, 1, 0, 1, 0, "", "address of a", has_gpu=False)]
    assert assign_ranks([]) == members_on([]) == []


@pytest.mark.parametrize(("gpus", "has_gpu", "shares_gpu"), [(0, False, False), (0.5, True, True), (2, True, False)])
def test_members_share_a_gpu_only_if_each_was_given_a_fraction(gpus: float, has_gpu: bool, shares_gpu: bool) -> None:
    (member,) = members_on(["a"], gpus)
    assert (member.has_gpu, member.shares_gpu) == (has_gpu, shares_gpu)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_ranks_have_no_gaps_for_any_nodes(nodes: list[str]) -> None:
    order = assign_ranks(nodes)
    assert sorted(order) == list(range(len(nodes)))
    assert order[0] == 0  # rank 0 stays where the group begins
    nodes = [nodes[index] for index in order]
    members = members_on(nodes)
    assert [member.rank for member in members] == list(range(len(nodes)))
    assert {member.world_size for member in members} == {len(nodes)}
    seen: Counter[str] = Counter()
    node_ranks: dict[str, int] = {}
    for member, node in zip(members, nodes, strict=True):
        assert member.local_rank == seen[node]
        seen[node] += 1
        assert member.local_world_size == nodes.count(node)
        assert node_ranks.setdefault(node, member.node_rank) == member.node_rank
    assert sorted(node_ranks.values()) == list(range(len(set(nodes))))
    assert [node for i, node in enumerate(nodes) if i == 0 or nodes[i - 1] != node] == list(dict.fromkeys(nodes))


@pytest.mark.parametrize("shared", [False, True])
def test_device_index_points_to_the_workers_own_first_gpu(shared: bool) -> None:
    workers = [worker("a", 2), worker("a", 0), worker("b", 1), worker("b", 3, 2)]
    seen = assign_visible_gpus(workers, shows_all=shared)
    assert [gpus[index] for gpus, index in seen] == [2, 0, 1, 3]


def test_workers_of_a_node_see_each_others_gpus_only_if_asked_for() -> None:
    workers = [worker("a", 2), worker("a", 0), worker("b", 1)]
    assert assign_visible_gpus(workers, shows_all=True) == [((0, 2), 1), ((0, 2), 0), ((1,), 0)]
    assert assign_visible_gpus(workers, shows_all=False) == [((2,), 0), ((0,), 0), ((1,), 0)]


def test_workers_with_mig_devices_see_their_own_alone() -> None:
    """CUDA uses only the first MIG device that a process sees."""
    workers = [worker("a", "MIG-4f6b"), worker("a", "MIG-0a1c"), worker("b", "GPU-4f6b"), worker("b", "GPU-0a1c")]
    seen = assign_visible_gpus(workers, shows_all=True)
    both = ("GPU-0a1c", "GPU-4f6b")
    assert seen == [(("MIG-4f6b",), 0), (("MIG-0a1c",), 0), (both, 1), (both, 0)]


@pytest.mark.parametrize(("names", "shares_gpu"), [(("MIG-4f6b", "MIG-0a1c"), True), (("GPU-4f6b", "GPU-0a1c"), False)])
def test_mig_devices_count_as_one_shared_gpu(names: tuple[str, ...], shares_gpu: bool) -> None:
    """nccl has no members on MIG devices of one GPU."""
    members = make_members([worker("a", name) for name in names], gpus_per_worker=1)
    assert [member.shares_gpu for member in members] == [shares_gpu] * 2


def test_workers_with_parts_of_the_same_gpu_see_it_once() -> None:
    assert assign_visible_gpus([worker("a", 0), worker("a", 0)], shows_all=True) == [((0,), 0), ((0,), 0)]


def test_workers_without_gpus_see_none() -> None:
    assert assign_visible_gpus([worker("a"), worker("a")], shows_all=True) == [((), 0), ((), 0)]


@given(alive=st.lists(st.booleans(), min_size=1, max_size=8), min_size=st.integers(1, 8))
def test_shrinking_group_keeps_its_order_and_its_minimum_size(alive: list[bool], min_size: int) -> None:
    members = [str(rank) if is_alive else None for rank, is_alive in enumerate(alive)]
    kept, surplus = close_gaps(members, min(min_size, len(alive)))
    assert [member for member in kept if member is not None] == [member for member in members if member is not None]
    assert len(kept) == max(sum(alive), min(min_size, len(alive))) and not surplus


@given(
    alive=st.lists(st.booleans(), min_size=1, max_size=12),
    num_min_replicas=st.integers(1, 3),
    multiple=st.integers(1, 4),
)
def test_shrinking_group_holds_the_most_whole_replicas_that_are_left(
    alive: list[bool], num_min_replicas: int, multiple: int
) -> None:
    members = [str(rank) if is_alive else None for rank, is_alive in enumerate(alive)]
    min_size = num_min_replicas * multiple
    kept, surplus = close_gaps(members + [None] * min_size, min_size, multiple)
    survivors = [member for member in members if member is not None]
    assert [member for member in kept if member is not None] + surplus == survivors
    assert len(kept) == max(min_size, len(survivors) // multiple * multiple)
    assert not surplus or None not in kept
