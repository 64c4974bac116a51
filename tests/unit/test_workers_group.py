"""All ranks agree on the place where they stop or leave; nodes are asked for their processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from raysgd.session.events import AtSavePoint
from raysgd.session.progress import Heartbeat, NodeClock
from raysgd.workers.group import monitor
from raysgd.workers.group.agreement import RankAgreement
from raysgd.workers.group.monitor import GroupMonitor
from raysgd.workers.group.processes import Worker
from raysgd.workers.liveness.node_agent import NodeUnreachableError, ProcessStatus
from raysgd.workers.orders import WorkerInfo
from raysgd.workers.placement import avoided_nodes
from raysgd.workers.placement.avoided_nodes import AvoidedNodes
from raysgd.workers.placement.capacity import Node
from support.poll import until_async


class FakeRanks:
    """Two ranks: the first is one ``should_stop()`` and one save ahead, the second two reports."""

    def __init__(self) -> None:
        self.limits: dict[str, Any] = {}

    async def call(self, method: str, attempt: int, *limits: Any) -> list[Any]:
        assert attempt == 7
        if limits:
            self.limits[method] = limits
        return {"hold": [(4, 1), (3, 3)], "hold_saves": [2, 1]}.get(method, [None, None])


async def test_all_ranks_stop_at_the_furthest_place_that_any_rank_has_reached() -> None:
    ranks = FakeRanks()
    await RankAgreement(ranks.call).stop(7, ends_reports=True)
    assert ranks.limits["stop_from"] == (4, 3)


async def test_reports_continue_if_the_stop_does_not_end_them() -> None:
    ranks = FakeRanks()
    await RankAgreement(ranks.call).stop(7, ends_reports=False)
    assert ranks.limits["stop_from"] == (4, None)


async def test_all_ranks_leave_after_the_newest_save_that_any_rank_has_begun() -> None:
    ranks = FakeRanks()
    agreement = RankAgreement(ranks.call)
    await agreement.save(7, 1)
    assert ranks.limits["leave_after"] == (AtSavePoint(2, 1),)
    await agreement.call_off_save(7)
    assert ranks.limits["leave_after"] == (None,)


@pytest.mark.parametrize("last", ["save", "call_off_save"])
async def test_requests_reach_the_ranks_in_their_order(last: str) -> None:
    """A save that is called off while the ranks are asked would leave them waiting for a save point that nobody knows."""
    ranks = FakeRanks()

    async def slow(method: str, attempt: int, *limits: Any) -> list[Any]:
        await asyncio.sleep(0.05 if method == "hold_saves" else 0)
        return await ranks.call(method, attempt, *limits)

    agreement = RankAgreement(slow)
    calls = [agreement.save(7, 1), agreement.call_off_save(7), *([agreement.save(7, 2)] if last == "save" else [])]
    await asyncio.gather(*calls)
    assert ranks.limits["leave_after"] == ((AtSavePoint(2, 2),) if last == "save" else (None,))


class FakeAgents:
    """The agents of nodes, of which ``lost`` does not answer."""

    own_node = "own"

    async def check_processes(self, node_id: str, pids: Sequence[int], timeout_s: float) -> list[ProcessStatus | None]:
        if node_id == "lost":
            raise NodeUnreachableError(node_id)
        return [ProcessStatus(cpu_s=pid, is_stopped=False) for pid in pids]

    async def stacks(self, node_id: str, processes: Sequence[tuple[int, int]], timeout_s: float) -> list[str]:
        if node_id == "lost":
            raise NodeUnreachableError(node_id)
        return [f"process {pid}, descriptor {file}" for pid, file in processes]


def monitored(*nodes: str | None) -> GroupMonitor:
    """Return the monitor of a group with one rank for each node; None is a rank without a process."""
    workers: list[Any] = [None if node is None else Worker(None, None, None) for node in nodes]  # type: ignore[arg-type]
    for rank, node in enumerate(nodes):
        if node is not None:
            workers[rank].info = WorkerInfo(node, "10.0.0.1", node, pid=100 + rank, stacks_file=rank)
    return GroupMonitor(FakeAgents(), workers)  # type: ignore[arg-type]


async def test_processes_are_checked_on_their_nodes() -> None:
    found = await monitored("a", "lost", "b", None, "a").check_processes([0, 1, 2, 3, 4], timeout_s=1)
    assert {rank: status.cpu_s for rank, status in found.items() if status} == {0: 100, 2: 102, 4: 104}
    assert 1 not in found, "its node does not answer"


async def test_stacks_of_a_node_that_does_not_answer_are_replaced_by_the_reason() -> None:
    assert await monitored("a", "lost", None, "a").stacks(timeout_s=1) == {
        0: "process 100, descriptor 0",
        1: "its node does not answer",
        3: "process 103, descriptor 3",
    }


class Answering:
    """The handle of a worker, whose node's clock is 100 s behind; it takes ``delays`` seconds to answer."""

    def __init__(self, clock: Clock, *delays: float) -> None:
        self.heartbeat, self.clock, self.delays, self.got = self, clock, list(delays), []  # type: ignore[var-annotated]

    async def remote(self, clock: NodeClock | None) -> Heartbeat:
        self.got.append(clock)
        self.clock.now += self.delays[0] / 2
        answer = Heartbeat(clock_s=self.clock.now - 100)
        self.clock.now += self.delays.pop(0) / 2
        return answer


class Clock:
    now = 5000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now - 4000


async def test_workers_get_the_best_reading_of_the_clock_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(monitor, "time", clock)
    group = monitored("a", "a", "own")
    handles = [Answering(clock, 0.2, 0.6), Answering(clock, 0.1), Answering(clock, 0.4)]
    for rank, handle in enumerate(handles):
        group._members[rank].handle = handle  # type: ignore[union-attr]
    for rank in (0, 1, 0, 2):
        await group.heartbeat(rank)
        clock.now += 2.5
    (first, third), (second,), (own,) = [handle.got for handle in handles]
    assert first is None
    assert second[:2] == pytest.approx((100.0, 0.1))
    assert third[:2] == pytest.approx((100.0, 0.05)), "by the better answer of the other rank"
    assert own[:2] == (4000.0, 0.0), "the controller is on this node"


class ProbedAgents:
    """The agents of lost nodes: each answers as often as ``answers`` says."""

    def __init__(self, answers: dict[str, list[bool]]) -> None:
        self.answers_left = answers

    async def answers(self, node_id: str, timeout_s: float) -> bool:
        left = self.answers_left[node_id]
        return left.pop(0) if len(left) > 1 else left[0]


async def test_lost_nodes_are_asked_until_each_counts_again_or_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the GCS is away, which nodes are gone is not known, but those that answer count again."""
    gcs_answers, num_listed = threading.Event(), 0

    def list_nodes() -> list[Node]:
        nonlocal num_listed
        num_listed += 1
        gcs_answers.wait(20)
        return [Node("back", "back", {}, {})]

    monkeypatch.setattr(monitor, "list_nodes", list_nodes)
    monkeypatch.setattr(monitor, "ASK_LOST_S", 0.001)
    monkeypatch.setattr(avoided_nodes, "PROBATION_S", 0.01)
    avoided = AvoidedNodes({"CPU": 1})
    lost = monitor.LostNodes(ProbedAgents({"back": [False, False, True], "gone": [False]}), avoided)  # type: ignore[arg-type]
    for name in ("back", "gone"):
        avoided.lose(WorkerInfo(name, "10.0.0.1", name, pid=1))
        lost.ask()
    await until_async(lambda: set(avoided) == {"gone"} and num_listed > 0)
    assert num_listed == 1, "a call that waits for the GCS is not made again"
    gcs_answers.set()
    await until_async(lambda: not avoided)
    lost.close()
