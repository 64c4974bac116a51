"""Finds the connections of a gloo group among the sockets of the process, and shuts them down. Runs in workers.

gloo has no abort. A rank that waits in a collective for a stopped peer, or for a peer on a stopped machine, waits until the
collective's timeout, because nothing closes the connection. Shutting down this end makes gloo find the connection closed.

gloo does not expose its sockets, so members exchange which sockets appeared while the group formed:

- Current gloo opens one listener per group, and of two members one connects to the other's listener. Every connection to
  one of the listeners belongs to gloo (`GlooListeners`).
- The gloo of 2021 inside Horovod opens a listener per connection and closes it afterwards. A connection whose two ends
  both appeared while the group formed belongs to gloo (`GlooConnections`).

Groups that Horovod programs create themselves are not covered; those of torch are, see `raysgd.backends.torch_groups`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from raysgd.transport import open_again

#: Host and port.
Address = tuple[str, int]
_LISTENING = "LISTEN"  # as psutil names the state
_DESCRIPTORS = "/proc/self/fd"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class GlooListeners(NamedTuple):
    """The addresses at which the members of a group listen for each other."""

    own: frozenset[Address] = frozenset()
    of_peers: frozenset[Address] = frozenset()

    @classmethod
    def from_exchange(cls, own: Iterable[Address], by_rank: Iterable[Iterable[Sequence[Any]]]) -> GlooListeners:
        """Combine this process's listeners with those of all members, by rank."""
        mine = frozenset(own)
        return cls(mine, frozenset((host, port) for theirs in by_rank for host, port in theirs) - mine)

    def shut_down(self) -> int:
        """Shut down the connections that were accepted at an own listener or lead to one of a peer; return their number."""
        if not self.own and not self.of_peers:
            return 0
        return _shut_down_all(lambda local, remote: local in self.own or remote in self.of_peers)


class GlooConnections(NamedTuple):
    """The connections of a group, each by this end's address and the peer's."""

    ends: frozenset[tuple[Address, Address]] = frozenset()

    @classmethod
    def from_exchange(cls, own: Iterable[tuple[Address, Address]], by_rank: Iterable[Iterable[Any]]) -> GlooConnections:
        """Combine this process's new connections with those of all members, by rank."""
        seen_by_peers = {(tuple(remote), tuple(local)) for theirs in by_rank for local, remote in theirs}
        return cls(frozenset(own) & frozenset(seen_by_peers))

    def shut_down(self) -> int:
        """Shut down the group's connections at this end; return how many there were."""
        return _shut_down_all(lambda local, remote: (local, remote) in self.ends) if self.ends else 0


def list_connections() -> set[tuple[Address, Address]]:
    """Return the TCP connections of this process, each by this end's address and the peer's."""
    return {(_address(link.laddr), _address(link.raddr)) for link in _sockets() if link.raddr}


def list_listeners() -> set[Address]:
    """Return the addresses at which this process listens for TCP connections."""
    if socket.getdefaulttimeout() is not None or not os.path.isdir(_DESCRIPTORS):
        return {_address(link.laddr) for link in _sockets() if link.status == _LISTENING}
    # The kernel's list has the connections of all processes, and takes 5 ms where there are a few hundred.
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            if os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                with open_again(int(name)) as opened:
                    if opened.family in _FAMILIES and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(_address(opened.getsockname()))
    return found


def _shut_down_all(is_chosen: Callable[[Address, Address], bool]) -> int:
    # The file descriptors stay open: the library that owns them sees the end of each stream and closes them.
    count = 0
    for link in _sockets():
        if link.raddr and is_chosen(_address(link.laddr), _address(link.raddr)):
            with contextlib.suppress(OSError):  # closed meanwhile
                count += _shut_down(link)
    return count


def _sockets() -> list[Any]:
    try:
        import psutil
    except ImportError:  # as in `raysgd.backends.addresses.find_interface`
        return []
    # The kernel's list. A socket object for a descriptor would make it non-blocking if Python's sockets have a default timeout.
    with contextlib.suppress(psutil.Error, OSError):
        return list(psutil.Process().net_connections("tcp"))
    return []


def _shut_down(connection: Any) -> bool:
    with open_again(connection.fd) as link:
        if _address(link.getpeername()) != _address(connection.raddr):
            return False
        link.shutdown(socket.SHUT_RDWR)
        return True


def _address(name: Any) -> Address:
    return name[0].partition("%")[0], name[1]  # without the interface of a link-local address
