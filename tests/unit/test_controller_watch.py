"""What the watch of an attempt does about ranks whose nodes do not answer: prepare, give up, or wait."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from raysgd.config import FailureConfig
from raysgd.controller import commands as c
from raysgd.controller.policies.hang import HangPolicy
from raysgd.controller.run.worker_watch import WorkerWatch
from raysgd.session.progress import Heartbeat
from raysgd.workers.orders import WorkerInfo
from support.poll import until_async

HEARTBEAT_S = 0.4


class FakeGroup:
    """Three ranks, each on a node of its own.

    Attributes:
        cut: The ranks whose nodes do not answer.
        has_room: Whether the group can continue without them; None: the cluster does not say.
        expected: The ranks for which replacements were to be started, call by call.
    """

    size = 3

    def __init__(self) -> None:
        self.cut: set[int] = set()
        self.has_room: bool | None = False
        self.expected: list[list[int]] = []
        self.monitor = self.drains = self

    async def ranks(self) -> dict[int, float | None]:
        return {}

    async def heartbeat(self, rank: int) -> Heartbeat:
        await until_async(lambda: rank not in self.cut)
        return Heartbeat()

    async def check_processes(self, ranks: Sequence[int], timeout_s: float) -> dict[int, Any]:
        await asyncio.sleep(0.01)
        assert self.cut.issuperset(ranks)
        return {}

    async def stacks(self, timeout_s: float) -> dict[int, str]:
        return {}

    async def collectives(self, ranks: Sequence[int], folder: str, timeout_s: float) -> dict[int, Any]:
        return {}

    async def can_replace(self, ranks: Sequence[int]) -> bool:
        await until_async(lambda: self.has_room is not None)
        return bool(self.has_room)

    def expect_loss(self, ranks: Collection[int]) -> None:
        self.expected.append(list(ranks))

    def info(self, rank: int) -> WorkerInfo:
        return WorkerInfo(f"id{rank}", f"10.0.0.{rank}", f"node{rank}", pid=1)


class Watched:
    """A watch that runs, and what it has found."""

    def __init__(self, **settings: Any) -> None:
        self.group = FakeGroup()
        self.hung: list[c.WorkerHung] = []
        self.warnings: list[str] = []
        failure = FailureConfig(heartbeat_timeout_s=HEARTBEAT_S, **settings)
        group: Any = self.group
        self.watch = WorkerWatch(group, failure, "records", 1, self._feed, self._record)

    def _feed(self, given: c.Input) -> None:
        assert isinstance(given, c.WorkerHung)
        self.hung.append(given)

    def _record(self, event: c.RecordEvent) -> None:
        self.warnings.append(event.data["message"])

    @contextmanager
    def running(self) -> Iterator[FakeGroup]:
        self.watch.start()
        yield self.group
        self.watch.end()


async def test_lost_ranks_are_given_up_if_the_group_can_continue_without_them() -> None:
    watched = Watched()
    with watched.running() as group:
        group.has_room, group.cut = True, {0, 2}
        await until_async(lambda: len(watched.hung) == 2)
        await asyncio.sleep(HEARTBEAT_S)
    assert [(hang.rank, hang.kind) for hang in watched.hung] == [(0, "lost"), (2, "lost")]
    assert group.expected[-1] == [0, 2], "the replacements that were started are needed now"
    assert not watched.warnings


async def test_group_waits_for_ranks_that_nothing_can_replace_and_continues_with_them() -> None:
    watched = Watched()
    with watched.running() as group:
        group.cut = {1}
        await until_async(lambda: watched.warnings)
        await asyncio.sleep(2 * HEARTBEAT_S)
        group.cut = set()
        await until_async(lambda: group.expected[-1] == [])
        await asyncio.sleep(2 * HEARTBEAT_S)
    assert not watched.hung and group.expected == [[1], []]
    (warning,) = watched.warnings
    assert warning.startswith("no answer from node1 (10.0.0.1): lost or cut off. Nothing can replace ranks [1] now")


async def test_lost_ranks_are_given_up_once_there_is_room() -> None:
    watched = Watched()
    with watched.running() as group:
        group.has_room, group.cut = None, {1}
        await until_async(lambda: watched.warnings)
        await asyncio.sleep(HEARTBEAT_S)
        assert not watched.hung, "while the GCS is away, no replacement could be started"
        group.has_room = True
        await until_async(lambda: watched.hung)


async def test_lost_ranks_are_waited_for_as_long_as_the_user_allows() -> None:
    watched = Watched(start_timeout_s=1.0)
    with watched.running() as group:
        began = asyncio.get_running_loop().time()
        group.cut = {1}
        await until_async(lambda: watched.hung)
    assert asyncio.get_running_loop().time() - began > 1.0


async def test_an_error_in_comparing_ranks_ends_neither_the_run_nor_the_watch() -> None:
    watched = Watched()
    with watched.running() as group:
        for _ in range(2):
            watched.watch.on_reading(c.RecordEvent("sample", {"rank": 0, "steps": "many", "uses": {}}))
        assert watched.warnings == [
            "slow ranks may not be named: TypeError: '>' not supported between instances of 'str' and 'int'"
        ]
        group.has_room, group.cut = True, {0}
        await until_async(lambda: watched.hung)


async def test_watch_continues_after_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    suspects, failures = HangPolicy.suspects, [KeyError("a mistake of ours")] * 2

    def failing(policy: HangPolicy, now: float) -> list[int]:
        if failures:
            raise failures.pop()
        return suspects(policy, now)

    monkeypatch.setattr(HangPolicy, "suspects", failing)
    watched = Watched()
    with watched.running() as group:
        group.has_room, group.cut = True, {1}
        await until_async(lambda: watched.hung)
    assert watched.warnings == ["hangs and lost nodes may not be noticed: KeyError: 'a mistake of ours'"]
