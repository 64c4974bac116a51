"""Where the members of a torch process group meet: a store, as ``init_method`` says. Worker side.

A group meets anew after each failure, so the place is chosen by rank 0 each time and told to the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from raysgd.backends.base import Member
from raysgd.backends.meeting import family_of
from raysgd.errors import ConfigError

_BACKLOG = 2048
FORMS = "'tcp://host:port', 'file:///path' or 'env://'"


def check_init_method(init_method: str | None) -> None:
    """Raises a ConfigError for what is no place to meet."""
    if init_method is None:
        return
    parts = urlsplit(init_method)
    is_tcp = parts.scheme == "tcp" and parts.hostname and _port_of(init_method)
    if not (is_tcp or init_method == "env://" or (parts.scheme == "file" and parts.path)):
        raise ConfigError(f"TorchConfig(init_method={init_method!r}): it is {FORMS}, or None.")


@dataclass
class Place:
    """Of one group, on rank 0 with the listening socket.

    Attributes:
        told: What the other members need to know, as JSON.
    """

    told: str
    listener: socket.socket | None = None

    @classmethod
    def open(cls, init_method: str | None, node_ip: str) -> Place:
        """Choose it, on rank 0.

        Raises:
            ConfigError: It cannot be there.
        """
        if init_method is not None and init_method.startswith("file:"):
            return cls(json.dumps({"path": f"{urlsplit(init_method).path}.{uuid.uuid4().hex}"}))
        host, port = _address(init_method, node_ip)
        try:
            # The listening socket is ours and stays open until the store has it, so no other process can take the port.
            listener = socket.create_server((host, port), family=family_of(host), backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"TorchConfig(init_method={init_method!r}): rank 0, on {socket.gethostname()} ({node_ip}), cannot listen at "
                f"{host}:{port}: {error.strerror or error}"
            ) from error
        return cls(json.dumps({"host": host, "port": listener.getsockname()[1]}), listener)

    def close(self) -> None:
        """Let go of the socket, if no store has it."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None


def join_store(place: Place, member: Member, timeout_s: float) -> Any:
    """The store of the group; on rank 0 the server too. Other libraries find its address in the environment."""
    import torch.distributed as dist

    told, timeout = json.loads(place.told), timedelta(seconds=timeout_s)
    if "path" in told:
        store = dist.FileStore(told["path"], member.world_size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return store
    os.environ.update(MASTER_ADDR=told["host"], MASTER_PORT=str(told["port"]))
    fd = None
    if member.rank == 0 and place.listener is not None:
        fd, place.listener = place.listener.detach(), None  # the store closes it
    return dist.TCPStore(  # type: ignore[attr-defined]
        told["host"],
        told["port"],
        world_size=member.world_size,
        is_master=member.rank == 0,
        timeout=timeout,
        master_listen_fd=fd,
        wait_for_workers=True,
    )


def forget_store(place: Place) -> None:
    """Remove what a group leaves behind that has met in a file; whoever leaves it first does."""
    path = json.loads(place.told).get("path")
    if path is not None:
        with contextlib.suppress(OSError):
            os.remove(path)


def _address(init_method: str | None, node_ip: str) -> tuple[str, int]:
    if init_method is None:
        return node_ip, 0
    if init_method == "env://":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"TorchConfig(init_method='env://'): {' and '.join(missing)} must be set in the workers, as by "
                "Trainer(runtime_env={'env_vars': {...}})."
            )
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return urlsplit(init_method).hostname or node_ip, _port_of(init_method) or 0


def _port_of(init_method: str) -> int | None:
    try:
        return urlsplit(init_method).port
    except ValueError:  # out of range
        return None
