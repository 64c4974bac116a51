"""Makes all ranks of an attempt stop or leave at the same place of their loops. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError

from raysgd.errors import WorkerDiedError
from raysgd.session.events import AtSavePoint


class RankAgreement:
    """Makes all ranks of an attempt stop or leave at the same place of their loops.

    It holds the ranks, which returns how far each has come, and then releases them up to the furthest place: see
    `raysgd.session.gates` for the workers' side. The death of a rank in between ends the attempt anyway.

    Args:
        call: Calls a method of all worker actors with the given arguments; returns the results by rank.
    """

    def __init__(self, call: Callable[..., Awaitable[list[Any]]]) -> None:
        self._call = call
        self._one_at_a_time = asyncio.Lock()  # nothing may release the ranks that another call holds

    async def stop(self, attempt: int, *, ends_reports: bool) -> None:
        """Make ``should_stop()`` return True for all ranks at the same place.

        Args:
            attempt: The attempt's number.
            ends_reports: Ranks that do not call ``should_stop()`` leave at a report.
        """
        async with self._one_at_a_time:
            with contextlib.suppress(WorkerDiedError, RayError):
                places = await self._call("hold", attempt)
                checks, reports = (max(place[i] for place in places) for i in (0, 1))
                await self._call("stop_from", attempt, checks, reports if ends_reports else None)

    async def save(self, attempt: int, point: int) -> None:
        """Make all ranks leave after the same save, as request ``point``."""
        async with self._one_at_a_time:
            with contextlib.suppress(WorkerDiedError, RayError):
                last = max(await self._call("hold_saves", attempt))
                await self._call("leave_after", attempt, AtSavePoint(last, point))

    async def call_off_save(self, attempt: int) -> None:
        """Cancel `save`: the ranks leave after no save."""
        async with self._one_at_a_time:
            with contextlib.suppress(WorkerDiedError, RayError):
                await self._call("leave_after", attempt, None)
