"""Watches over the workers of one attempt: asks each how it is, and tells which hang or lag. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raysgd.backends.flight_record import Collective
from raysgd.config import FailureConfig
from raysgd.controller.hang_policy import Hang, HangPolicy, blame
from raysgd.controller.straggler_policy import Straggler, StragglerPolicy
from raysgd.session.progress import Pulse

#: A worker is asked this often within the heartbeat timeout.
_ASKS = 4
_MAX_TICK_S = 0.5
#: Seconds for the stacks of all ranks, and what they know of their collectives, before the one that hangs is ended.
_STACKS_TIMEOUT_S = 3.0
#: The same where nodes are lost, which will not answer, and are to blame whatever the others do.
_STACKS_TIMEOUT_LOST_S = 0.5


class Watched(Protocol):
    """What is watched: `raysgd.workers.group.WorkerGroup`, or a fake."""

    @property
    def size(self) -> int: ...
    async def pulse(self, rank: int) -> Pulse | None: ...
    async def look(self, ranks: list[int], timeout_s: float) -> dict[int, Any]: ...
    async def stacks(self, timeout_s: float) -> dict[int, str]: ...
    async def collectives(
        self, ranks: Sequence[int], folder: str, timeout_s: float
    ) -> dict[int, Sequence[Collective]]: ...


@dataclass(frozen=True)
class Scene:
    """Where the ranks stood when one was found to hang: their stacks, and their last collectives, by rank."""

    stacks: Mapping[int, str] = field(default_factory=dict)
    collectives: Mapping[int, Sequence[Collective]] = field(default_factory=dict)


class Watch:
    """One attempt's watch; `run` goes on until it is cancelled.

    Args:
        records: Folder for what frameworks know of the ranks' collectives when one hangs.
        on_hang: Called for each worker that must be ended, with where all ranks stand.
        on_straggler: Called for each that is slower than the others, once.
    """

    def __init__(
        self,
        fleet: Watched,
        failure: FailureConfig,
        records: str,
        on_hang: Callable[[Hang, Scene], None],
        on_straggler: Callable[[Straggler], None],
    ) -> None:
        self._fleet = fleet
        self._records = records
        self._timeout_s = failure.heartbeat_timeout_s
        self._on_hang = on_hang
        self._on_straggler = on_straggler
        self._loop = asyncio.get_running_loop()
        self._policy = HangPolicy(
            failure.heartbeat_timeout_s, failure.progress_timeout_s, range(fleet.size), self._loop.time()
        )
        self._stragglers = StragglerPolicy(self._loop.time())
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._is_told = False

    async def run(self) -> None:
        """Watch."""
        tick_s = min(_MAX_TICK_S, self._timeout_s / 8)
        next_ask = self._loop.time()
        try:
            while True:
                if self._loop.time() >= next_ask:
                    next_ask = self._loop.time() + self._timeout_s / _ASKS
                    self._ask_all()
                await asyncio.sleep(tick_s)
                self._look_at_suspects()
                if hangs := self._to_tell(self._policy.judge(self._loop.time())):
                    await self._tell(hangs)
                for straggler in self._stragglers.judge(self._loop.time()):
                    self._on_straggler(straggler)
        finally:
            for task in (*self._asked.values(), *([self._looking] if self._looking else [])):
                task.cancel()

    def _to_tell(self, hangs: list[Hang]) -> list[Hang]:
        """After the first one the others are on their way out of the attempt: they make no progress, but are not stuck."""
        return [hang for hang in hangs if hang.kind != "stuck" or not self._is_told]

    async def _tell(self, hangs: list[Hang]) -> None:
        timeout_s = _STACKS_TIMEOUT_LOST_S if all(hang.kind == "lost" for hang in hangs) else _STACKS_TIMEOUT_S
        scene = await self._look_around(timeout_s, [hang.rank for hang in hangs if hang.kind != "stuck"])
        for hang in [blame(hang, scene.stacks) for hang in hangs]:
            self._policy.left(hang.rank)
            self._is_told = True
            self._on_hang(hang, scene)

    async def _look_around(self, timeout_s: float, silent: Collection[int]) -> Scene:
        others = [rank for rank in range(self._fleet.size) if rank not in silent]
        asked: list[Coroutine[Any, Any, Any]] = [
            self._fleet.stacks(timeout_s),
            self._fleet.collectives(others, self._records, timeout_s),
        ]
        told = await asyncio.gather(*[asyncio.wait_for(each, 2 * timeout_s) for each in asked], return_exceptions=True)
        return Scene(*[{} if isinstance(each, BaseException) else each for each in told])

    def _ask_all(self) -> None:
        for rank in range(self._fleet.size):
            if rank not in self._asked or self._asked[rank].done():
                self._asked[rank] = self._loop.create_task(self._ask(rank))

    async def _ask(self, rank: int) -> None:
        pulse = await self._fleet.pulse(rank)
        if pulse is None:  # it is dead, which its stream tells
            self._policy.left(rank)
            self._stragglers.left(rank)
        else:
            self._policy.answered(rank, pulse, self._loop.time())
            self._stragglers.answered(rank, pulse)

    def _look_at_suspects(self) -> None:
        suspects = self._policy.suspects(self._loop.time())
        if suspects and (self._looking is None or self._looking.done()):
            self._looking = self._loop.create_task(self._look(suspects))

    async def _look(self, ranks: list[int]) -> None:
        looks = await self._fleet.look(ranks, self._timeout_s / 3)
        for rank in ranks:
            look = looks.get(rank)
            if look is None:
                self._policy.unreachable(rank)
            else:
                self._policy.looked(rank, look.cpu_s, look.waited_s, look.is_stopped, self._loop.time())
