"""The end that is connected to: lives in an asyncio loop, binds one address of its node, and asks for the token first."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from raysgd.transport.endpoint import HELLO_LENGTH, TOKEN_BYTES, Endpoint, tune

_log = logging.getLogger(__name__)

#: Serves one connection: what the other end wants, and the stream both ways. Closing it is the listener's.
Handler = Callable[[dict[str, Any], asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

#: Seconds a connection has to show its token.
_HELLO_TIMEOUT_S = 10.0
#: Bytes a connection may be ahead of its handler.
_READ_AHEAD_BYTES = 1 << 20


class Listener:
    """Accepts connections and hands each to the handler of the ``kind`` it names."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = dict(handlers)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> Endpoint:
        """Listen on a free port of ``host``, an address of this node.

        Raises:
            OSError: The address cannot be bound.
        """
        self._server = await asyncio.start_server(self._accept, host, 0, limit=_READ_AHEAD_BYTES)
        return Endpoint(host, int(self._server.sockets[0].getsockname()[1]), self._token)

    def close(self) -> None:
        """Accept no more; connections that are open go on."""
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await asyncio.wait_for(self._greet(reader), _HELLO_TIMEOUT_S)
            handler = self._handlers.get(str(hello.get("kind"))) if hello is not None else None
            if hello is not None and handler is not None:
                tune(writer.get_extra_info("socket"))
                await handler(hello, reader, writer)
        except Exception as error:
            # The other end went away, or asked for what there is not: it learns that through Ray, where it asks next.
            _log.debug("a connection ended: %r", error)
        finally:
            with contextlib.suppress(Exception):
                writer.close()

    async def _greet(self, reader: asyncio.StreamReader) -> dict[str, Any] | None:
        """What the other end wants; None for one that does not know the token."""
        if not hmac.compare_digest(await reader.readexactly(TOKEN_BYTES), self._token):
            return None
        (size,) = HELLO_LENGTH.unpack(await reader.readexactly(HELLO_LENGTH.size))
        try:
            hello = json.loads(await reader.readexactly(size))
        except ValueError:
            return None
        return hello if isinstance(hello, dict) else None
