"""Where a `Listener` listens, and how to get there."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TOKEN_BYTES = 32
#: What follows the token: the length of a JSON object that says what is wanted.
HELLO_LENGTH = struct.Struct("!H")

_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a peer that is cut off is noticed in 25 s


@dataclass(frozen=True)
class Endpoint:
    """An address and the token that opens it. Handed out through Ray alone; its repr keeps the token."""

    host: str
    port: int
    token: bytes = field(repr=False)


def connect(endpoint: Endpoint, hello: Mapping[str, object], timeout_s: float) -> socket.socket:
    """A connection that has shown its token and said what it wants; blocking, without a timeout of its own.

    Raises:
        OSError: There is no way there, or nobody answers within ``timeout_s``.
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
    """Make a socket (or what asyncio shows of one) send at once, and notice a peer that is cut off."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        with contextlib.suppress(AttributeError, OSError):  # not every system has them
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
