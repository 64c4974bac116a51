"""A `Listener` in an asyncio loop of its own thread, for blocking tests, and a connection that breaks on request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from raysgd.transport import Endpoint, Handler, Listener

T = TypeVar("T")
_PATIENCE_S = 20.0


class Loop:
    """An asyncio loop that runs in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)

    def close(self) -> None:
        async def cancel_all() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.run(cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        self._loop.close()


@contextlib.contextmanager
def loop_in_thread() -> Iterator[Loop]:
    loop = Loop()
    try:
        yield loop
    finally:
        loop.close()


@contextlib.contextmanager
def listening(loop: Loop, handlers: Mapping[str, Handler], **settings: Any) -> Iterator[Endpoint]:
    """Start a listener on loopback, and yield its endpoint. ``settings`` are arguments of `Listener`."""
    listener = Listener(handlers, **settings)
    try:
        yield loop.run(listener.open("127.0.0.1"))
    finally:
        loop.run(_close(listener))


async def _close(listener: Listener) -> None:
    listener.close()


class Relay:
    """Relays one connection to an endpoint, and closes it after a number of bytes in one direction.

    Attributes:
        endpoint: Where to connect instead.
    """

    def __init__(self, to: Endpoint, *, cut_sent: int | None = None, cut_received: int | None = None) -> None:
        self._to = to
        self._limits = cut_sent, cut_received
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._server.getsockname()[1], to.token)
        self._thread = threading.Thread(target=self._serve, name="test-relay")
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(_PATIENCE_S)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            inner, _ = self._server.accept()
            with inner, socket.create_connection((self._to.host, self._to.port)) as outer:
                answers = threading.Thread(target=_relay, args=(outer, inner, self._limits[1]))
                answers.start()
                _relay(inner, outer, self._limits[0])
                answers.join(_PATIENCE_S)


def _relay(source: socket.socket, to: socket.socket, limit: int | None) -> None:
    left = 1 << 60 if limit is None else limit
    with contextlib.suppress(OSError):
        while left > 0 and (data := source.recv(min(left, 1 << 16))):
            to.sendall(data)
            left -= len(data)
    for end in (source, to):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
