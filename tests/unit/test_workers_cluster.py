"""Workers that do not fit the cluster are refused, unless an autoscaler may make it larger."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from raysgd.config import ScalingConfig
from raysgd.errors import InfeasibleError
from raysgd.workers.placement import cluster
from raysgd.workers.placement.capacity import Node, describe_nodes
from support.ray_state import RayState

Check = Callable[..., None]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return ``check(limit, num_workers, ...)`` for a cluster of two nodes with 4 CPUs and 1 GPU each."""

    def check(limit: Mapping[str, float] | None, num_workers: int, **settings: Any) -> None:
        ray_state.limit = limit
        cluster.check_feasible(ScalingConfig(num_workers=num_workers, **settings))

    ray_state = RayState({name: {"CPU": 4.0, "GPU": 1.0} for name in "ab"}).install(monkeypatch)
    return check


@pytest.mark.parametrize("limit", [None, {"CPU": 0.0}])
def test_workers_that_fit_now_need_no_autoscaler(check: Check, limit: Any) -> None:
    check(limit, 8)


def test_workers_that_do_not_fit_are_refused_without_an_autoscaler(check: Check) -> None:
    with pytest.raises(InfeasibleError, match=r"needs 9 x 1 CPU = 9, the cluster has 8\. Ask for fewer"):
        check(None, 9)


@pytest.mark.parametrize(
    ("num_workers", "settings"),
    [
        (16, {}),
        (4, {"gpus_per_worker": 1}),
        (4, {"gpus_per_worker": 1, "cpus_per_worker": 4}),
        # A limit says nothing about single nodes.
        (8, {"placement_strategy": "STRICT_PACK"}),
        (3, {"placement_strategy": "STRICT_SPREAD"}),
        (2, {"cpus_per_worker": 8}),
    ],
)
def test_workers_within_the_autoscaler_limit_are_accepted(
    check: Check, num_workers: int, settings: dict[str, Any]
) -> None:
    check({"CPU": 16, "GPU": 4}, num_workers, **settings)


@pytest.mark.parametrize(
    ("num_workers", "settings", "message"),
    [
        (17, {}, "needs 17 x 1 CPU = 17, the cluster has 16 when its autoscaler has added all it may"),
        (5, {"gpus_per_worker": 1}, "needs 5 x 1 GPU = 5, the cluster has 4 when its autoscaler"),
        (1, {"resources_per_worker": {"tpu": 1}}, "needs 1 x 1 tpu = 1, the cluster has 0 when its autoscaler"),
        (17, {"placement_strategy": "STRICT_PACK"}, "needs 17 x 1 CPU = 17, the cluster has 16 when"),
        (17, {"placement_strategy": "STRICT_SPREAD"}, "needs 17 x 1 CPU = 17, the cluster has 16 when"),
    ],
)
def test_workers_beyond_the_autoscaler_limit_are_refused(
    check: Check, num_workers: int, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InfeasibleError, match=message):
        check({"CPU": 16, "GPU": 4}, num_workers, **settings)


def test_unlimited_autoscaler_accepts_any_number_of_workers(check: Check) -> None:
    """Ray writes ``sys.maxsize`` for any number of nodes."""
    check({"CPU": sys.maxsize, "GPU": sys.maxsize}, 1000, gpus_per_worker=1, placement_strategy="STRICT_SPREAD")


# -- nodes that join later ---------------------------------------------------------------------------------------------


class JoiningNodes:
    """A cluster that begins with one node; one more joins in each second of a clock that only sleeping advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.lines: list[str] = []
        self._state = RayState({"a": {"CPU": 4.0, "GPU": 1.0}}).install(monkeypatch)
        monkeypatch.setattr(cluster.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(cluster.asyncio, "sleep", self._sleep)

    async def wait(self, num_workers: int, timeout_s: float, num_spares: int = 0) -> float:
        """Wait for the workers; return the seconds that it took."""
        await cluster.wait_until_feasible(
            ScalingConfig(num_workers=num_workers), num_spares, timeout_s, self.lines.append
        )
        return self.now - 100.0

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        if seconds >= 1:
            self._state.nodes = {**self._state.nodes, chr(ord("a") + len(self._state.nodes)): {"CPU": 4.0}}


async def test_workers_wait_for_nodes_that_join(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = JoiningNodes(monkeypatch)
    assert await nodes.wait(9, timeout_s=60, num_spares=1) == 2.0
    head = "waiting up to 60 s for nodes that join the cluster: needs 10 x 1 CPU = 10 (9 workers, 1 spare), the cluster has"
    assert nodes.lines == [f"{head} 4; its nodes are a (4 CPU)", f"{head} 8; its nodes are a (4 CPU), b (4 CPU)"]


async def test_workers_that_fit_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = JoiningNodes(monkeypatch)
    assert await nodes.wait(4, timeout_s=60) == 0.0
    assert nodes.lines == []


async def test_wait_for_nodes_ends_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = JoiningNodes(monkeypatch)
    says = r"^needs 100 x 1 CPU = 100, the cluster has 12, after 2\.5 s of waiting for nodes\. Ask for fewer"
    with pytest.raises(InfeasibleError, match=says):
        await nodes.wait(100, timeout_s=2.5)
    assert nodes.now == 102.5


async def test_without_a_wait_workers_that_do_not_fit_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = JoiningNodes(monkeypatch)
    with pytest.raises(InfeasibleError, match=r"^needs 5 x 1 CPU = 5, the cluster has 4\. .*wait_for_nodes_s"):
        await nodes.wait(5, timeout_s=0)
    assert (nodes.now, nodes.lines) == (100.0, [])


def test_message_names_few_nodes_of_a_large_cluster() -> None:
    nodes = [Node(str(n), f"node-{n}", {"CPU": 4.0, "GPU": 2.0}, {}) for n in range(10)]
    text = describe_nodes(nodes, ["GPU", "CPU"])
    assert text.startswith("node-0 (2 GPU + 4 CPU), node-1 (2 GPU") and text.endswith(
        "node-7 (2 GPU + 4 CPU), and 2 more"
    )


# -- draining nodes ----------------------------------------------------------------------------------------------------


class FakeGcsClient:
    """The client of Ray's global control store."""

    def __init__(self, answer: dict[str, int] | Exception) -> None:
        self.answer = answer

    def get_draining_nodes(self, timeout: float) -> dict[str, int]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "nodes"),
    [
        ({"a": 0, "b": 1_030_000, "c": 990_000}, {"a": None, "b": 30.0, "c": 0.0}),
        (RuntimeError("the control store is away"), {}),
    ],
    ids=["nodes", "no answer"],
)
def test_draining_nodes_are_listed_with_the_seconds_left(
    monkeypatch: pytest.MonkeyPatch, answer: Any, nodes: dict[str, float | None]
) -> None:
    monkeypatch.setattr(cluster.global_worker, "gcs_client", FakeGcsClient(answer), raising=False)
    monkeypatch.setattr(cluster.time, "time", lambda: 1000.0)
    assert cluster.list_draining_nodes() == nodes
