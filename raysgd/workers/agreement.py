"""All ranks of an attempt agree on a place in their work. Runs in the TrainerActor.

The ranks are held, which tells how far each has come, and then let go up to a place that none of them has reached: see
`raysgd.session.stopping` and `raysgd.session.savegate`, the workers' side. A rank that dies meanwhile ends the attempt anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError

from raysgd.errors import WorkerDiedError

#: Seconds until train_func is told again that its group is to change, where it could not be told.
ASK_AGAIN_S = 0.5


class Agreement:
    """Of the group's members.

    Args:
        call: Calls a method of all worker actors, with its arguments; results by rank.
    """

    def __init__(self, call: Callable[..., Awaitable[list[Any]]]) -> None:
        self._call = call
        self._stopping = asyncio.Lock()  # one lets the ranks go that another has held
        self._num_asked = 0

    async def stop(self, attempt: int, *, ends_reports: bool) -> None:
        """Have all ranks find ``should_stop()`` true at the same place.

        Args:
            attempt: Its number.
            ends_reports: Who does not look leaves at a report.
        """
        async with self._stopping:
            await self._stop(attempt, ends_reports)

    async def save(self, attempt: int) -> None:
        """Have all ranks leave after the same save."""
        with contextlib.suppress(WorkerDiedError, RayError):
            await self._call("leave_after", attempt, max(await self._call("hold_saves", attempt)))

    async def call_off_save(self, attempt: int) -> None:
        """They leave after none."""
        self.forget()
        with contextlib.suppress(WorkerDiedError, RayError):
            await self._call("leave_after", attempt, None)

    def forget(self) -> None:
        """The ranks leave for another reason: nobody is asked any more to leave for another group."""
        self._num_asked += 1

    async def change_group(self, attempt: int, *, stops: bool = False) -> None:
        """Have train_func leave its group inside, when it can; rank 0's tells the others.

        Where it cannot, it leaves out of the next save, or, where it ``stops``, by ``should_stop()``.
        """
        self.forget()
        asked = self._num_asked
        with contextlib.suppress(WorkerDiedError, RayError):
            is_told = all(await self._call("change_group", attempt, ranks=[0]))
            if not is_told:
                if stops:
                    await self.stop(attempt, ends_reports=False)
                await self.save(attempt)
            while not is_told:  # it may come to where it can before it saves
                await asyncio.sleep(ASK_AGAIN_S)
                is_told = asked != self._num_asked or all(await self._call("change_group", attempt, ranks=[0]))

    async def _stop(self, attempt: int, ends_reports: bool) -> None:
        with contextlib.suppress(WorkerDiedError, RayError):
            places = await self._call("hold", attempt)
            looks, reports = (max(place[i] for place in places) for i in (0, 1))
            await self._call("stop_from", attempt, looks, reports if ends_reports else None)
