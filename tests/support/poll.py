"""Wait for a condition with a deadline, or for the tasks of an asyncio loop, instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], timeout_s: float, interval_s: float = 0.05) -> T:
    """Call `condition` until it is truthy or `timeout_s` have passed; return its last value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(interval_s)
    return value


async def until_async(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until `condition` is truthy while the tasks of the asyncio loop run.

    Raises:
        TimeoutError: It is not in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not become true")
        await asyncio.sleep(0.001)


async def turn_loop(turns: int = 20) -> None:
    """Let the tasks of the asyncio loop run as far as they can without waiting; ``turns`` is more than they need."""
    for _ in range(turns):
        await asyncio.sleep(0)
