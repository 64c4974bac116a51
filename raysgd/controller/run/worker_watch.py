"""Watches the workers of one attempt: finds hangs, stragglers, and nodes that will be taken away. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raysgd._util.logs import get_logger
from raysgd.backends.flight_recorder import explain_hang
from raysgd.config import FailureConfig
from raysgd.controller import commands as c
from raysgd.controller.policies.hang import Hang, HangPolicy, blame
from raysgd.controller.policies.mismatch import Mismatch, MismatchPolicy
from raysgd.controller.policies.straggler import StragglerPolicy
from raysgd.goodput.findings import Finding
from raysgd.transport import shorten_retransmissions

if TYPE_CHECKING:
    from raysgd.workers.group.group import WorkerGroup
    from raysgd.workers.group.monitor import DrainMonitor


#: Heartbeats that each worker is asked for within the heartbeat timeout.
_ASKS = 4
_MAX_TICK_S = 0.5
#: Seconds to collect the stacks and collectives of all ranks, before the rank that hangs is killed.
_STACKS_TIMEOUT_S = 3.0
#: The same if nodes are lost: they do not answer, and they are the cause whatever the other ranks do.
_STACKS_TIMEOUT_LOST_S = 0.5
#: Seconds for all ranks to answer where they are.
_LOOK_TIMEOUT_S = 2.0
_NOT_COMPARED = "slow ranks may not be named"
#: Seconds between two polls for nodes that will be taken away.
DRAIN_POLL_S = 2.0


class WorkerWatch:
    """Watches one attempt, from `start` to `end`.

    Args:
        records: URI of the folder for what frameworks know of the ranks' collectives when a rank hangs.

    Attributes:
        mismatches: Finds collectives that ranks never join.
    """

    def __init__(
        self,
        group: WorkerGroup,
        failure: FailureConfig,
        records: str,
        attempt: int,
        feed: Callable[[c.Input], None],
        record_event: Callable[[c.RecordEvent], None],
    ) -> None:
        self._group = group
        self._monitor = group.monitor
        self._records = records
        self._attempt = attempt
        self._feed = feed
        self._record_event = record_event
        self._timeout_s = failure.heartbeat_timeout_s
        self._loop = asyncio.get_running_loop()
        self._policy = HangPolicy(
            failure.heartbeat_timeout_s,
            failure.progress_timeout_s,
            range(group.size),
            self._loop.time(),
            failure.start_timeout_s,
        )
        self._start_timeout_s = failure.start_timeout_s
        self._replacing: asyncio.Task[bool] | None = None
        self._silent: list[int] = []  # ranks for which replacements were started
        self._awaited: list[int] = []  # ranks that are cut off, of which the user knows that they are waited for
        infos = {rank: info for rank in range(group.size) if (info := group.info(rank)) is not None}
        self._nodes = {rank: info.node for rank, info in infos.items()}
        self._stragglers = StragglerPolicy(self._loop.time(), self._nodes)
        self.mismatches = MismatchPolicy(failure.mismatch_timeout_s, range(group.size))
        self._looking: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._checking: asyncio.Task[None] | None = None
        self._has_reported = False
        self._warned: set[str] = set()  # consequences of errors
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        shorten_retransmissions()
        drains = watch_drains(self._group.drains, lambda *drain: self._feed(c.NodeDraining(self._attempt, *drain)))
        self._tasks = [self._loop.create_task(self._watch_workers()), self._loop.create_task(drains)]

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch_workers(self) -> None:
        tick_s = min(_MAX_TICK_S, self._timeout_s / 8)
        next_ask = self._loop.time()
        try:
            while True:
                if self._loop.time() >= next_ask:
                    next_ask = self._loop.time() + self._timeout_s / _ASKS
                    self._ask_all()
                slept_at = self._loop.time()
                await asyncio.sleep(tick_s)
                gap_s = self._loop.time() - slept_at - tick_s
                if gap_s > self._timeout_s / _ASKS:  # this process did not run, so the silence says nothing
                    self._policy.skip(gap_s)
                with self._guarded("hangs and lost nodes may not be noticed"):
                    self._check_suspects()
                    self._expect_loss()
                    self._look_if_due()
                    if hangs := await self._find_hangs():
                        await self._report(hangs)
                    if not self._has_reported and (mismatch := self.mismatches.find_mismatch(self._loop.time())):
                        await self._report_mismatch(mismatch)
                with self._guarded(_NOT_COMPARED):
                    for straggler in self._stragglers.find_stragglers(self._loop.time()):
                        self._report_straggler(straggler)
        finally:
            for task in (*self._asked.values(), self._checking, self._looking, self._replacing):
                if task is not None:
                    task.cancel()

    async def _find_hangs(self) -> list[Hang]:
        now = self._loop.time()
        cut_off = self._policy.cut_off(now)
        can_replace = not cut_off or await self._can_replace(cut_off)
        if not can_replace and not set(cut_off) <= set(self._awaited):
            self._record_event(c.warning(self._describe_wait(cut_off)))
        self._awaited = [] if can_replace else cut_off
        hangs = self._policy.find_hangs(now, can_replace=can_replace)
        # Ranks that leave the attempt make no progress, but are not stuck. Ranks that all wait without hope would do so again.
        if self._has_reported or self.mismatches.will_end(now):
            hangs = [hang for hang in hangs if hang.kind != "stuck"]
        return hangs

    async def _can_replace(self, ranks: Sequence[int]) -> bool:
        """Return whether the group can continue without these ranks; False while that cannot be found out."""
        if self._replacing is None:
            self._replacing = self._loop.create_task(self._group.can_replace(ranks))
        await asyncio.wait([self._replacing], timeout=_MAX_TICK_S)
        if not self._replacing.done():
            return False
        found, self._replacing = self._replacing, None
        return found.exception() is None and found.result()

    def _describe_wait(self, ranks: Sequence[int]) -> str:
        infos = [info for rank in ranks if (info := self._group.info(rank)) is not None]
        nodes = ", ".join(dict.fromkeys(info.node for info in infos))
        return (
            f"no answer from {nodes}: lost or cut off. Nothing can replace ranks {list(ranks)} now, so the group waits for "
            f"them, for {self._start_timeout_s:g} s at most (FailureConfig(start_timeout_s=...)); if only the connection was "
            "cut, they continue where they are"
        )

    async def _report(self, hangs: list[Hang]) -> None:
        timeout_s = _STACKS_TIMEOUT_LOST_S if all(hang.kind == "lost" for hang in hangs) else _STACKS_TIMEOUT_S
        silent = [hang.rank for hang in hangs if hang.kind != "stuck"]
        stacks, collectives = await self._collect_states(timeout_s, silent)
        behind = explain_hang(collectives, range(self._group.size))
        for hang in [blame(hang, stacks) for hang in hangs]:
            self._policy.remove(hang.rank)
            self._has_reported = True
            why = hang.why if behind is None else f"{hang.why}; {behind}"
            self._feed(c.WorkerHung(hang.rank, self._attempt, hang.kind, why, stacks, collectives))

    async def _report_mismatch(self, mismatch: Mismatch) -> None:
        if not mismatch.is_over:
            self._record_event(c.warning(mismatch.why))
            return
        self._has_reported = True
        stacks, collectives = await self._collect_states(_STACKS_TIMEOUT_S, ())
        self._feed(c.CollectivesMismatched(self._attempt, mismatch.ranks, mismatch.why, stacks, collectives))

    async def _collect_states(self, timeout_s: float, silent: Collection[int]) -> list[dict[int, Any]]:
        """Return the stacks of all ranks, and the last collectives of those that are not ``silent``."""
        others = [rank for rank in range(self._group.size) if rank not in silent]
        asked: list[Coroutine[Any, Any, Any]] = [
            self._monitor.stacks(timeout_s),
            self._monitor.collectives(others, self._records, timeout_s),
        ]
        answers = await asyncio.gather(
            *[asyncio.wait_for(each, 2 * timeout_s) for each in asked], return_exceptions=True
        )
        return [{} if isinstance(each, BaseException) else each for each in answers]

    def _ask_all(self) -> None:
        for rank in range(self._group.size):
            if rank not in self._asked or self._asked[rank].done():
                self._asked[rank] = self._loop.create_task(self._ask(rank))

    async def _ask(self, rank: int) -> None:
        heartbeat = await self._monitor.heartbeat(rank)
        if heartbeat is None:  # the process is dead; the end of its event stream starts the recovery
            self._policy.remove(rank)
            self._stragglers.remove(rank)
        else:
            self._policy.on_heartbeat(rank, heartbeat, self._loop.time())
            self.mismatches.on_heartbeat(rank, heartbeat)

    def _look_if_due(self) -> None:
        if (self._looking is None or self._looking.done()) and self.mismatches.is_look_due(self._loop.time()):
            self._looking = self._loop.create_task(self._look())

    async def _look(self) -> None:
        """Ask where the ranks are, of which one has made no session call for some time."""
        asked = self.mismatches.list_questions()
        for rank, position in (await self._monitor.positions(asked, _LOOK_TIMEOUT_S)).items():
            self.mismatches.on_position(rank, position, self._loop.time())

    def _check_suspects(self) -> None:
        suspects = self._policy.suspects(self._loop.time())
        if suspects and (self._checking is None or self._checking.done()):
            self._checking = self._loop.create_task(self._check_processes(suspects))

    def _expect_loss(self) -> None:
        """Start replacements for ranks whose nodes do not answer, and end them if the nodes answer again."""
        silent = self._policy.unreachable(self._loop.time())
        # A rank that is watched no longer is dead or given up: its replacement is needed.
        if silent != self._silent and set(self._silent) <= self._policy.watched:
            self._silent = silent
            self._group.expect_loss(silent)

    async def _check_processes(self, ranks: list[int]) -> None:
        found = await self._monitor.check_processes(ranks, self._timeout_s / 6)
        if silent := [rank for rank in ranks if rank not in found]:
            found |= await self._monitor.check_processes(silent, self._timeout_s / 6)
        for rank in ranks:
            process = found.get(rank)
            if process is None:
                self._policy.on_unreachable(rank)
            else:
                self._policy.on_process_checked(
                    rank, process.cpu_s, process.waited_s, process.is_stopped, self._loop.time()
                )

    def on_reading(self, event: c.RecordEvent) -> None:
        """A rank has sent a sample, or has left train_func."""
        with self._guarded(_NOT_COMPARED):
            if event.kind == "left":
                self._stragglers.remove(event.data["rank"])
            else:
                self._stragglers.on_sample(event.data, self._loop.time())

    @contextmanager
    def _guarded(self, consequence: str) -> Iterator[None]:
        """Warn of an error of raysgd itself, once for each consequence, and continue: training goes well without a watch."""
        try:
            yield
        except Exception as error:
            if consequence not in self._warned:
                self._warned.add(consequence)
                get_logger().exception("raysgd itself failed in the watch of its workers")
                self._record_event(c.warning(f"{consequence}: {type(error).__name__}: {error}"))

    def _report_straggler(self, found: Finding) -> None:
        node = self._nodes.get(found.rank or 0, "")
        self._record_event(c.RecordEvent("straggler", {**vars(found), "node": node}))
        self._record_event(c.warning(f"{found.text} {found.remedy[:1].upper()}{found.remedy[1:]}"))


async def watch_drains(drains: DrainMonitor, on_drain: Callable[[tuple[int, ...], float | None], None]) -> None:
    """Watch the nodes of a group until cancelled.

    Args:
        drains: Finds the ranks on nodes that will be taken away.
        on_drain: Called once for each rank on such a node, with all ranks that have equally many seconds left (None: unknown).
    """
    known: set[int] = set()
    while True:
        found = await drains.ranks()
        by_time: dict[float | None, list[int]] = {}
        for rank in sorted(found.keys() - known):
            by_time.setdefault(found[rank], []).append(rank)
        known |= found.keys()
        for within_s, ranks in by_time.items():
            on_drain(tuple(ranks), within_s)
        await asyncio.sleep(DRAIN_POLL_S)
