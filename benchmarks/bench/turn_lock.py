"""Whose turn it is: systems that are measured at once, one of them working at a time.

What else the machine does meets all of them alike then, since their blocks are a tenth of a second apart and not minutes.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

#: The variable of measuring processes with the address of the one that gives turns; without it every turn is one's own.
TURN_LOCK_VARIABLE = "BENCH_TURN_LOCK"
_GO, _DONE = b"g", b"d"
_LOOK_S = 0.1


class TurnLock:
    """Gives turns, in another order each round, once all are there. Driver side; a context manager.

    Args:
        count: How many systems there are.

    Attributes:
        address: Where it is asked for turns, as ``host:port``.
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
        """A system's process has ended: if it never asked for a turn, the others wait for it no more."""
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
    """Wait until it is used; False where nobody is there any more."""
    with contextlib.suppress(OSError):
        to.settimeout(None)
        to.sendall(_GO)
        return to.recv(1) == _DONE
    return False


class Turns:
    """One system's. Worker side; a context manager.

    Args:
        address: The turn_lock's; None for turns that are given at once.
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
        """Wait for a turn, and have it in the body.

        Raises:
            ConnectionError: Nobody gives turns any more.
        """
        if self._socket is not None and self._socket.recv(1) != _GO:
            raise ConnectionError("nobody gives turns any more")
        yield
        if self._socket is not None:
            self._socket.sendall(_DONE)
