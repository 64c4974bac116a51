"""The Ray cluster of a command: whether one runs, and which Trainers are in it. Driver side.

Only the commands that run a script start a cluster; the others ask one that runs.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysgd.cli.console import print_error
from raysgd.errors import ConfigError
from raysgd.result import RunStatus

#: Seconds for a cluster to accept a connection, and for a Trainer to answer.
_CONNECT_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 10.0
_ADVICE = "give --address HOST:PORT, set RAY_ADDRESS, or start one with `ray start --head`"


@dataclass(frozen=True)
class LiveTrainer:
    """A Trainer whose TrainerActor runs.

    Attributes:
        alias: The name by which drivers attach to it; None if it is not detached.
        program: The program that made it.
        status: Of its latest run; None if it does not answer.
    """

    alias: str | None
    program: str
    status: RunStatus | None


def find_address(address: str | None) -> str | None:
    """Return the address of the cluster that a command means, if that cluster accepts connections; without importing Ray.

    Args:
        address: As given by ``--address``.

    Raises:
        ConfigError: An address was given, and there is no cluster.
    """
    if address == "local":
        raise ConfigError("--address local starts a new cluster, which has no runs; leave it out.")
    named = address or os.environ.get("RAY_ADDRESS") or "auto"
    if named == "local":
        return None
    found = _noted_address() if named == "auto" else named
    if found is None or not _accepts(found):
        if address is not None:
            raise ConfigError(f"there is no Ray cluster at --address {address}; {_ADVICE}.")
        return None
    return found


def connect(address: str | None, *, must_exist: bool = False) -> str | None:
    """Connect this process to the running cluster; return its address, or None if there is none.

    Raises:
        ConfigError: An address was given, or ``must_exist``, and the cluster cannot be reached.
    """
    if (found := find_address(address)) is None:
        return None
    import ray

    if ray.is_initialized():
        return found
    from raysgd.workers.placement.cluster import check_node_here, use_token

    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # Ray would say that there is a token
    use_token()
    try:
        check_node_here(found)
        ray.init(address=found, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        problem = f"the Ray cluster at {found} cannot be reached: {error}"
        if address is not None or must_exist:
            raise ConfigError(f"{problem}.") from None
        print_error(f"raysgd: {problem}; it was not asked. RAY_ADDRESS=local leaves it out.")
        return None
    return found


def disconnect() -> None:
    """Leave the cluster, so that a run may start with settings of its own."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


def must_connect(address: str | None) -> str:
    """Connect this process to the running cluster; return its address.

    Raises:
        ConfigError: There is none.
    """
    if (found := connect(address, must_exist=True)) is None:
        raise ConfigError(f"there is no Ray cluster to ask; {_ADVICE}.")
    return found


def live_trainers() -> list[LiveTrainer]:
    """Return the Trainers in the cluster that this process is connected to, of all programs."""
    import ray
    from ray.exceptions import RayError

    from raysgd.controller.kv_store import list_holders
    from raysgd.workers.placement.cluster import NAMESPACE

    alive = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    holders = [holder for holder in list_holders() if holder.name in alive]
    asked: list[Any] = []
    for holder in holders:
        try:
            asked.append(ray.get_actor(holder.name, namespace=NAMESPACE).status.remote())
        except ValueError:  # it has just ended
            asked.append(None)
    refs = [ref for ref in asked if ref is not None]
    ready = set(ray.wait(refs, num_returns=len(refs), timeout=_ANSWER_TIMEOUT_S)[0]) if refs else set()
    found = []
    for holder, ref in zip(holders, asked, strict=True):
        if ref is None:
            continue
        try:
            answer = ray.get(ref) if ref in ready else None
        except RayError:
            continue
        found.append(LiveTrainer(holder.alias, holder.program, None if answer is None else RunStatus(**answer)))
    return found


def _noted_address() -> str | None:
    """Return the address of the cluster that ``ray start`` or ``ray.init`` has noted on this machine, or None."""
    root = os.environ.get("RAY_TMPDIR") or (os.environ.get("TMPDIR") or "/tmp" if os.name == "posix" else None)
    path = Path(root or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
