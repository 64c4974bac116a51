"""Watches the workers of one attempt: finds hangs, stragglers, and nodes that will be taken away. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raysgd.backends.flight_recorder import Collective, explain_hang
from raysgd.checkpoint.storage.storage import Storage
from raysgd.config import FailureConfig
from raysgd.controller import commands as c
from raysgd.controller.policies.hang import Hang, HangPolicy, blame
from raysgd.controller.policies.straggler import Straggler, StragglerPolicy
from raysgd.controller.run.worker_group import Watched, WorkerGroupProtocol

if TYPE_CHECKING:
    from raysgd.workers.group.monitor import DrainMonitor


#: A worker is asked this often within the heartbeat timeout.
_ASKS = 4
_MAX_TICK_S = 0.5
#: Seconds for the stacks of all ranks, and what they know of their collectives, before the one that hangs is ended.
_STACKS_TIMEOUT_S = 3.0
#: The same where nodes are lost, which will not answer, and are to blame whatever the others do.
_STACKS_TIMEOUT_LOST_S = 0.5


@dataclass(frozen=True)
class RankStates:
    """The stacks of all ranks, and their last collectives, when a rank was found to hang."""

    stacks: Mapping[int, str] = field(default_factory=dict)
    collectives: Mapping[int, Sequence[Collective]] = field(default_factory=dict)


class Watch:
    """Watches one attempt for hangs and stragglers; `run` continues until it is cancelled.

    Args:
        records: Folder for what frameworks know of the ranks' collectives when one hangs.
        on_hang: Called for each worker that must be ended, with the stacks of all ranks.
        on_straggler: Called once for each worker that is slower than the others.
    """

    def __init__(
        self,
        group: Watched,
        failure: FailureConfig,
        records: str,
        on_hang: Callable[[Hang, RankStates], None],
        on_straggler: Callable[[Straggler], None],
    ) -> None:
        self._group = group
        self._records = records
        self._timeout_s = failure.heartbeat_timeout_s
        self._on_hang = on_hang
        self._on_straggler = on_straggler
        self._loop = asyncio.get_running_loop()
        self._policy = HangPolicy(
            failure.heartbeat_timeout_s, failure.progress_timeout_s, range(group.size), self._loop.time()
        )
        self._stragglers = StragglerPolicy(self._loop.time())
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._has_reported = False

    async def run(self) -> None:
        tick_s = min(_MAX_TICK_S, self._timeout_s / 8)
        next_ask = self._loop.time()
        try:
            while True:
                if self._loop.time() >= next_ask:
                    next_ask = self._loop.time() + self._timeout_s / _ASKS
                    self._ask_all()
                await asyncio.sleep(tick_s)
                self._look_at_suspects()
                if hangs := self._select_reportable(self._policy.find_hangs(self._loop.time())):
                    await self._report(hangs)
                for straggler in self._stragglers.find_stragglers(self._loop.time()):
                    self._on_straggler(straggler)
        finally:
            for task in (*self._asked.values(), *([self._looking] if self._looking else [])):
                task.cancel()

    def _select_reportable(self, hangs: list[Hang]) -> list[Hang]:
        """Return the hangs to report. After the first one the others leave the attempt without progress, but do not hang."""
        return [hang for hang in hangs if hang.kind != "stuck" or not self._has_reported]

    async def _report(self, hangs: list[Hang]) -> None:
        timeout_s = _STACKS_TIMEOUT_LOST_S if all(hang.kind == "lost" for hang in hangs) else _STACKS_TIMEOUT_S
        states = await self._collect_states(timeout_s, [hang.rank for hang in hangs if hang.kind != "stuck"])
        for hang in [blame(hang, states.stacks) for hang in hangs]:
            self._policy.remove(hang.rank)
            self._has_reported = True
            self._on_hang(hang, states)

    async def _collect_states(self, timeout_s: float, silent: Collection[int]) -> RankStates:
        others = [rank for rank in range(self._group.size) if rank not in silent]
        asked: list[Coroutine[Any, Any, Any]] = [
            self._group.stacks(timeout_s),
            self._group.collectives(others, self._records, timeout_s),
        ]
        answers = await asyncio.gather(
            *[asyncio.wait_for(each, 2 * timeout_s) for each in asked], return_exceptions=True
        )
        return RankStates(*[{} if isinstance(each, BaseException) else each for each in answers])

    def _ask_all(self) -> None:
        for rank in range(self._group.size):
            if rank not in self._asked or self._asked[rank].done():
                self._asked[rank] = self._loop.create_task(self._ask(rank))

    async def _ask(self, rank: int) -> None:
        heartbeat = await self._group.heartbeat(rank)
        if heartbeat is None:  # it is dead: the end of its stream is handled elsewhere
            self._policy.remove(rank)
            self._stragglers.remove(rank)
        else:
            self._policy.on_heartbeat(rank, heartbeat, self._loop.time())
            self._stragglers.on_heartbeat(rank, heartbeat)

    def _look_at_suspects(self) -> None:
        suspects = self._policy.suspects(self._loop.time())
        if suspects and (self._looking is None or self._looking.done()):
            self._looking = self._loop.create_task(self._look(suspects))

    async def _look(self, ranks: list[int]) -> None:
        looks = await self._group.check_processes(ranks, self._timeout_s / 3)
        for rank in ranks:
            look = looks.get(rank)
            if look is None:
                self._policy.on_unreachable(rank)
            else:
                self._policy.on_process_checked(rank, look.cpu_s, look.waited_s, look.is_stopped, self._loop.time())


#: Seconds between two looks.
LOOK_S = 2.0


class DrainWatch:
    """Watches one attempt for nodes that will be taken away; `run` continues until it is cancelled.

    Args:
        on_drain: Called with the ranks on nodes that newly drain, and the seconds until then.
    """

    def __init__(self, drains: DrainMonitor, on_drain: Callable[[tuple[int, ...], float | None], None]) -> None:
        self._drains = drains
        self._on_drain = on_drain
        self._known: set[int] = set()

    async def run(self) -> None:
        while True:
            found = await self._drains.ranks()
            by_time: dict[float | None, list[int]] = {}
            for rank in sorted(found.keys() - self._known):
                by_time.setdefault(found[rank], []).append(rank)
            self._known |= found.keys()
            for within_s, ranks in by_time.items():
                self._on_drain(tuple(ranks), within_s)
            await asyncio.sleep(LOOK_S)


class Watches:
    """All watches of a run, for one attempt at a time.

    Args:
        records: Folder for the records of ranks that hang, one for each attempt.
        feed: Receives what the run must act on.
        note: Receives events.
    """

    def __init__(
        self,
        group: WorkerGroupProtocol,
        failure: FailureConfig,
        records: Storage,
        feed: Callable[[c.Input], None],
        note: Callable[[c.RecordEvent], None],
    ) -> None:
        self._group = group
        self._failure = failure
        self._records = records
        self._feed = feed
        self._note = note
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, attempt: int) -> None:
        """Watch this attempt, in place of the one before."""

        def hung(hang: Hang, states: RankStates) -> None:
            behind = explain_hang(states.collectives, range(self._group.size))
            why = hang.why if behind is None else f"{hang.why}; {behind}"
            self._feed(c.WorkerHung(hang.rank, attempt, hang.kind, why, states.stacks, states.collectives))

        def drains(ranks: tuple[int, ...], within_s: float | None) -> None:
            self._feed(c.NodeDraining(attempt, ranks, within_s))

        self.end()
        records = self._records.child(f"attempt_{attempt}").uri
        watch = Watch(self._group.monitor, self._failure, records, hung, self._lags)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(watch.run()), loop.create_task(DrainWatch(self._group.drains, drains).run())]

    def end(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    def _lags(self, straggler: Straggler) -> None:
        info = self._group.info(straggler.rank)
        node = info.node if info is not None else "a lost node"
        self._note(c.RecordEvent("straggler", straggler.to_event(node)))
        self._note(c.RecordEvent("warning", {"message": straggler.describe(node)}))
