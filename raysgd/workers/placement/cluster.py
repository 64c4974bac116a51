"""Reads the state of the Ray cluster that placement depends on. Runs in the TrainerActor and in the driver."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray._private.state import state  # no public API has the free resources by node, or the autoscaler's limit
from ray._private.worker import global_worker  # no public API lists draining nodes, or asks without starting Ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd.config import ScalingConfig
from raysgd.errors import InfeasibleError
from raysgd.workers.placement.capacity import NOTHING, Node, describe_nodes, explain_infeasible

#: The Ray namespace of raysgd's actors and of its entries in the cluster's key-value store.
NAMESPACE = "raysgd"

_log = logging.getLogger(__name__)
#: The time for Ray to list draining nodes.
_DRAINING_TIMEOUT_S = 2.0
#: The time for a living node to accept a connection.
_CONNECT_TIMEOUT_S = 0.5
#: The time for a node that runs on this machine to be found.
_START_NODE_S = 5
#: Seconds between two looks at the nodes of a cluster that is not whole yet.
_JOIN_INTERVAL_S = 1.0
_ADVICE = (
    "Ask for fewer or smaller workers, or give the cluster more nodes. If its nodes are still starting, "
    "FailureConfig(wait_for_nodes_s=...) waits for them."
)


def current_session() -> tuple[str, str] | None:
    """Return what identifies this process's connection to Ray: the cluster's session and the job; None without one."""
    worker: Any = global_worker  # not the runtime context, which would start Ray in a process that has just left it
    try:
        return (worker.node.session_name, worker.current_job_id.hex()) if worker.connected else None
    except AttributeError:  # another thread is just disconnecting
        return None


def use_token() -> None:
    """Give the clusters that this process joins the token of this user, if there is one; called before ``ray.init``.

    Ray does this by itself only for a cluster that it finds by itself, not for an address in RAY_ADDRESS or an argument.
    """
    try:  # no public API does it
        from ray._private.authentication import authentication_token_setup as tokens
    except ImportError:  # a version of Ray without tokens
        return
    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def check_node_here(address: str) -> None:
    """Check that a node of the cluster runs on this machine, because processes connect through it; blocks.

    `ray.init` waits for one for a minute.

    Args:
        address: The cluster, host and port.

    Raises:
        ConnectionError: No node of that cluster runs here.
    """
    from ray._private import services  # no public API does it
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError:  # the head may be starting: `ray.init` waits for it
        return
    try:
        services.get_node_to_connect_for_driver(GcsClient(address=address), timeout_seconds=_START_NODE_S)
    except RuntimeError as error:
        if address in services._find_address_from_flag("--gcs-address"):  # its node here is starting: `ray.init` waits
            return
        why = f": {error}" if services.find_node_ids() else ""
        raise ConnectionError(
            f"no node of the cluster at {address} runs on this machine, and a process connects through a node{why}. Run this "
            f"on one of the nodes, or make this machine one: `ray start --address={address} --num-cpus=0`"
        ) from None


def place_near(node_id: str) -> dict[str, Any]:
    """Return the options of an actor without CPUs that runs on a node, or on any other if that one is gone.

    Ray places an actor that asks for no resource at all on a random node, whatever node it prefers; hence a byte of memory.
    """
    near = NodeAffinitySchedulingStrategy(node_id, soft=True, _spill_on_unavailable=True)
    return {"num_cpus": 0, "memory": NOTHING["memory"], "scheduling_strategy": near}


def list_nodes() -> list[Node]:
    """Return the living nodes with their total and free resources."""
    free = state.available_resources_per_node()
    return [
        Node(info["NodeID"], info["NodeManagerHostname"], info["Resources"], free.get(info["NodeID"], {}))
        for info in ray.nodes()
        if info["Alive"]
    ]


def check_feasible(scaling: ScalingConfig, num_spares: int = 0) -> None:
    """Refuse workers that the cluster can never hold, not even when its autoscaler has added all nodes that it may; blocks.

    Raises:
        InfeasibleError: The message shows the arithmetic.
    """
    if (why := _why_infeasible(scaling, num_spares)) is not None:
        raise InfeasibleError(f"{why}. {_ADVICE}")


async def wait_until_feasible(
    scaling: ScalingConfig, num_spares: int, timeout_s: float, on_waiting: Callable[[str], None]
) -> None:
    """Wait until enough nodes have joined the cluster for the workers.

    Args:
        scaling: The workers.
        num_spares: Spares in addition to the workers.
        timeout_s: Seconds to wait at most; 0 does not wait.
        on_waiting: Called with a line about what is there and what is missing, and again when that has changed.

    Raises:
        InfeasibleError: The cluster cannot hold the workers, and the time is over.
    """
    from raysgd.workers.placement.calls import call_cluster  # not for a cold start of the driver

    deadline, last_line = time.monotonic() + timeout_s, ""
    while (why := await call_cluster(_why_infeasible, scaling, num_spares)) is not None:
        if (left_s := deadline - time.monotonic()) <= 0:
            waited = f", after {timeout_s:g} s of waiting for nodes" if timeout_s else ""
            raise InfeasibleError(f"{why}{waited}. {_ADVICE}")
        line = f"{why}; its nodes are {describe_nodes(await call_cluster(list_nodes), list(scaling.bundle()))}"
        if line != last_line:
            last_line = line
            on_waiting(f"waiting up to {timeout_s:g} s for nodes that join the cluster: {line}")
        await asyncio.sleep(min(left_s, _JOIN_INTERVAL_S))


def _why_infeasible(scaling: ScalingConfig, num_spares: int) -> str | None:
    why = explain_infeasible(scaling, list_nodes(), num_spares)
    if why is None or (limit := _autoscaler_limit()) is None:
        return why
    beyond = explain_infeasible(scaling, [Node("", "", limit, limit)], num_spares)
    if beyond is None or "nodes" in beyond:  # the limit says nothing about single nodes
        return None
    return f"{beyond} when its autoscaler has added all it may"


def has_autoscaler() -> bool:
    """Return True if an autoscaler may add nodes to the cluster."""
    return _autoscaler_limit() is not None


def is_node_reachable(node_id: str) -> bool:
    """Return True if a node's raylet accepts connections; blocks. Ray itself notices a lost node many seconds later."""
    address = {info["NodeID"]: (info["NodeManagerAddress"], info["NodeManagerPort"]) for info in ray.nodes()}
    try:
        socket.create_connection(address[node_id], _CONNECT_TIMEOUT_S).close()
    except (OSError, KeyError):
        return False
    return True


def list_draining_nodes() -> dict[str, float | None]:
    """Return the nodes that Ray is about to take away, each with the seconds that are left or None if unknown; blocks."""
    try:
        client = global_worker.gcs_client  # type: ignore[attr-defined]
        deadlines_ms = client.get_draining_nodes(timeout=_DRAINING_TIMEOUT_S)
    except Exception as error:  # the next check may succeed
        _log.debug("Ray did not list the draining nodes: %s", error)
        return {}
    now_ms = time.time() * 1000
    return {node_id: max(0.0, (at_ms - now_ms) / 1000) if at_ms else None for node_id, at_ms in deadlines_ms.items()}


def is_tls_enabled() -> bool:
    """Return True if Ray encrypts its connections."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _autoscaler_limit() -> Mapping[str, float] | None:
    """Return the resources of the cluster at its largest, or None without an autoscaler."""
    limit: Mapping[str, float] | None = state.get_max_resources_from_cluster_config()
    return limit
