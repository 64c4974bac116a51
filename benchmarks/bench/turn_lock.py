"""Turns for systems that are measured at the same time: one of them works at a time.

Their blocks are then a tenth of a second apart instead of minutes, so that other load of the machine affects all alike.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

#: The environment variable with the address of the `TurnLock`.
TURN_LOCK_VARIABLE = "BENCH_TURN_LOCK"
_GO, _DONE = b"g", b"d"
_LOOK_S = 0.1


class TurnLock:
    """Gives turns in another order each round, when all systems have connected. Driver side; a context manager.

    Args:
        count: The number of systems.

    Attributes:
        address: The ``host:port`` to which systems connect.
    """

    def __init__(self, count: int) -> None:
        self._num_missing = count
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_LOOK_S)
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="turn_lock", daemon=True)

    def __enter__(self) -> TurnLock:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._thread.join()
        self._listener.close()

    def ended(self) -> None:
        """Note that a system's process has ended; if it never asked for a turn, the others no longer wait for it."""
        self._num_missing -= 1

    def _serve(self) -> None:
        here: list[socket.socket] = []
        while len(here) < self._num_missing and not self._is_over:
            with contextlib.suppress(TimeoutError):
                here.append(self._listener.accept()[0])
        while here:
            for each in random.sample(here, len(here)):
                if not _give_turn(each):
                    here.remove(each)
                    each.close()


def _give_turn(to: socket.socket) -> bool:
    """Give a turn and wait until it is over; return False if the system has gone."""
    with contextlib.suppress(OSError):
        to.settimeout(None)
        to.sendall(_GO)
        return to.recv(1) == _DONE
    return False


class Turns:
    """The turns of one system. Worker side; a context manager.

    Args:
        address: The address of the `TurnLock`; None: each turn begins at once.
    """

    def __init__(self, address: str | None) -> None:
        self._socket: socket.socket | None = None
        if address is not None:
            host, _, port = address.partition(":")
            self._socket = socket.create_connection((host, int(port)))

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *error: object) -> None:
        if self._socket is not None:
            self._socket.close()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Wait for a turn; it ends with the body.

        Raises:
            ConnectionError: The `TurnLock` has gone.
        """
        if self._socket is not None and self._socket.recv(1) != _GO:
            raise ConnectionError("the process that gives turns has gone")
        yield
        if self._socket is not None:
            self._socket.sendall(_DONE)
