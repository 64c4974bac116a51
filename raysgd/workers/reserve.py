"""The processes a group has beside its members: spares, and newcomers of an elastic group. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from ray.exceptions import RayError

from raysgd.workers.newcomers import Newcomers
from raysgd.workers.process import Worker, WorkerStarter
from raysgd.workers.seats import Seats

#: Seconds one has to say that it is there, when it is needed.
_ANSWER_S = 1.0
#: Seconds between two looks for newcomers that are up.
_LOOK_S = 0.1


class Reserve:
    """Those who can take the place of a member.

    Args:
        num_spares: How many are kept up for that alone.
        newcomers: Those who are to become members as well; None for a group that keeps its size.
        end: Ends a process, wherever it stands.
        avoid: Nodes that nobody is taken from.
    """

    def __init__(
        self,
        seats: Seats,
        starter: WorkerStarter,
        num_spares: int,
        newcomers: Newcomers | None,
        end: Callable[[Worker], None],
        avoid: Collection[str],
    ) -> None:
        self._seats = seats
        self._starter = starter
        self._num_spares = num_spares
        self._end = end
        self._avoid = avoid
        self._spares: list[Worker] = []
        self.newcomers = newcomers

    @property
    def num_ready(self) -> int:
        """Newcomers that are up."""
        return self.newcomers.num_ready if self.newcomers is not None else 0

    def on_newcomer(self, told: Callable[[], None]) -> None:
        """Have ``told`` called for each newcomer that comes up."""
        if self.newcomers is not None:
            self.newcomers.on_ready = told

    def all(self) -> list[Worker]:
        return [*self._spares, *(self.newcomers.all() if self.newcomers is not None else [])]

    async def take(self) -> Worker | None:
        """One that is up, a spare if there is one; those that turn out to be dead, or on a node to avoid, are dropped."""
        while self._spares:
            spare = self._spares[0]
            is_fit = await self._is_fit(spare)
            self._spares.remove(spare)
            if is_fit:
                return spare
            self._let_go(spare)
        return await self.take_newcomer()

    async def take_newcomer(self) -> Worker | None:
        """A newcomer that is up."""
        while self.newcomers is not None and (worker := self.newcomers.take()) is not None:
            is_fit = False
            try:
                is_fit = await self._is_fit(worker)
            finally:
                if not is_fit:  # or nobody waits for the answer any more
                    self._end(worker)
                    self._seats.remove(worker.seat)
            if is_fit:
                return worker
        return None

    async def find(self) -> Worker:
        """One for whom there was none up and no free seat: in a seat that is found, or a newcomer that comes up first."""
        finding = asyncio.ensure_future(self._seats.find(self._avoid))
        newcomer: Worker | None = None
        try:
            while newcomer is None and not finding.done():
                newcomer = await self.take_newcomer()
                if newcomer is None:
                    await asyncio.wait([finding], timeout=_LOOK_S)
        finally:
            finding.cancel()  # which does nothing to one that has ended
        if newcomer is None:
            return self._starter.start(finding.result())
        if finding.done():
            self._seats.remove(finding.result())
        return newcomer

    def replenish(self) -> None:
        """Start spares in the seats that are free, while the members work."""
        while len(self._spares) < self._num_spares and (seat := self._seats.take(self._avoid)) is not None:
            self._spares.append(self._starter.start(seat, warm_up=True))

    def drop(self, worker: Worker) -> bool:
        """Forget one that has died; whether it was one of these. Its seat is free if it was a spare's."""
        if worker in self._spares:
            self._spares.remove(worker)
            return True
        if self.newcomers is not None and worker in self.newcomers.all():
            self.newcomers.drop(worker)
        return False

    def leave(self, nodes: Collection[str]) -> None:
        """Let go of newcomers on these nodes; a spare is not taken from there, which `take` sees to."""
        for worker in list(self.newcomers.all() if self.newcomers is not None else []):
            if self.newcomers is not None and worker.info is not None and worker.info.node_id in nodes:
                self.newcomers.drop(worker)

    def close(self) -> None:
        """End them all."""
        if self.newcomers is not None:
            self.newcomers.close()
        for spare in self._spares:
            self._let_go(spare)
        self._spares.clear()

    async def _is_fit(self, worker: Worker) -> bool:
        """Whether it is alive, and where it may stay."""
        try:
            worker.info = await asyncio.wait_for(worker.handle.describe.remote(), _ANSWER_S)
        except (RayError, asyncio.TimeoutError):
            return False
        return worker.info is not None and worker.info.node_id not in self._avoid

    def _let_go(self, worker: Worker) -> None:
        self._end(worker)
        self._seats.give_back(worker.seat)
