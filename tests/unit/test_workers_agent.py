"""A node's agent holds the newest parts of a checkpoint it was told of, however they come."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray

from raysgd.workers.agent import NodeAgent
from support.poll import until


@pytest.mark.parametrize("fetch_s", [0.0, 0.001])
def test_the_newest_parts_are_held_at_last(fetch_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Any] = []

    def wait(refs: list[Any], **how: Any) -> None:
        time.sleep(fetch_s)
        fetched.append(refs)

    monkeypatch.setattr(ray, "wait", wait)
    agent = NodeAgent()
    for number in range(300):  # often just when the one before has been fetched
        agent.hold([number])
        time.sleep(fetch_s * (number % 3))
        if number % 10 == 0:
            assert until(lambda: agent._held == [number], 20, interval_s=0), "it was never fetched"  # noqa: B023
    assert until(lambda: agent._held == [299], 20)
    assert fetched[-1] == [299]
    agent._pool.shutdown()


def test_a_fetch_that_fails_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(refs: list[Any], **how: Any) -> None:
        if refs == [0]:
            raise ray.exceptions.RaySystemError("no")

    monkeypatch.setattr(ray, "wait", wait)
    agent = NodeAgent()
    agent.hold([0])
    agent.hold([1])
    assert until(lambda: agent._held == [1], 20)
    agent._pool.shutdown()
