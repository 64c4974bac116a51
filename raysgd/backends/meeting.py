"""A meeting of all members before there is a group: each brings something, and gets what all have brought. Worker side.

It is held at a socket of rank 0's, by a line of JSON from each and one to each.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from raysgd.backends.base import Member


class MeetingPlace:
    """A process's part in meetings, one after another."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def open(self, node_ip: str) -> str:
        """Rank 0: listen; returns what the others need to come."""
        self.close()
        self._listener = socket.create_server((node_ip, 0), family=family_of(node_ip), backlog=2048)
        return json.dumps([node_ip, self._listener.getsockname()[1]])

    def meet(self, member: Member, brought: Any, timeout_s: float) -> list[Any]:
        """What all members have brought, by rank; anything that JSON can say.

        Raises:
            TimeoutError: Some have not come in time.
            ConnectionError: The one who held it is gone.
        """
        deadline = time.monotonic() + timeout_s
        if member.rank == 0:
            return self._hold(member, brought, deadline)
        host, port = json.loads(member.rendezvous)
        with socket.create_connection((host, port), timeout=_left(deadline)) as link:
            link.sendall(_line([member.rank, brought]))
            return list(_read(link, deadline))

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _hold(self, member: Member, brought: Any, deadline: float) -> list[Any]:
        assert self._listener is not None
        all_brought: dict[int, Any] = {0: brought}
        links: list[socket.socket] = []
        try:
            while len(all_brought) < member.world_size:
                self._listener.settimeout(_left(deadline))
                link, _ = self._listener.accept()
                links.append(link)
                rank, theirs = _read(link, deadline)
                all_brought[rank] = theirs
            answer = [all_brought[rank] for rank in range(member.world_size)]
            for link in links:
                link.settimeout(_left(deadline))
                link.sendall(_line(answer))
            return answer
        except TimeoutError:
            missing = sorted(set(range(member.world_size)) - set(all_brought))
            raise TimeoutError(f"ranks {missing} have not come to the meeting of the group in time") from None
        finally:
            for link in links:
                link.close()
            self.close()


def family_of(node_ip: str) -> socket.AddressFamily:
    """Of an address."""
    return socket.AF_INET6 if ":" in node_ip else socket.AF_INET


def interface_of(node_ip: str) -> str | None:
    """The name of the network interface that has an address."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == node_ip for address in addresses):
            return str(name)
    return None


def free_address(node_ip: str) -> str:
    """``host:port`` for a server that another library makes, at a port that nobody has now.

    It cannot be held until then: the gRPC of TensorFlow and of JAX shares its ports with nobody. The kernel gives ports in
    an order of its own, so that another process hardly gets the same one in the meantime.
    """
    with socket.socket(family_of(node_ip), socket.SOCK_STREAM) as found:
        found.bind((node_ip, 0))
        host, port = found.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time for the meeting of the group is over")
    return left


def _line(what: Any) -> bytes:
    return json.dumps(what).encode() + b"\n"


def _read(link: socket.socket, deadline: float) -> Any:
    data = b""
    while not data.endswith(b"\n"):
        link.settimeout(_left(deadline))
        more = link.recv(1 << 16)
        if not more:
            raise ConnectionError("a member has left the meeting of the group")
        data += more
    return json.loads(data)
