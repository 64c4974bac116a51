"""Calls to Ray's global control service (GCS), outside of the event loop. For the TrainerActor.

Such a call blocks for as long as the GCS cannot be reached, without a limit: to list nodes, to request or remove placement
groups, to start an actor with a name, to kill one, to use the key-value store. On the event loop it would stop the
TrainerActor, with all runs and readers. So each is made in a thread; a coroutine waits for the answer, and can be cancelled.
Calls that must be made in an order wait for each other: after a cut, one may be answered long before another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from raysgd._util.logs import get_logger

T = TypeVar("T")

#: More than wait at the same time, unless the GCS is away: a call that gets no answer holds up no other one.
_NUM_THREADS = 32

_threads = ThreadPoolExecutor(_NUM_THREADS, "raysgd-gcs")


async def call_cluster(call: Callable[..., T], *args: Any, on_abandoned: Callable[[T], object] | None = None) -> T:
    """Make a call to the GCS; return its result.

    Args:
        call: Made in a thread.
        *args: What it is given.
        on_abandoned: Called with the result, in that thread, if the caller was cancelled before it had the result.

    Raises:
        Exception: What the call raised.
    """
    making = _threads.submit(call, *args)
    try:
        return await asyncio.wrap_future(making)
    except asyncio.CancelledError:
        if on_abandoned is not None:
            making.add_done_callback(lambda done: _abandon(done, on_abandoned))
        raise


def post_to_cluster(call: Callable[..., object], *args: Any) -> None:
    """Make a call to the GCS whose result nobody needs; returns at once. An error is logged."""
    _threads.submit(call, *args).add_done_callback(_log_error)


def _abandon(done: Future[T], on_abandoned: Callable[[T], object]) -> None:
    if not done.cancelled() and done.exception() is None:
        on_abandoned(done.result())


def _log_error(done: Future[Any]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        get_logger().debug("a call to Ray failed", exc_info=error)
