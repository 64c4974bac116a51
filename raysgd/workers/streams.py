"""What workers say while they run, as the TrainerActor reads it: over connections and through Ray, in one sequence each."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from raysgd.session.events import WorkerEvent
from raysgd.transport import Endpoint
from raysgd.workers.deaths import DEATHS
from raysgd.workers.orders import AttemptOrder, Blob
from raysgd.workers.uplink import VALUE_FOLLOWS, Batch, Inbox, Inboxes, Place

#: Items a worker's Ray stream may be ahead of the controller before it waits.
_STREAM_AHEAD = 64
#: Seconds for what a dead worker's connection still holds to be read.
_DRAIN_S = 0.2

#: Says why a worker died, given Ray's error.
Why = Callable[[BaseException], Awaitable[str]]


class WorkerDied(Exception):
    """A worker's process is gone; the text says why."""


class WorkerStreams:
    """Starts attempts in workers, and reads them.

    Attributes:
        inboxes: Takes the connections of workers, of kind `raysgd.workers.uplink.KIND`.
        endpoint: Where workers connect to; None: all comes through Ray.
    """

    def __init__(self) -> None:
        self.inboxes = Inboxes()
        self.endpoint: Endpoint | None = None
        self._open: dict[Any, Inbox] = {}

    async def read(
        self, handle: Any, run: Blob, order: AttemptOrder, why: Why
    ) -> AsyncIterator[list[WorkerEvent] | Any]:
        """Start an attempt in the worker ``handle``: batches of events, and references to large values.

        Args:
            handle: The actor.
            run: The run's order.
            order: The attempt's.
            why: Asked when it has died, while what it had sent is still read.

        Raises:
            WorkerDied: The process is gone.
        """
        key = secrets.token_hex(8)
        inbox = self.inboxes.open(key)
        place = None if self.endpoint is None else Place(self.endpoint, key)
        stream = handle.run.options(num_returns="streaming", _generator_backpressure_num_objects=_STREAM_AHEAD).remote(
            run, replace(order, place=place)
        )
        pump = asyncio.ensure_future(_pump(stream, inbox, why))
        self._open[handle._actor_id] = inbox
        try:
            while (item := await inbox.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            pump.cancel()
            self.inboxes.close(key)
            self._open.pop(handle._actor_id, None)

    def abandon(self, handle: Any) -> None:
        """Nothing more is to be heard of the worker ``handle``, which was ended; Ray may take a minute to say so."""
        if (inbox := self._open.get(handle._actor_id)) is not None:
            inbox.put_other(WorkerDied("it was ended"))


async def _pump(stream: Any, inbox: Inbox, why: Why) -> None:
    """Put what comes through Ray with what comes over the worker's connection; at the end None, or an error."""
    try:
        is_value = False
        async for ref in stream:
            if is_value:
                inbox.put_other(ref)
                is_value = False
                continue
            item = await ref
            if isinstance(item, Batch):
                inbox.put(item)
            is_value = item == VALUE_FOLLOWS
        inbox.put_other(None)
    except DEATHS as error:
        reason, _ = await asyncio.gather(why(error), inbox.wait_drained(_DRAIN_S))
        inbox.put_other(WorkerDied(reason))
    except Exception as error:
        inbox.put_other(error)
