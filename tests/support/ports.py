"""Ports for servers that tests start later."""

from __future__ import annotations

import contextlib
import random
import socket

#: Below those that the kernel gives to connections, which could be given a free port before its server listens there.
_FIRST, _LAST = 20_000, 32_000


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(_FIRST, _LAST)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            ports.append(port)
    return ports


def free_port() -> int:
    """Return a port that is free now."""
    return free_ports(1)[0]
