"""Kills actors and shuts down connections from inside a worker, for faults. Runs in workers."""

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
    """Send SIGKILL to the process of one of raysgd's actors, on any node.

    Raises:
        ConfigError: The actor has no process.
    """
    import ray
    from ray._private.state import state  # without Ray's dashboard no public API has an actor's process id

    from raysgd.workers.placement.cluster import NAMESPACE

    handle = ray.get_actor(name, namespace=NAMESPACE)
    known = state.actor_table(handle._actor_id.hex())
    if not known.get("Pid"):
        raise ConfigError(f"the actor {name} has no process to kill; it has not started, or is dead already")
    if known["Address"]["NodeID"] == ray.get_runtime_context().get_node_id():
        os.kill(known["Pid"], signal.SIGKILL)
    else:
        ray.kill(handle, no_restart=False)  # like SIGKILL, it runs none of the actor's code


def list_connections() -> dict[int, int]:
    """Return the descriptors of this process's established TCP connections, by inode; empty without ``/proc``."""
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
    """Shut down connections in both directions; the descriptors stay open."""
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # the peer has closed it already
                continue


def _established(table: Path) -> Iterable[int]:
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _ESTABLISHED:
            yield int(fields[9])
