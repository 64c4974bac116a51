"""The class API: an instance of the user's class on each worker, and functions called with them. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

from raysgd.errors import UsageError, WorkerError
from raysgd.workers.group.group import WorkerGroup
from raysgd.workers.orders import Blob
from raysgd.workers.pickling import find_root_cause


class GroupInstances:
    """The instances of one group.

    Args:
        abort_grace_s: Seconds for the other constructors to fail after one has failed.
    """

    def __init__(self, group: WorkerGroup, abort_grace_s: float) -> None:
        self._group = group
        self._abort_grace_s = abort_grace_s
        self.are_live = False

    async def make(self, blob: Blob) -> None:
        """Form a group of the workers, which are ready, and make an instance on each.

        Raises:
            Exception: What the constructor raised.
        """
        rendezvous = await self._group.open_rendezvous()
        members = [self._group.member(rank, rendezvous) for rank in range(self._group.size)]
        calls = [
            asyncio.ensure_future(self._group.call("make_instance", blob, member, ranks=[member.rank]))
            for member in members
        ]
        try:
            with self._group.watching():
                await asyncio.gather(*calls)
        except Exception as error:
            await self._leave_constructors(calls)
            raise find_root_cause(error, calls) from None
        self.are_live = True

    async def execute(self, blob: Blob, *, first_only: bool, has_class: bool) -> list[bytes]:
        """Call a function on the workers, with their instances if ``has_class``; returns pickles of the values, by rank.

        Raises:
            WorkerError: An earlier process of the controller had the instances.
            UsageError: An instance was lost with its worker.
        """
        if not self.are_live:
            if has_class:
                raise WorkerError(
                    "the Trainer's controller process died, and the instances with it; call start() again."
                )
            await self._group.get_ready()
        elif any(self._group.info(rank) is None for rank in range(self._group.size)):
            raise UsageError("an instance was lost with its worker; call start(...) to make new ones on all workers")
        with self._group.watching():
            return await self._group.call("execute", blob, self.are_live, ranks=[0] if first_only else None)

    async def drop(self) -> None:
        """Drop the instances."""
        if self.are_live:
            await self._group.call("drop_instance")
            self.are_live = False

    async def _leave_constructors(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Wait for the other constructors, which may wait in a collective for the failed one; kill workers that stay there."""
        await asyncio.wait(calls, timeout=self._abort_grace_s)
        for rank, call in enumerate(calls):
            if not call.done():
                self._group.kill(rank)
        with contextlib.suppress(RayError):
            await self._group.call("drop_instance")
