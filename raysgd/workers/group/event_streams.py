"""Reads each worker's events in order, from its connection and from its Ray stream. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from raysgd.session.events import Marked, WorkerEvent
from raysgd.transport import Endpoint
from raysgd.workers.events_connection import VALUE_FOLLOWS, Batch, Inbox, InboxAddress, Inboxes
from raysgd.workers.liveness.death_reasons import DEATHS
from raysgd.workers.orders import AttemptOrder, Blob

#: Items that a worker's Ray stream may be ahead of the controller before the worker waits.
_STREAM_AHEAD = 64
#: Seconds to read what the connection of a dead worker still holds.
_DRAIN_S = 1.0

#: Returns why a worker died, given Ray's error.
ExplainDeath = Callable[[BaseException], Awaitable[str]]


class WorkerDied(Exception):
    """A worker's process is gone; the text says why."""


class WorkerStreams:
    """Starts attempts in workers and reads their events.

    Attributes:
        inboxes: Serves the connections of workers, of kind `raysgd.workers.events_connection.KIND`.
        endpoint: Where workers connect; None if everything travels through Ray.
    """

    def __init__(self) -> None:
        self.inboxes = Inboxes()
        self.endpoint: Endpoint | None = None
        self._open: dict[Any, Inbox] = {}

    async def read(
        self, handle: Any, run: Blob, order: AttemptOrder, explain_death: ExplainDeath
    ) -> AsyncIterator[list[WorkerEvent] | Any]:
        """Start an attempt in a worker; yield batches of events, and references to large return values.

        Args:
            handle: The worker's actor.
            run: A `RunOrder`, or a reference to one.
            order: The order for this attempt.
            explain_death: Called when the worker has died, while the events that it had sent are still read.

        Raises:
            WorkerDied: The process is gone.
        """
        key = secrets.token_hex(8)
        inbox = self.inboxes.open(key, order.flush_interval_s)
        address = None if self.endpoint is None else InboxAddress(self.endpoint, key)
        stream = handle.run.options(num_returns="streaming", _generator_backpressure_num_objects=_STREAM_AHEAD).remote(
            run, replace(order, inbox=address)
        )
        pump = asyncio.ensure_future(_pump(stream, inbox, explain_death))
        self._open[handle._actor_id] = inbox
        try:
            while (item := await inbox.items.get()) is not None and not isinstance(item, Exception):
                yield item
            if inbox.marks:
                yield [Marked(tuple(inbox.marks))]
            if item is not None:
                raise item
        finally:
            pump.cancel()
            self.inboxes.close(key)
            self._open.pop(handle._actor_id, None)

    def abandon(self, handle: Any) -> None:
        """End the stream of a worker whose process was ended, because Ray may need a minute to do so."""
        if (inbox := self._open.get(handle._actor_id)) is not None:
            inbox.items.put_nowait(WorkerDied("it was ended"))


async def _pump(stream: Any, inbox: Inbox, explain_death: ExplainDeath) -> None:
    """Put the items of a Ray stream into the inbox, which the connection fills too; at the end put None, or an error."""
    try:
        is_value = False
        async for ref in stream:
            if is_value:
                inbox.items.put_nowait(ref)
                is_value = False
                continue
            item = await ref
            if isinstance(item, Batch):
                inbox.put(item)
            is_value = item == VALUE_FOLLOWS
        if inbox.marks:
            await inbox.wait_drained(_DRAIN_S)
        inbox.items.put_nowait(None)
    except DEATHS as error:
        reason, _ = await asyncio.gather(explain_death(error), inbox.wait_drained(_DRAIN_S))
        inbox.items.put_nowait(WorkerDied(reason))
    except Exception as error:
        inbox.items.put_nowait(error)
