"""Horovod slots are right for any number of workers on any number of nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raysgd.backends.base import Member
from raysgd.backends.horovod import Slot, assign_slots


def members(workers_on: list[int]) -> list[Member]:
    """Return members with these numbers of workers on each node; ranks count through the nodes."""
    size = sum(workers_on)
    places = [(node, local, count) for node, count in enumerate(workers_on) for local in range(count)]
    return [
        Member(rank, size, local, count, node, "", f"10.0.0.{node}", has_gpu=False)
        for rank, (node, local, count) in enumerate(places)
    ]


def test_slots_of_two_members_on_one_node_and_one_on_another() -> None:
    assert assign_slots(members([2, 1])) == [
        Slot("node0", 0, 3, 0, 2, 0, 2),
        Slot("node0", 1, 3, 1, 2, 0, 1),
        Slot("node1", 2, 3, 0, 1, 1, 2),
    ]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_local_and_cross_ranks_have_no_gaps(workers_on: list[int]) -> None:
    slots = assign_slots(members(workers_on))
    assert [slot.rank for slot in slots] == list(range(sum(workers_on)))
    for hostname in {slot.hostname for slot in slots}:
        of_node = [slot for slot in slots if slot.hostname == hostname]
        assert [slot.local_rank for slot in of_node] == list(range(len(of_node)))
        assert {slot.local_size for slot in of_node} == {len(of_node)}
    for local_rank in {slot.local_rank for slot in slots}:
        across = [slot for slot in slots if slot.local_rank == local_rank]
        assert [slot.cross_rank for slot in across] == list(range(len(across)))
        assert {slot.cross_size for slot in across} == {len(across)}
