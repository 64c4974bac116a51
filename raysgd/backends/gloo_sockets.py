"""The connections of a gloo group, found among the sockets of the process, so that they can be cut. Worker side.

gloo has no abort: a rank that waits in a collective for a peer which is stopped, or whose machine is, waits until the
collective's timeout, since nothing closes the connection. So this end of it is shut down, and gloo finds it closed.

gloo tells nobody its sockets, so members tell each other what has come into being while the group was made:

- Today's gloo makes one listener for a group; of two members one connects to the other's. What is connected to one of the
  listeners is gloo's (`GlooGroup`).
- That of 2021, which Horovod has in it, listens for each connection by itself, and no longer. What is connected, of two
  sockets that were both new, is gloo's (`Pairs`).

Groups that train_func makes itself are not known here.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import psutil

#: Host and port.
Address = tuple[str, int]


class GlooGroup(NamedTuple):
    """Where the members of a group listen for each other."""

    own: frozenset[Address] = frozenset()
    of_peers: frozenset[Address] = frozenset()

    @classmethod
    def of(cls, own: Iterable[Address], told_by_all: Iterable[Iterable[Sequence[Any]]]) -> GlooGroup:
        """Of one's own listeners and what all members have told of theirs, oneself among them."""
        mine = frozenset(own)
        return cls(mine, frozenset((each[0], each[1]) for theirs in told_by_all for each in theirs) - mine)

    def cut(self) -> int:
        """Shut down the group's connections at this end; returns how many."""
        return cut(self.own, self.of_peers)


class Pairs(NamedTuple):
    """The connections of a group: this end's address and the other's."""

    ends: frozenset[tuple[Address, Address]] = frozenset()

    @classmethod
    def of(cls, own: Iterable[tuple[Address, Address]], told_by_all: Iterable[Iterable[Any]]) -> Pairs:
        """Of the connections that are new here and those that all members have told, oneself among them."""
        reversed_ends = {(tuple(there), tuple(here)) for theirs in told_by_all for here, there in theirs}
        return cls(frozenset(own) & frozenset(reversed_ends))

    def cut(self) -> int:
        """Shut them down at this end; returns how many."""
        count = 0
        for each in _connections() if self.ends else ():
            if each.raddr and (_address(each.laddr), _address(each.raddr)) in self.ends:
                with contextlib.suppress(OSError):  # closed meanwhile
                    count += _shut_down(each)
        return count


def connected() -> set[tuple[Address, Address]]:
    """The TCP connections of this process: its end and the other's."""
    return {(_address(each.laddr), _address(each.raddr)) for each in _connections() if each.raddr}


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
