"""The connections of a gloo group, found among the sockets of the process, so that they can be cut. Worker side.

gloo has no abort: a rank that waits in a collective for a peer which is stopped, or whose machine is, waits until the
collective's timeout, since nothing closes the connection. So this end of it is shut down, and gloo finds it closed.

gloo tells nobody its sockets. It makes one listener for a group; of two members one connects to the other's. The listener
is the socket that began to listen while the group was made; members tell each other theirs, and what is connected to
one of them is gloo's. Groups that train_func makes itself are not known here.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator

#: Host and port.
Address = tuple[str, int]


def listeners() -> set[Address]:
    """The addresses at which this process listens for TCP connections."""
    return {_address(each.getsockname()) for each in _tcp_sockets() if _listens(each)}


def cut(own: Iterable[Address], of_peers: Iterable[Address]) -> int:
    """Shut down the connections that came in at ``own`` listeners or go to those ``of_peers``; returns how many.

    They stay open as files: closing them is for the library that they belong to, which sees the end of each stream.
    """
    coming_in, going_out = set(own), set(of_peers)
    count = 0
    for each in _tcp_sockets():
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile
            if _listens(each):
                continue
            if _address(each.getsockname()) in coming_in or _address(each.getpeername()) in going_out:
                each.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _tcp_sockets() -> Iterator[socket.socket]:
    """A socket object, for as long as it is looked at, for each TCP socket of this process."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():  # Linux has it
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:  # its own file: the number may be used anew meanwhile
                is_internet = each.family in (socket.AF_INET, socket.AF_INET6)
                if is_internet and each.type == socket.SOCK_STREAM:
                    yield each


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return name[0], name[1]
