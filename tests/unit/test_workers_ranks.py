"""Who gets which rank, and who sees which GPUs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.session.base import Identity
from raysgd.workers.orders import WorkerInfo
from raysgd.workers.ranks import assign_ranks, identify, oldest_first, shrunk, visible_gpus


def test_workers_of_one_node_are_next_to_each_other() -> None:
    assert assign_ranks(["b", "a", "b", "a", "c"]) == [0, 2, 1, 3, 4]


def test_a_worker_is_told_where_it_stands_on_its_node() -> None:
    identities = identify(["b", "b", "a", "c", "a"])  # the last one took part later
    assert [(i.world_rank, i.node_rank, i.local_rank, i.local_world_size) for i in identities] == [
        (0, 0, 0, 2),
        (1, 0, 1, 2),
        (2, 1, 0, 2),
        (3, 2, 0, 1),
        (4, 1, 1, 2),
    ]


def test_a_lone_worker_is_a_world_of_one() -> None:
    assert identify(["a"]) == [Identity()]
    assert assign_ranks([]) == identify([]) == []


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_whatever_the_nodes_ranks_are_as_frameworks_want_them(nodes: list[str]) -> None:
    order = assign_ranks(nodes)
    assert sorted(order) == list(range(len(nodes)))
    assert order[0] == 0  # rank 0 stays where the group begins
    nodes = [nodes[index] for index in order]
    identities = identify(nodes)
    by_rank = list(zip(identities, nodes, strict=True))
    assert [identity.world_rank for identity in identities] == list(range(len(nodes)))
    assert {identity.world_size for identity in identities} == {len(nodes)}
    seen: Counter[str] = Counter()
    node_ranks: dict[str, int] = {}
    for identity, node in by_rank:
        assert identity.local_rank == seen[node]
        seen[node] += 1
        assert identity.local_world_size == nodes.count(node)
        assert node_ranks.setdefault(node, identity.node_rank) == identity.node_rank
    assert sorted(node_ranks.values()) == list(range(len(set(nodes))))
    assert [node for i, node in enumerate(nodes) if i == 0 or nodes[i - 1] != node] == list(dict.fromkeys(nodes))


def worker(node: str, *gpus: int) -> WorkerInfo:
    return WorkerInfo(node, "10.0.0.1", node, 1, gpus)


@pytest.mark.parametrize("shared", [False, True])
def test_a_worker_finds_its_own_first_gpu_among_those_it_sees(shared: bool) -> None:
    workers = [worker("a", 2), worker("a", 0), worker("b", 1), worker("b", 3, 2)]
    seen = visible_gpus(workers, shared=shared)
    assert [gpus[index] for gpus, index in seen] == [2, 0, 1, 3]


def test_workers_of_a_node_see_each_others_gpus_only_where_they_share_them() -> None:
    workers = [worker("a", 2), worker("a", 0), worker("b", 1)]
    assert visible_gpus(workers, shared=True) == [((0, 2), 1), ((0, 2), 0), ((1,), 0)]
    assert visible_gpus(workers, shared=False) == [((2,), 0), ((0,), 0), ((1,), 0)]


def test_workers_that_hold_a_part_of_the_same_gpu_see_it_once() -> None:
    assert visible_gpus([worker("a", 0), worker("a", 0)], shared=True) == [((0,), 0), ((0,), 0)]


def test_workers_without_gpus_see_none() -> None:
    assert visible_gpus([worker("a"), worker("a")], shared=True) == [((), 0), ((), 0)]


@given(alive=st.lists(st.booleans(), min_size=1, max_size=8), least=st.integers(1, 8))
def test_a_group_that_shrinks_keeps_its_order_and_is_not_too_small(alive: list[bool], least: int) -> None:
    members = [str(rank) if lives else None for rank, lives in enumerate(alive)]
    left = shrunk(members, min(least, len(alive)))
    assert [member for member in left if member is not None] == [member for member in members if member is not None]
    assert len(left) == max(sum(alive), min(least, len(alive)))


@given(st.lists(st.none() | st.booleans(), max_size=8))
def test_those_who_have_lived_longest_come_first_and_the_missing_last(members: list[bool | None]) -> None:
    numbered = [None if is_old is None else (is_old, number) for number, is_old in enumerate(members)]
    ordered = oldest_first(numbered, lambda member: member[0])
    old = [member for member in numbered if member is not None and member[0]]
    assert ordered[: len(old)] == old
    assert ordered[len(old) :] == [member for member in numbered if member not in old]  # in the places they had
