"""Exchanges a value between all members before their process group exists. Runs in workers.

Rank 0 listens at a socket. Each member sends its value as one line of JSON and gets the values of all as another line.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from raysgd.backends.base import Member


class RendezvousPoint:
    """One process's part in a sequence of exchanges."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def open(self, node_ip: str) -> str:
        """Listen, on rank 0; return the address that the other members need, as JSON."""
        self.close()
        self._listener = socket.create_server((node_ip, 0), family=address_family(node_ip), backlog=2048)
        return json.dumps([node_ip, self._listener.getsockname()[1]])

    def exchange(self, member: Member, value: Any, timeout_s: float) -> list[Any]:
        """Give a value that JSON can represent; return the values of all members, by rank. Only rank 0 has called `open`.

        Raises:
            TimeoutError: Some members have not connected in time.
            ConnectionError: Rank 0 is gone.
        """
        deadline = time.monotonic() + timeout_s
        if member.rank == 0:
            return self._serve(member, value, deadline)
        host, port = json.loads(member.rendezvous)
        with socket.create_connection((host, port), timeout=_seconds_left(deadline)) as link:
            link.sendall(_encode_line([member.rank, value]))
            return list(_read_line(link, deadline))

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _serve(self, member: Member, value: Any, deadline: float) -> list[Any]:
        assert self._listener is not None
        values: dict[int, Any] = {0: value}
        links: list[socket.socket] = []
        try:
            while len(values) < member.world_size:
                self._listener.settimeout(_seconds_left(deadline))
                link, _ = self._listener.accept()
                links.append(link)
                rank, theirs = _read_line(link, deadline)
                values[rank] = theirs
            by_rank = [values[rank] for rank in range(member.world_size)]
            for link in links:
                link.settimeout(_seconds_left(deadline))
                link.sendall(_encode_line(by_rank))
            return by_rank
        except TimeoutError:
            missing = sorted(set(range(member.world_size)) - set(values))
            raise TimeoutError(f"ranks {missing} did not reach the rendezvous in time") from None
        finally:
            for link in links:
                link.close()
            self.close()


def address_family(node_ip: str) -> socket.AddressFamily:
    """Return the socket family of an IP address."""
    return socket.AF_INET6 if ":" in node_ip else socket.AF_INET


def loopback_of(node_ip: str) -> str:
    """Return the loopback address of a node.

    Who connects to a node's own address asks the name server for that address's name: torch's store does, in the resolver of
    the C library, and a name server that does not answer costs it five seconds.
    """
    return "::1" if ":" in node_ip else "127.0.0.1"


def find_interface(node_ip: str) -> str | None:
    """Return the name of the network interface that has this address, or None."""
    try:
        import psutil
    except ImportError:  # a checkout on a machine without raysgd's dependencies: the library chooses the interface
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == node_ip for address in addresses):
            return str(name)
    return None


def find_free_address(node_ip: str) -> str:
    """Return ``host:port`` with a free port, for a server that another library creates.

    The port cannot stay reserved until then, because the gRPC of TensorFlow and of JAX does not share ports. The kernel does
    not give the same port twice in a row, so another process is unlikely to get this one meanwhile.
    """
    with socket.socket(address_family(node_ip), socket.SOCK_STREAM) as probe:
        probe.bind((node_ip, 0))
        host, port = probe.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the members did not all reach the rendezvous in time")
    return left


def _encode_line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _read_line(link: socket.socket, deadline: float) -> Any:
    data = b""
    while not data.endswith(b"\n"):
        link.settimeout(_seconds_left(deadline))
        received = link.recv(1 << 16)
        if not received:
            raise ConnectionError("a member left the rendezvous before it was complete")
        data += received
    return json.loads(data)
