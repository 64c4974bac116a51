"""A worker's events on their way to the controller: over a connection where there is one, else through Ray's stream.

Batches are numbered. The controller acknowledges what it has when it is asked to, which is seldom; what is not acknowledged
when the connection breaks, and all that follows, becomes items of the worker's Ray stream, under the same numbers.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from raysgd.session.events import WorkerEvent
from raysgd.transport import Endpoint, connect, read_message
from raysgd.transport.messages import pack

#: Seconds to connect, and to wait for an acknowledgement, before Ray's stream takes over.
CONNECT_TIMEOUT_S = 3.0
ACK_TIMEOUT_S = 20.0
#: Bytes under way before the sender waits for the controller, and batches and bytes before it asks how far that is.
MAX_UNACKNOWLEDGED_BYTES = 32 << 20
ASK_AFTER_BATCHES = 64
ASK_AFTER_BYTES = 1 << 20

_ACK = struct.Struct("!Q")
#: What the sender sends to be told how far the controller is.
_ASK = pack(None)
#: In a worker's Ray stream: the next item is what train_func returned, which is large.
VALUE_FOLLOWS = "value"
#: Kind of the connection in its hello.
KIND = "events"


@dataclass(frozen=True)
class Batch:
    """Some events of one worker, as they travel."""

    number: int
    events: list[WorkerEvent]


@dataclass(frozen=True)
class Place:
    """Where a worker's events of one attempt are taken: a listener, and the key it knows this stream by."""

    endpoint: Endpoint
    key: str


class Uplink:
    """The worker's end. Used by the stream's thread alone.

    Args:
        place: Where to connect; None: there is no connection to be had.
    """

    def __init__(self, place: Place | None) -> None:
        self._place = place
        self._line: socket.socket | None = None
        self._unacknowledged: deque[tuple[Batch, int]] = deque()
        self._unacknowledged_bytes = 0
        self._unasked_batches = 0
        self._unasked_bytes = 0
        self._acks = b""
        self._next_number = 0
        #: Why events go through Ray although there is a place to connect to.
        self.problem: str | None = None

    @property
    def is_direct(self) -> bool:
        """Whether events go over the connection, as far as is known."""
        return self._place is not None and self.problem is None

    def send(self, events: list[WorkerEvent]) -> list[Batch]:
        """Send ``events`` on; returns the batches that must be items of Ray's stream instead."""
        batch = Batch(self._next_number, events)
        self._next_number += 1
        if not self.is_direct:
            return [batch]
        data = pack(batch)
        self._unacknowledged.append((batch, len(data)))
        self._unacknowledged_bytes += len(data)
        self._unasked_batches += 1
        self._unasked_bytes += len(data)
        is_full = self._unacknowledged_bytes > MAX_UNACKNOWLEDGED_BYTES
        try:
            line = self._connected()
            line.sendall(data)
            if is_full or self._unasked_batches >= ASK_AFTER_BATCHES or self._unasked_bytes >= ASK_AFTER_BYTES:
                self._ask(line)
                self._take_acks(0)
            if is_full:
                self._await_acks(MAX_UNACKNOWLEDGED_BYTES // 2)
        except OSError as error:
            return self._give_up(error)
        return []

    def finish(self) -> list[Batch]:
        """Wait until all is acknowledged; returns what must be items of Ray's stream instead."""
        if self._line is None:
            return []
        try:
            self._ask(self._line)
            self._await_acks(0)
        except OSError as error:
            return self._give_up(error)
        self._line.close()
        return []

    def _ask(self, line: socket.socket) -> None:
        line.sendall(_ASK)
        self._unasked_batches = self._unasked_bytes = 0

    def _connected(self) -> socket.socket:
        if self._line is None:
            assert self._place is not None
            hello = {"kind": KIND, "key": self._place.key}
            self._line = connect(self._place.endpoint, hello, CONNECT_TIMEOUT_S)
            self._line.settimeout(ACK_TIMEOUT_S)
        return self._line

    def _await_acks(self, until_bytes: int) -> None:
        deadline = time.monotonic() + ACK_TIMEOUT_S
        while self._unacknowledged and self._unacknowledged_bytes > until_bytes:
            if not self._take_acks(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no acknowledgement within {ACK_TIMEOUT_S:g} s")

    def _take_acks(self, timeout_s: float) -> bool:
        """Read what acknowledgements there are; whether there was one."""
        assert self._line is not None
        if not select.select([self._line], [], [], timeout_s)[0]:
            return False
        data = self._line.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the controller closed the connection")
        self._acks += data
        whole = len(self._acks) // _ACK.size * _ACK.size
        if whole:
            (received,) = _ACK.unpack_from(self._acks, whole - _ACK.size)
            self._acks = self._acks[whole:]
            while self._unacknowledged and self._unacknowledged[0][0].number < received:
                self._unacknowledged_bytes -= self._unacknowledged.popleft()[1]
        return True

    def _give_up(self, error: OSError) -> list[Batch]:
        assert self._place is not None
        self.problem = (
            f"no connection to the controller at {self._place.endpoint.host}:{self._place.endpoint.port} "
            f"({type(error).__name__}: {error}); reports go through Ray's streams, a few milliseconds slower"
        )
        if self._line is not None:
            self._line.close()
            self._line = None
        batches = [batch for batch, _ in self._unacknowledged]
        self._unacknowledged.clear()
        return batches


class Inbox:
    """The controller's end of one worker's events: batches in order, each once, whichever way they came."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._next_number = 0
        self._lines: set[asyncio.StreamWriter] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, batch: Batch) -> None:
        """Take a batch. One that came before is dropped."""
        if batch.number == self._next_number:
            self._next_number += 1
            self._queue.put_nowait(batch.events)

    def put_other(self, item: Any) -> None:
        """Take something that is no batch, in its place behind what is here."""
        self._queue.put_nowait(item)

    async def get(self) -> Any:
        """The next batch's events, or other item."""
        return await self._queue.get()

    async def wait_drained(self, timeout_s: float) -> None:
        """The worker has died: wait until what its connection still held is here."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            pass

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what comes over one connection, until it ends."""
        self._lines.add(writer)
        self._idle.clear()
        try:
            while True:
                batch = await read_message(reader)
                if batch is None:
                    writer.write(_ACK.pack(self._next_number))
                else:
                    self.put(batch)
        finally:
            self._lines.discard(writer)
            if not self._lines:
                self._idle.set()

    def close(self) -> None:
        """Nobody reads it any more: hang up on a worker that was given up and still talks."""
        for line in self._lines:
            line.close()


class Inboxes:
    """The inboxes that workers may connect to, by key; the handler of their connections."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}

    def open(self, key: str) -> Inbox:
        inbox = self._inboxes[key] = Inbox()
        return inbox

    def close(self, key: str) -> None:
        inbox = self._inboxes.pop(key, None)
        if inbox is not None:
            inbox.close()

    async def handle(self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inbox = self._inboxes.get(str(hello.get("key")))
        if inbox is not None:
            await inbox.serve(reader, writer)
