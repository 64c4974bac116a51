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
from collections.abc import Iterable
from typing import Any

import psutil

#: Host and port.
Address = tuple[str, int]


def listeners() -> set[Address]:
    """The addresses at which this process listens for TCP connections."""
    return {_address(each.laddr) for each in _connections() if each.status == psutil.CONN_LISTEN}


def cut(own: Iterable[Address], of_peers: Iterable[Address]) -> int:
    """Shut down the connections that came in at ``own`` listeners or go to those ``of_peers``; returns how many.

    They stay open as files: closing them is for the library that they belong to, which sees the end of each stream.
    """
    coming_in, going_out = set(own), set(of_peers)
    count = 0
    if not coming_in and not going_out:
        return count
    for each in _connections():
        if each.raddr and (_address(each.laddr) in coming_in or _address(each.raddr) in going_out):
            with contextlib.suppress(OSError):  # closed meanwhile
                count += _shut_down(each)
    return count


def _connections() -> list[Any]:
    """Of this process, as the kernel lists them. A socket object is not made to look at one: that may change its mode."""
    with contextlib.suppress(psutil.Error, OSError):
        return list(psutil.Process().net_connections("tcp"))
    return []


def _shut_down(connection: Any) -> bool:
    number = os.dup(connection.fd)
    try:
        found = socket.socket(fileno=number)
    except OSError:  # another file has its number by now
        os.close(number)
        raise
    with found:
        if _address(found.getpeername()) != _address(connection.raddr):
            return False
        found.shutdown(socket.SHUT_RDWR)
        return True


def _address(name: Any) -> Address:
    return name[0], name[1]
