"""A node's agent: it keeps copies of the newest parts of a checkpoint, and ends processes that do not exit by themselves."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import psutil
import pytest
import ray

from raysgd.workers.liveness import node_agent
from raysgd.workers.liveness.node_agent import NodeAgent, NodeAgents
from raysgd.workers.liveness.own_processes import ProcessWatch
from raysgd.workers.orders import WorkerInfo
from support.poll import until, until_async


class Part:
    """Stands for the reference to a checkpoint part, which Ray keeps while the reference lives."""

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize("fetch_s", [0.0, 0.001])
def test_only_the_newest_parts_are_kept_in_the_end(fetch_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: WeakSet[Part] = WeakSet()
    fetched: list[int] = []

    def wait(refs: list[Part], **how: Any) -> None:
        time.sleep(fetch_s)
        fetched.append(refs[0].number)

    def keep(number: int) -> None:
        part = Part(number)
        alive.add(part)
        agent.keep_copies([part])

    def is_kept_alone(number: int) -> bool:
        return fetched[-1:] == [number] and [part.number for part in alive] == [number]

    monkeypatch.setattr(ray, "wait", wait)
    agent = NodeAgent()
    for number in range(300):  # often just when the previous part has arrived
        keep(number)
        time.sleep(fetch_s * (number % 3))
        if number % 10 == 0:
            assert until(lambda: is_kept_alone(number), 20, interval_s=0), "the newest part was never fetched"  # noqa: B023
    assert until(lambda: is_kept_alone(299), 20)


def test_failed_fetch_does_not_stop_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def wait(refs: list[int], **how: Any) -> None:
        tried.extend(refs)
        if refs == [0]:
            raise ray.exceptions.RaySystemError("no")

    monkeypatch.setattr(ray, "wait", wait)
    agent = NodeAgent()
    for number in range(2):
        agent.keep_copies([number])
        assert until(lambda: tried[-1:] == [number], 20)  # noqa: B023


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_process_that_exits_in_time_is_not_killed(process: subprocess.Popen[bytes]) -> None:
    process.communicate(b"\n")
    NodeAgent().kill_unless_exited(process.pid)
    assert process.returncode == 0


def test_process_that_does_not_exit_is_killed(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "EXIT_GRACE_S", 0.1)
    NodeAgent().kill_unless_exited(process.pid)
    assert not psutil.pid_exists(process.pid)


def test_stopped_process_is_killed_at_once(process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "EXIT_GRACE_S", 60.0)
    process.send_signal(signal.SIGSTOP)
    assert until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 20, interval_s=0.001)
    begun = time.monotonic()
    NodeAgent().kill_unless_exited(process.pid)
    assert not psutil.pid_exists(process.pid)
    assert time.monotonic() - begun < 30


def test_agent_answers_while_a_process_exits(process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "EXIT_GRACE_S", 60.0)
    agent = NodeAgent()
    agent.expect_exit(process.pid)
    (status,) = agent.check_processes([process.pid])
    assert status is not None
    process.communicate(b"\n")
    agent.wait_for_exits()
    assert process.returncode == 0


class RemoteAgent:
    """Stands for the handle of an agent on another node; it never answers, as on a node that was lost."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> asyncio.Future[Any]:
            self.calls.append((method, args))
            return asyncio.get_running_loop().create_future()

        return SimpleNamespace(remote=call)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the agents that were killed, when actors are replaced by `RemoteAgent`."""
    killed: list[str] = []

    def options(*, name: str, **others: Any) -> Any:
        return SimpleNamespace(remote=lambda: RemoteAgent(name))

    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr(node_agent, "watched_actor", lambda cls: SimpleNamespace(options=options))
    monkeypatch.setattr(ray, "kill", lambda actor: killed.append(actor.name))
    monkeypatch.setattr(node_agent, "NodeAffinitySchedulingStrategy", lambda node_id, soft: None)
    return killed


def test_lost_node_does_not_delay_the_end(killed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "CLOSE_TIMEOUT_S", 0.01)
    worker = WorkerInfo(node_id="lost", node_ip="", hostname="", pid=1)

    async def end() -> None:
        agents = NodeAgents("trainer", ProcessWatch(timeout_s=60))
        agents.watch_workers([worker])
        await until_async(lambda: "lost" in agents.nodes)
        agents.expect_exit(worker)
        agents.close()
        await asyncio.wait_for(agents.wait_for_exits(), 20)

    asyncio.run(end())
    assert killed == ["trainer-agent-lost-1"]


def test_next_agent_of_a_node_has_another_name_than_one_that_still_closes(
    killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "CLOSE_TIMEOUT_S", 0.01)
    worker = WorkerInfo(node_id="other", node_ip="", hostname="", pid=1)

    async def pause_and_resume() -> None:
        agents = NodeAgents("trainer", ProcessWatch(timeout_s=60))
        for _ in range(2):
            agents.watch_workers([worker])
            await until_async(lambda: "other" in agents.nodes)
            agents.close()
        await agents.wait_for_exits()

    asyncio.run(pause_and_resume())
    assert sorted(killed) == ["trainer-agent-other-1", "trainer-agent-other-2"]  # each in a thread of its own
