"""Carries a worker's events to the controller: over a connection if there is one, else through the worker's Ray stream.

Batches are numbered. The worker seldom asks for an acknowledgement, and the controller answers with the next number that it
expects. If the connection breaks, all batches that were not acknowledged, and all later ones, become items of the worker's Ray
stream, with the same numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from raysgd.session.events import NUM_MARKS, Mark, WorkerEvent, add_mark
from raysgd.transport import Endpoint, connect, pack, read_message

#: Seconds to connect, and to wait for an acknowledgement, before Ray's stream is used.
CONNECT_TIMEOUT_S = 3.0
ACK_TIMEOUT_S = 20.0
#: The sender waits at this number of unacknowledged bytes; it asks for an acknowledgement after these batches or bytes.
MAX_UNACKNOWLEDGED_BYTES = 32 << 20
ASK_AFTER_BATCHES = 64
ASK_AFTER_BYTES = 1 << 20

_ACK = struct.Struct("!Q")
#: The message by which the sender asks for an acknowledgement.
_ASK = pack(None)
#: In a worker's Ray stream: the next item is a large return value of train_func.
VALUE_FOLLOWS = "value"
#: Kind of the connection in its hello.
KIND = "events"


@dataclass(frozen=True)
class Batch:
    """Some events of one worker, as they travel."""

    number: int
    events: list[WorkerEvent]


@dataclass(frozen=True)
class InboxAddress:
    """Where a worker sends its events of one attempt: a listener, and the key of the inbox there."""

    endpoint: Endpoint
    key: str


class EventSender:
    """The worker's end. Used by the stream's thread only.

    Args:
        inbox: Where to connect; None if there is no connection.
        on_problem: Called when events begin to travel through Ray, with the reason if it is a failure.
    """

    def __init__(
        self, inbox: InboxAddress | None, *, on_problem: Callable[[str | None], None] = lambda problem: None
    ) -> None:
        self._inbox = inbox
        self._on_problem = on_problem
        self._connection: socket.socket | None = None
        self._unacknowledged: deque[tuple[Batch, int]] = deque()
        self._unacknowledged_bytes = 0
        self._unasked_batches = 0
        self._unasked_bytes = 0
        self._acks = b""
        self._next_number = 0
        if inbox is None:
            on_problem(None)

    def send(self, events: list[WorkerEvent]) -> list[Batch]:
        """Send ``events``; return the batches that must be items of Ray's stream instead."""
        batch = Batch(self._next_number, events)
        self._next_number += 1
        if self._inbox is None:
            return [batch]
        data = pack(batch)
        self._unacknowledged.append((batch, len(data)))
        self._unacknowledged_bytes += len(data)
        self._unasked_batches += 1
        self._unasked_bytes += len(data)
        is_full = self._unacknowledged_bytes > MAX_UNACKNOWLEDGED_BYTES
        try:
            connection = self._connection or self._connect(self._inbox)
            connection.sendall(data)
            if is_full or self._unasked_batches >= ASK_AFTER_BATCHES or self._unasked_bytes >= ASK_AFTER_BYTES:
                self._ask(connection)
                self._read_acks(0)
            if is_full:
                self._await_acks(MAX_UNACKNOWLEDGED_BYTES // 2)
        except OSError as error:
            return self._switch_to_ray(self._inbox, error)
        return []

    def finish(self) -> list[Batch]:
        """Wait until everything is acknowledged; return the batches that must be items of Ray's stream instead."""
        if self._connection is None or self._inbox is None:
            return []
        try:
            self._ask(self._connection)
            self._await_acks(0)
        except OSError as error:
            return self._switch_to_ray(self._inbox, error)
        self._connection.close()
        return []

    def _ask(self, connection: socket.socket) -> None:
        connection.sendall(_ASK)
        self._unasked_batches = self._unasked_bytes = 0

    def _connect(self, inbox: InboxAddress) -> socket.socket:
        self._connection = connection = connect(inbox.endpoint, {"kind": KIND, "key": inbox.key}, CONNECT_TIMEOUT_S)
        connection.settimeout(ACK_TIMEOUT_S)
        return connection

    def _await_acks(self, until_bytes: int) -> None:
        deadline = time.monotonic() + ACK_TIMEOUT_S
        while self._unacknowledged and self._unacknowledged_bytes > until_bytes:
            if not self._read_acks(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no acknowledgement within {ACK_TIMEOUT_S:g} s")

    def _read_acks(self, timeout_s: float) -> bool:
        """Read the acknowledgements that arrive in time; return True if there were any."""
        assert self._connection is not None
        poll = select.poll()  # unlike select, it takes descriptors above 1023, which train_func may have opened before
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return False
        data = self._connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the controller closed the connection")
        self._acks += data
        complete = len(self._acks) // _ACK.size * _ACK.size
        if complete:
            (received,) = _ACK.unpack_from(self._acks, complete - _ACK.size)
            self._acks = self._acks[complete:]
            while self._unacknowledged and self._unacknowledged[0][0].number < received:
                self._unacknowledged_bytes -= self._unacknowledged.popleft()[1]
        return True

    def _switch_to_ray(self, inbox: InboxAddress, error: OSError) -> list[Batch]:
        self._inbox = None
        self._on_problem(
            f"no connection to the controller at {inbox.endpoint.host}:{inbox.endpoint.port} "
            f"({type(error).__name__}: {error}); reports travel through Ray's streams, a few milliseconds slower"
        )
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        batches = [batch for batch, _ in self._unacknowledged]
        self._unacknowledged.clear()
        return batches


class MarkSender:
    """Sends the marks of a rank at once, over a connection of their own. For train_func's thread.

    What was sent outlives the process.
    Without a connection no marks are sent, and the next attempt starts from a checkpoint if this process dies.
    """

    def __init__(self, inbox: InboxAddress | None) -> None:
        self._inbox = inbox
        self._connection: socket.socket | None = None

    def send(self, mark: Mark) -> None:
        if self._inbox is None:
            return
        try:
            if self._connection is None:
                hello = {"kind": KIND, "key": self._inbox.key}
                self._connection = connect(self._inbox.endpoint, hello, CONNECT_TIMEOUT_S)
                self._connection.settimeout(ACK_TIMEOUT_S)
            self._connection.sendall(pack(mark))
        except OSError:
            self.close()

    def close(self) -> None:
        """Send no more marks."""
        self._inbox = None
        if self._connection is not None:
            self._connection.close()


class Inbox:
    """The controller's end of one worker's events: batches in order, each once, over the connection or through Ray.

    Attributes:
        items: The events of each batch, and other items.
        marks: The last marks, oldest first.
    """

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.marks: deque[Mark] = deque(maxlen=NUM_MARKS)
        self._next_number = 0
        self._connections: set[asyncio.StreamWriter] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, batch: Batch) -> None:
        """Add a batch; one that arrived before is dropped."""
        if batch.number == self._next_number:
            self._next_number += 1
            self.items.put_nowait(batch.events)

    def put_mark(self, mark: Mark) -> None:
        """Add a mark."""
        add_mark(self.marks, mark if mark.small is not None else replace(mark, small=self.marks[-1].small))

    async def wait_drained(self, timeout_s: float) -> None:
        """Wait until everything that a dead worker's connections still hold is in the queue."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive the batches of one connection until it ends, and answer its requests for an acknowledgement."""
        self._connections.add(writer)
        self._idle.clear()
        try:
            while True:
                batch = await read_message(reader)
                if isinstance(batch, Mark):
                    self.put_mark(batch)
                elif batch is None:
                    writer.write(_ACK.pack(self._next_number))
                else:
                    self.put(batch)
        finally:
            self._connections.discard(writer)
            if not self._connections:
                self._idle.set()

    def close(self) -> None:
        """Close the connections, because nobody reads them any more; an abandoned worker may still send."""
        for connection in self._connections:
            connection.close()


class Inboxes:
    """The inboxes that workers may connect to, by key; `handle` serves their connections."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}

    def open(self, key: str) -> Inbox:
        inbox = self._inboxes[key] = Inbox()
        return inbox

    def close(self, key: str) -> None:
        inbox = self._inboxes.pop(key, None)
        if inbox is not None:
            inbox.close()

    def handle(
        self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Awaitable[None]:
        """Serve a connection; a key that is not known, such as that of an attempt that is over, is a KeyError."""
        return self._inboxes[str(hello.get("key"))].serve(reader, writer)
