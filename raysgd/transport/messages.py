"""Messages on a byte stream: eight bytes of length, then a pickle. Both ends belong to raysgd and have shown it."""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any, Protocol

_LENGTH = struct.Struct("!Q")
#: Longer than anything that is sent; a length above it means that the stream is out of step.
MAX_MESSAGE_BYTES = 1 << 30


class Writer(Protocol):
    """An `asyncio.StreamWriter`, or a test's."""

    def write(self, data: bytes) -> None: ...


class Readable(Protocol):
    """What ``socket.makefile("rb")`` gives: reads as much as is asked for, less only at the end."""

    def read(self, size: int, /) -> bytes: ...


def pack(message: Any) -> bytes:
    """``message`` as it goes over the wire."""
    payload = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(payload)) + payload


def write_message(writer: Writer, message: Any) -> None:
    """Put ``message`` into an asyncio stream."""
    writer.write(pack(message))


async def read_message(reader: asyncio.StreamReader) -> Any:
    """The next message of an asyncio stream.

    Raises:
        EOFError: The stream ended, within a message or between two.
    """
    size = _size(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(size))


def receive_message(file: Readable) -> Any:
    """The next message of a blocking stream (``socket.makefile("rb")``).

    Raises:
        EOFError: The stream ended, within a message or between two.
        OSError: The connection broke.
    """
    size = _size(_exactly(file, _LENGTH.size))
    return pickle.loads(_exactly(file, size))


def _exactly(file: Readable, size: int) -> bytes:
    data: bytes = file.read(size)
    if len(data) < size:
        raise EOFError("the connection ended")
    return data


def _size(header: bytes) -> int:
    (size,) = _LENGTH.unpack(header)
    if size > MAX_MESSAGE_BYTES:
        raise EOFError(f"a message of {size} bytes: the connection is out of step")
    return int(size)
