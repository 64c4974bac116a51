"""Nodes on which workers die again and again are avoided, if no other node is as bad."""

from __future__ import annotations

import pytest

from raysgd.workers.orders import WorkerInfo
from raysgd.workers.placement.avoided_nodes import AvoidedNodes
from raysgd.workers.placement.capacity import Node


class Cluster:
    """Three nodes with some free CPUs each, and a clock that advances a minute per death."""

    def __init__(self, *free_cpus: float) -> None:
        self.now = 0.0
        self.nodes = [Node(name, name, {"CPU": 4}, {"CPU": cpus}) for name, cpus in zip("abc", free_cpus, strict=False)]
        self.avoided = AvoidedNodes({"CPU": 1}, lambda: self.now)

    def die(self, *nodes: str, after_s: float = 60) -> None:
        for node in nodes:
            self.now += after_s
            info = WorkerInfo(node_id=node, node_ip="1.2.3.4", hostname=node, pid=1, gpu_ids=())
            if self.avoided.record_death(info):
                self.avoided.avoid_faulty(info, self.nodes)


def test_node_with_repeated_deaths_is_avoided_and_reported_once() -> None:
    cluster = Cluster(1, 1, 1)
    cluster.die("b")
    assert cluster.avoided.ids == set()
    cluster.die("b")
    assert cluster.avoided.ids == {"b"}
    (message,) = cluster.avoided.take_warnings()
    assert message.startswith("b (1.2.3.4) is not used any more: workers have died there 2 times")
    cluster.die("b")
    assert cluster.avoided.take_warnings() == []


def test_deaths_at_the_same_time_count_as_one() -> None:
    cluster = Cluster(1, 1, 1)
    cluster.die("b", "b", "b", after_s=1)
    assert cluster.avoided.ids == set()


@pytest.mark.parametrize(("deaths", "avoided"), [("abc" * 3, set()), ("ab" * 4, set()), ("aab", {"a"})])
def test_node_is_not_faulty_if_workers_die_on_others_as_often(deaths: str, avoided: set[str]) -> None:
    cluster = Cluster(1, 1, 1)
    cluster.die(*deaths)
    assert cluster.avoided.ids == avoided


def test_node_stays_in_use_if_no_other_node_has_room() -> None:
    cluster = Cluster(1, 0, 0.5)
    cluster.die("b", "b", "b")
    assert cluster.avoided.ids == {"b"}
    cluster.die("a", "a", "a", "a", "a", "a")
    assert cluster.avoided.ids == {"b"}, "no node is left"


def test_nodes_that_ray_knows_to_be_gone_are_removed() -> None:
    cluster = Cluster(1, 1, 1)
    cluster.avoided.add(["a", "gone"])
    cluster.avoided.remove_gone(cluster.nodes)
    assert cluster.avoided.ids == {"a"}
