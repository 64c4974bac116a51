"""Processes and connections that a fault breaks from inside a worker. Worker side."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterable
from pathlib import Path

from raysgd.errors import ConfigError

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_ESTABLISHED = "01"


def kill_actor(name: str) -> None:
    """SIGKILL the process of one of raysgd's actors, wherever it is.

    Raises:
        ConfigError: There is no such actor.
    """
    import ray
    from ray._private.state import state  # no public API tells an actor's process without Ray's dashboard

    from raysgd.workers.cluster import NAMESPACE

    handle = ray.get_actor(name, namespace=NAMESPACE)
    known = state.actor_table(handle._actor_id.hex())
    if not known.get("Pid"):
        raise ConfigError(f"the actor {name} has no process that could be killed")
    if known["Address"]["NodeID"] == ray.get_runtime_context().get_node_id():
        os.kill(known["Pid"], signal.SIGKILL)
    else:
        ray.kill(handle, no_restart=False)  # the same to it: nothing of its own code runs


def connections() -> dict[int, int]:
    """The established TCP connections of this process: descriptors by inode. Empty where there is no ``/proc``."""
    try:
        established = {inode for table in ("tcp", "tcp6") for inode in _established(Path("/proc/self/net", table))}
    except OSError:
        return {}
    found: dict[int, int] = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            match = _SOCKET.fullmatch(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # closed meanwhile
            continue
        if match and int(match[1]) in established:
            found[int(match[1])] = int(descriptor)
    return found


def shut_down(descriptors: Iterable[int]) -> None:
    """Shut connections down in both directions, for all who hold them; they stay open."""
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # the peer was faster
                continue


def _established(table: Path) -> Iterable[int]:
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _ESTABLISHED:
            yield int(fields[9])
