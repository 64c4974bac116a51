"""Which nodes are used no more, as workers die there and not elsewhere."""

from __future__ import annotations

import pytest

from raysgd.workers.faulty_nodes import FaultyNodes
from raysgd.workers.orders import WorkerInfo
from raysgd.workers.placement import Node


class Machines:
    """Three nodes with room on each, and what happens there; the clock goes on by a minute with each."""

    def __init__(self, *free_cpus: float) -> None:
        self.now = 0.0
        self.avoided: set[str] = set()
        nodes = [Node(name, name, {"CPU": 4}, {"CPU": cpus}) for name, cpus in zip("abc", free_cpus, strict=False)]
        self.faulty = FaultyNodes(self.avoided, {"CPU": 1}, lambda: nodes, lambda: self.now)

    def die(self, *nodes: str, after_s: float = 60) -> None:
        for node in nodes:
            self.now += after_s
            self.faulty.died(WorkerInfo(node_id=node, node_ip="1.2.3.4", hostname=node, pid=1, gpu_ids=()))


def test_a_node_where_workers_die_again_is_avoided_and_named_once() -> None:
    machines = Machines(1, 1, 1)
    machines.die("b")
    assert machines.avoided == set()
    machines.die("b")
    assert machines.avoided == {"b"}
    (line,) = machines.faulty.take_told()
    assert line.startswith("b (1.2.3.4) is used no more: workers have died there 2 times")
    machines.die("b")
    assert machines.faulty.take_told() == []


def test_deaths_at_the_same_time_are_one() -> None:
    machines = Machines(1, 1, 1)
    machines.die("b", "b", "b", after_s=1)
    assert machines.avoided == set()


@pytest.mark.parametrize("deaths", ["abc" * 3, "ab" * 4, "aab"])
def test_what_happens_everywhere_is_no_nodes_fault(deaths: str) -> None:
    machines = Machines(1, 1, 1)
    machines.die(*deaths)
    assert machines.avoided <= {"a"}
    assert machines.avoided == ({"a"} if deaths == "aab" else set())


def test_a_node_is_used_on_where_there_is_no_room_elsewhere() -> None:
    machines = Machines(1, 0, 0.5)
    machines.die("b", "b", "b")
    assert machines.avoided == {"b"}
    machines.die("a", "a", "a", "a", "a", "a")
    assert machines.avoided == {"b"}, "nowhere is left"
