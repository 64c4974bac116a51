"""Which draining nodes the drain watch reports, and how often."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raysgd.controller.run import worker_watch as watching
from raysgd.controller.run.worker_watch import watch_drains

Reported = list[tuple[tuple[int, ...], float | None]]


class FakeMonitor:
    """Returns the ranks on draining nodes, one poll after the other; the last answer repeats."""

    def __init__(self, *polls: dict[int, float | None]) -> None:
        self.polls = list(polls)
        self.is_over = asyncio.Event()

    async def ranks(self) -> dict[int, float | None]:
        if len(self.polls) == 1:
            self.is_over.set()
        return self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]


async def reported_by(*polls: dict[int, float | None], monkeypatch: pytest.MonkeyPatch) -> Reported:
    monkeypatch.setattr(watching, "DRAIN_POLL_S", 0)
    monitor: Any = FakeMonitor(*polls)
    reported: Reported = []
    watch = asyncio.ensure_future(watch_drains(monitor, lambda *drain: reported.append(drain)))
    await monitor.is_over.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    watch.cancel()
    return reported


async def test_ranks_of_draining_node_are_reported_together_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = await reported_by({}, {1: 60.0, 2: 60.0}, {1: 58.0, 2: 58.0}, {}, monkeypatch=monkeypatch)
    assert reported == [((1, 2), 60.0)]


async def test_further_draining_nodes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = await reported_by({1: 60.0}, {0: None, 1: 58.0, 3: 5.0}, monkeypatch=monkeypatch)
    assert reported == [((1,), 60.0), ((0,), None), ((3,), 5.0)]
