"""Carries a worker's events to the controller: over a connection if there is one, else through the worker's Ray stream.

Batches are numbered. The worker seldom asks for an acknowledgement, and the controller answers with the next number that it
expects. If the connection breaks, all batches that were not acknowledged, and all later ones, become items of the worker's Ray
stream, with the same numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.session.events import NUM_MARKS, Mark, WorkerEvent, add_mark
from raysgd.transport import Endpoint, connect, pack, read_message, split_messages

#: Seconds to connect, and to wait for an acknowledgement, before Ray's stream is used.
CONNECT_TIMEOUT_S = 3.0
ACK_TIMEOUT_S = 20.0
#: The sender waits at this number of unacknowledged bytes; it asks for an acknowledgement after these batches or bytes.
MAX_UNACKNOWLEDGED_BYTES = 32 << 20
ASK_AFTER_BATCHES = 64
ASK_AFTER_BYTES = 1 << 20
#: Marks in a row that leave out what belongs to the rank, because it is as before: the newest ones say it, whatever is skipped.
MAX_WITHOUT_SMALL = 16

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

    What was sent outlives the process. The controller reads at intervals; a mark that does not fit in the connection meanwhile is
    dropped. Without a connection no marks are sent, and the next attempt starts from a checkpoint if this process dies.
    """

    def __init__(self, inbox: InboxAddress | None) -> None:
        self._inbox = inbox
        self._connection: socket.socket | None = None
        self._unsent = b""
        self._small: bytes | None = None  # that was sent last
        self._num_without = 0  # marks since

    def send(self, mark: Mark) -> None:
        if self._inbox is None:
            return
        try:
            if self._connection is None:
                hello = {"kind": KIND, "key": self._inbox.key, "is_of_marks": True}
                self._connection = connect(self._inbox.endpoint, hello, CONNECT_TIMEOUT_S)
                self._connection.setblocking(False)
            if self._unsent:
                self._send(self._connection)
            if self._unsent:
                self._small = None
                return
            is_known = mark.small == self._small and self._num_without < MAX_WITHOUT_SMALL
            self._num_without = self._num_without + 1 if is_known else 0
            self._small = mark.small
            self._unsent = pack(Mark(mark.step, None, mark.is_in_step, mark.is_settled) if is_known else mark)
            self._send(self._connection)
        except OSError:
            self.close()

    def _send(self, connection: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[connection.send(self._unsent) :]

    def close(self) -> None:
        """Send no more marks."""
        self._inbox = None
        if self._connection is not None:
            self._connection.close()


def newest_marks(messages: Sequence[bytes], small: bytes | None) -> list[Mark]:
    """Return the marks that count among those of so many messages, oldest first, of which not all are unpacked.

    Args:
        messages: Marks of which some leave out what belongs to the rank, if it is as in the one before.
        small: What belongs to the rank after the mark before these.
    """
    newest: list[Mark] = []  # first
    num_whole = 0
    for message in reversed(messages):
        mark: Mark = pickle.loads(message)
        if not (newest and mark.is_in_step and newest[-1].is_in_step):
            newest.append(mark)
        if mark.small is not None:
            newest[num_whole:] = [replace(each, small=mark.small) for each in newest[num_whole:]]
            num_whole = len(newest)
            if num_whole >= NUM_MARKS:
                break
    newest[num_whole:] = [replace(each, small=small) for each in newest[num_whole:]]
    return newest[::-1]


class Inbox:
    """The controller's end of one worker's events: batches in order, each once, over the connection or through Ray.

    Args:
        interval_s: The time between two reads of its marks.

    Attributes:
        items: The events of each batch, and other items.
        marks: The last marks, oldest first.
    """

    def __init__(self, interval_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._is_draining = False
        self._pause: asyncio.Future[None] | None = None  # of the connection of marks
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

    async def wait_drained(self, timeout_s: float) -> None:
        """Wait until everything that a dead worker's connections still hold is in the queue."""
        self._is_draining = True
        if self._pause is not None:
            _end_pause(self._pause)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive the batches of one connection until it ends, and answer its requests for an acknowledgement."""
        with self._open(writer):
            while True:
                batch = await read_message(reader)
                if batch is None:
                    writer.write(_ACK.pack(self._next_number))
                else:
                    self.put(batch)

    async def serve_marks(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive the marks of one connection until it ends. All that come in an interval cost one read, and most are skipped."""
        loop, unread = asyncio.get_running_loop(), b""
        with self._open(writer):
            while data := await reader.read(1 << 20):
                messages, unread = split_messages(unread + data)
                for mark in newest_marks(messages, self.marks[-1].small if self.marks else None):
                    add_mark(self.marks, mark)
                if not self._is_draining:
                    writer.transport.pause_reading()  # type: ignore[attr-defined]
                    self._pause = loop.create_future()
                    timer = loop.call_later(self._interval_s, _end_pause, self._pause)
                    await self._pause
                    timer.cancel()
                    writer.transport.resume_reading()  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def _open(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._connections.add(writer)
        self._idle.clear()
        try:
            yield
        finally:
            self._connections.discard(writer)
            if not self._connections:
                self._idle.set()

    def close(self) -> None:
        """Close the connections, because nobody reads them any more; an abandoned worker may still send."""
        for connection in self._connections:
            connection.close()


def _end_pause(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


class Inboxes:
    """The inboxes that workers may connect to, by key; `handle` serves their connections."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}

    def open(self, key: str, interval_s: float = 0.0) -> Inbox:
        inbox = self._inboxes[key] = Inbox(interval_s)
        return inbox

    def close(self, key: str) -> None:
        inbox = self._inboxes.pop(key, None)
        if inbox is not None:
            inbox.close()

    def handle(
        self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Awaitable[None]:
        """Serve a connection; a key that is not known, such as that of an attempt that is over, is a KeyError."""
        inbox = self._inboxes[str(hello.get("key"))]
        return inbox.serve_marks(reader, writer) if hello.get("is_of_marks") else inbox.serve(reader, writer)
