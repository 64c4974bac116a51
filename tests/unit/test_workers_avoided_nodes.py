"""Nodes on which workers die again and again are avoided, if no other node is as bad; lost nodes are on probation."""

from __future__ import annotations

import pytest

from raysgd.workers.orders import WorkerInfo
from raysgd.workers.placement.avoided_nodes import AvoidedNodes
from raysgd.workers.placement.capacity import Node


def info_of(node: str) -> WorkerInfo:
    return WorkerInfo(node_id=node, node_ip="1.2.3.4", hostname=node, pid=1, gpu_ids=())


class Cluster:
    """Three nodes with some free CPUs each, and a clock that advances a minute per death."""

    def __init__(self, *free_cpus: float) -> None:
        self.now = 0.0
        self.nodes = [Node(name, name, {"CPU": 4}, {"CPU": cpus}) for name, cpus in zip("abc", free_cpus, strict=False)]
        self.avoided = AvoidedNodes({"CPU": 1}, lambda: self.now)

    def lose(self, node: str) -> None:
        self.avoided.lose(info_of(node))

    def ask(self, node: str, answers: list[bool]) -> None:
        """Ask a lost node's agent every second, the last time now."""
        for answer in answers:
            self.now += 1
            self.avoided.on_asked(node, answers=answer)

    def die(self, *nodes: str, after_s: float = 60) -> None:
        for node in nodes:
            self.now += after_s
            info = info_of(node)
            if self.avoided.record_death(info):
                self.avoided.avoid_faulty(info, self.nodes)


def test_node_with_repeated_deaths_is_avoided_and_reported_once() -> None:
    cluster = Cluster(1, 1, 1)
    cluster.die("b")
    assert set(cluster.avoided) == set()
    cluster.die("b")
    assert set(cluster.avoided) == {"b"}
    (message,) = cluster.avoided.take_warnings()
    assert message.startswith("b (1.2.3.4) is not used any more: workers have died there 2 times")
    cluster.die("b")
    assert cluster.avoided.take_warnings() == []


def test_deaths_at_the_same_time_count_as_one() -> None:
    cluster = Cluster(1, 1, 1)
    cluster.die("b", "b", "b", after_s=1)
    assert set(cluster.avoided) == set()


@pytest.mark.parametrize(("deaths", "avoided"), [("abc" * 3, set()), ("ab" * 4, set()), ("aab", {"a"})])
def test_node_is_not_faulty_if_workers_die_on_others_as_often(deaths: str, avoided: set[str]) -> None:
    cluster = Cluster(1, 1, 1)
    cluster.die(*deaths)
    assert set(cluster.avoided) == avoided


def test_node_stays_in_use_if_no_other_node_has_room() -> None:
    cluster = Cluster(1, 0, 0.5)
    cluster.die("b", "b", "b")
    assert set(cluster.avoided) == {"b"}
    cluster.die("a", "a", "a", "a", "a", "a")
    assert set(cluster.avoided) == {"b"}, "no node is left"


def test_node_whose_versions_differ_is_avoided_and_reported_once_until_it_is_another_node() -> None:
    cluster = Cluster(1, 1, 1)
    for _ in range(3):  # each of its workers
        cluster.avoided.refuse(info_of("b"), "raysgd 1 cannot work with raysgd 2")
    assert set(cluster.avoided) == {"b"}
    assert cluster.avoided.take_warnings() == [
        "b (1.2.3.4) is not used until its Ray is started again: raysgd 1 cannot work with raysgd 2"
    ]
    assert "b (1.2.3.4), whose versions differ" in str(cluster.avoided.describe())
    cluster.avoided.remove_gone([node for node in cluster.nodes if node.node_id != "b"])
    assert not cluster.avoided


def test_nodes_that_ray_knows_to_be_gone_are_removed() -> None:
    cluster = Cluster(1, 1, 1)
    cluster.avoided.drain(["a", "gone"])
    cluster.lose("b")
    cluster.lose("lost")
    cluster.avoided.remove_gone(cluster.nodes)
    assert set(cluster.avoided) == {"a", "b"} and cluster.avoided.lost == ["b"]


def test_lost_node_counts_again_once_it_has_answered_for_a_while() -> None:
    cluster = Cluster(1, 1, 1)
    cluster.lose("b")
    cluster.ask("b", [False] * 100)
    assert set(cluster.avoided) == {"b"}, "it is avoided for as long as it does not answer"
    cluster.ask("b", [True] * 4 + [False])
    cluster.ask("b", [True] * 5)
    assert set(cluster.avoided) == {"b"}, "a pause begins the time again"
    cluster.ask("b", [True])
    assert set(cluster.avoided) == set() and cluster.avoided.lost == []


def test_probation_doubles_with_each_loss_and_the_losses_of_its_workers_count_as_one() -> None:
    cluster = Cluster(1, 1, 1)
    probations = []
    for _ in range(9):
        cluster.lose("b")
        cluster.lose("b")
        asked = 0
        while cluster.avoided:
            cluster.ask("b", [True])
            asked += 1
        probations.append(asked - 1)
    assert probations == [5, 10, 20, 40, 80, 160, 320, 600, 600]


def test_silent_nodes_are_avoided_until_they_answer() -> None:
    cluster = Cluster(1, 1, 1)
    cluster.lose("a")
    cluster.avoided.set_silent(["b"])
    assert set(cluster.avoided) == {"a", "b"}
    cluster.avoided.set_silent(())
    assert set(cluster.avoided) == {"a"}


def test_lost_node_that_drains_stays_avoided() -> None:
    cluster = Cluster(1, 1, 1)
    cluster.lose("b")
    cluster.avoided.drain(["b"])
    cluster.ask("b", [True] * 10)
    assert set(cluster.avoided) == {"b"} and cluster.avoided.lost == []


def test_avoided_nodes_are_described_with_reason_and_end() -> None:
    cluster = Cluster(1, 1, 1)
    assert cluster.avoided.describe() is None
    cluster.lose("b")
    cluster.now += 12
    assert cluster.avoided.describe() == (
        "not used: b (1.2.3.4), lost or cut off 12 s ago, until it has answered for 5 s or is removed from the cluster"
    )
    cluster.ask("b", [True, True])
    cluster.avoided.drain(["c" * 56])
    assert cluster.avoided.describe() == (
        "not used: b (1.2.3.4), which answers again, for another 4 s; the draining node cccccccccccc until it is gone"
    )
