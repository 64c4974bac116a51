"""TCP connections between the processes of a Trainer: a token opens them, and length-prefixed pickles travel on them.

`Listener` is the end that accepts: it runs in an asyncio loop, binds one address of its node, and checks the token first.
`connect` is the other end. Both ends belong to raysgd and have shown the token, so messages are pickles.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import os
import pickle
import secrets
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TOKEN_BYTES = 32
#: What follows the token: the length of a JSON object that says what is wanted.
HELLO_LENGTH = struct.Struct("!H")

_DESCRIPTORS = "/proc/self/fd"
_TCP_RTO_MAX_MS = 44  # of Linux 6.15; Python has no name for it
_RTO_MAX_MS = 1000
_GIVE_UP_MS = 924_600  # the kernel's default: what 15 tries take with pauses that double
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a peer that is cut off is noticed in 25 s


@dataclass(frozen=True)
class Endpoint:
    """An address and the token that opens it. It travels through Ray only; its repr hides the token."""

    host: str
    port: int
    token: bytes = field(repr=False)


def connect(endpoint: Endpoint, hello: Mapping[str, object], timeout_s: float) -> socket.socket:
    """Return a connection that has sent its token and its hello; blocking, without a timeout.

    Raises:
        OSError: The address cannot be reached, or does not answer within ``timeout_s``.
    """
    data = json.dumps(dict(hello)).encode()
    line = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
    try:
        tune(line)
        line.sendall(endpoint.token + HELLO_LENGTH.pack(len(data)) + data)
        line.settimeout(None)
    except BaseException:
        line.close()
        raise
    return line


def tune(line: Any) -> None:
    """Make a socket (or asyncio's wrapper) send at once, and notice a peer that is cut off."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        with contextlib.suppress(AttributeError, OSError):  # not every system has them
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shorten_retransmissions() -> None:
    """Have the kernel send again what a peer has not acknowledged at most a second after the last try, on all TCP connections.

    While a cable is out, it waits twice as long after each try, so that a connection may be silent for as long as the cable was
    out when it is in again. Linux has the limit from 6.15 on, for each connection; other systems are left as they are, and so
    are connections that notice a silent peer by keepalives. None is given up earlier than before.
    """
    if (
        not _can_shorten() or socket.getdefaulttimeout() is not None
    ):  # a socket object would make the descriptor non-blocking
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):  # closed meanwhile, no socket, or not of TCP
                if os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                    with open_again(int(name)) as line:
                        _shorten(line)


def _shorten(line: socket.socket) -> None:
    if not line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):  # the number of tries is the limit: 15
        if line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):  # which a time limit would disable
            return
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GIVE_UP_MS)
    line.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MAX_MS)


def open_again(descriptor: int) -> socket.socket:
    """Return another socket object for a descriptor.

    Raises:
        OSError: It belongs to another file by now.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


@functools.cache
def _can_shorten() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError), socket.socket() as line:
        line.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MAX_MS)
        return True
    return False


_LENGTH = struct.Struct("!Q")
#: Longer than anything that is sent; a length above it means that the stream is out of step.
MAX_MESSAGE_BYTES = 1 << 30


def pack(message: Any) -> bytes:
    """Return ``message`` as it travels."""
    payload = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(payload)) + payload


def split_messages(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the pickles of the messages that are whole in ``data``, and the rest."""
    found, start = [], 0
    while len(data) - start >= _LENGTH.size:
        end = start + _LENGTH.size + _size(data[start : start + _LENGTH.size])
        if end > len(data):
            break
        found.append(data[start + _LENGTH.size : end])
        start = end
    return found, data[start:]


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Read the next message of an asyncio stream.

    Raises:
        EOFError: The stream ended, within a message or between two.
    """
    size = _size(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(size))


def receive_message(file: Any) -> Any:
    """Read the next message of a blocking stream (``socket.makefile("rb")``).

    Raises:
        EOFError: The stream ended, within a message or between two.
        OSError: The connection broke.
    """
    size = _size(file.read(_LENGTH.size))
    data: bytes = file.read(size)
    if len(data) < size:  # a buffered stream reads less only at its end
        raise EOFError("the connection ended")
    return pickle.loads(data)


def _size(header: bytes) -> int:
    if len(header) < _LENGTH.size:
        raise EOFError("the connection ended")
    (size,) = _LENGTH.unpack(header)
    if size > MAX_MESSAGE_BYTES:
        raise EOFError(f"a message of {size} bytes: the connection is out of step")
    return int(size)


_log = logging.getLogger(__name__)

#: Serves one connection: what the other end wants, and the stream both ways. Closing it is the listener's.
Handler = Callable[[dict[str, Any], asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

#: Bytes a connection may be ahead of its handler.
_READ_AHEAD_BYTES = 1 << 20
#: Connections that may wait to be accepted: all workers of a large group connect at the same moment, and one that finds the
#: queue full is tried again by its kernel after a second. The kernel of this node may allow fewer.
_MAX_CONNECTING = 16_384


class Listener:
    """Accepts connections and passes each to the handler of the ``kind`` that it names.

    Args:
        handlers: The handler of each kind of connection.
        hello_timeout_s: The time that a connection has to show its token and to name its kind.
    """

    def __init__(self, handlers: Mapping[str, Handler], hello_timeout_s: float = 10.0) -> None:
        self._handlers = dict(handlers)
        self._hello_timeout_s = hello_timeout_s
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> Endpoint:
        """Listen on a free port of ``host``, an address of this node.

        Raises:
            OSError: The address cannot be bound.
        """
        self._server = await asyncio.start_server(
            self._accept, host, 0, limit=_READ_AHEAD_BYTES, backlog=_MAX_CONNECTING
        )
        return Endpoint(host, int(self._server.sockets[0].getsockname()[1]), self._token)

    def close(self) -> None:
        """Accept no more connections; open ones stay open."""
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await asyncio.wait_for(self._greet(reader), self._hello_timeout_s)
            handler = self._handlers[hello["kind"]]
            tune(writer.get_extra_info("socket"))
            await handler(hello, reader, writer)
        except Exception as error:
            # The other end is gone, has no token, or asked for something unknown. It asks through Ray next, and gets the reason.
            _log.debug("a connection ended: %r", error)
        finally:
            with contextlib.suppress(Exception):
                writer.close()

    async def _greet(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        """Return the hello of the other end.

        Raises:
            PermissionError: It does not know the token.
            ValueError, TypeError: What follows the token is not a JSON object.
        """
        if not hmac.compare_digest(await reader.readexactly(TOKEN_BYTES), self._token):
            raise PermissionError("the token is wrong")
        (size,) = HELLO_LENGTH.unpack(await reader.readexactly(HELLO_LENGTH.size))
        return dict(json.loads(await reader.readexactly(size)))
