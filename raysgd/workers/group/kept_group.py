"""`KeptGroup`: the process group that workers keep from one run to the next. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from raysgd.backends.base import BackendConfig
from raysgd.workers.group.processes import Worker

#: The time for workers to leave their group; one that needs longer is found out when it is made ready.
_LEAVE_S = 5.0


class KeptGroup:
    """Ends the group of a run whose ranks have all returned, or keeps it for the next run with the same workers.

    Attributes:
        opened: The rendezvous of the newest group.
        rendezvous: The rendezvous of the group that the next attempt uses again; None: it needs a new group.
    """

    def __init__(self, backend: BackendConfig) -> None:
        self._keeps = backend.keeps_group
        self._members: list[Worker] = []
        self._leaving: asyncio.Future[list[bool]] | None = None
        self.opened = ""
        self.rendezvous: str | None = None

    async def leave(self, workers: Sequence[Worker]) -> None:
        """Make the workers of a run leave their group, unless all of them can stay in it."""
        self._members = list(workers)
        self._leaving = asyncio.ensure_future(_leave(workers, self._keeps))
        await self._leaving

    async def settle(self, workers: Sequence[Worker]) -> None:
        """Make the workers of the last run leave the group if the next attempt has others: set ``rendezvous``."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            await asyncio.wait([leaving], timeout=_LEAVE_S)
            stay = leaving.result() if leaving.done() else [False]
            self.rendezvous = self.opened if all(stay) else None
            if self._keeps and not all(stay):
                await self._end()
        if self.rendezvous is not None and self._members != list(workers):
            await self._end()

    def take(self) -> str | None:
        """Return ``rendezvous`` for an attempt, and keep nothing until the ranks have returned again."""
        taken, self.rendezvous = self.rendezvous, None
        return taken

    async def end(self) -> None:
        """Make the workers leave the group before their processes and the coordinator's are ended: its end would abort them."""
        if self._keeps:
            await self.settle([])

    async def _end(self) -> None:
        self.rendezvous = None
        await asyncio.wait([asyncio.ensure_future(_leave(self._members, False))], timeout=_LEAVE_S)


async def _leave(workers: Sequence[Worker], keeps_group: bool) -> list[bool]:
    """Make workers leave their group; return which of them stay in it. Dead ones do not."""
    calls = [asyncio.ensure_future(worker.handle.leave.remote(keeps_group)) for worker in workers]
    return [answer is True for answer in await asyncio.gather(*calls, return_exceptions=True)]
