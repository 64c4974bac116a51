"""What Ray says about the cluster. Runs in the TrainerActor; the one place that reads Ray's state for placement."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

import ray
from ray._private.state import state  # no public API tells what is free on each node, or how far the cluster may grow
from ray._private.worker import global_worker  # nor which nodes are draining

from raysgd.config import ScalingConfig
from raysgd.errors import InfeasibleError
from raysgd.workers.placement import Node, explain_infeasible

#: Of the names of raysgd's actors, and of its keys in the cluster's store.
NAMESPACE = "raysgd"

_log = logging.getLogger(__name__)
#: Seconds Ray has to say which nodes are draining.
_ANSWER_S = 2.0
#: Seconds a node that is there has to take a connection.
_CONNECT_S = 0.5
_ADVICE = "Ask for fewer or smaller workers, or give the cluster more nodes."


def cluster_nodes() -> list[Node]:
    """The nodes that are alive, their resources, and what is free."""
    free = state.available_resources_per_node()
    return [
        Node(info["NodeID"], info["NodeManagerHostname"], info["Resources"], free.get(info["NodeID"], {}))
        for info in ray.nodes()
        if info["Alive"]
    ]


def check_feasible(scaling: ScalingConfig, num_spares: int = 0) -> None:
    """Refuse workers the cluster can never hold. Where an autoscaler may add nodes, only what is beyond its limit.

    Raises:
        InfeasibleError: With the arithmetic.
    """
    why = explain_infeasible(scaling, cluster_nodes(), num_spares)
    if why is None:
        return
    limit = _autoscaler_limit()
    if limit is None:
        raise InfeasibleError(f"{why}. {_ADVICE}")
    beyond = explain_infeasible(scaling, [Node("", "", limit, limit)], num_spares)
    if beyond is not None and "nodes" not in beyond:  # node by node the autoscaler knows better
        raise InfeasibleError(f"{beyond} when its autoscaler has added all it may. {_ADVICE}")


def may_be_scaled() -> bool:
    """Whether nodes may be added to the cluster for what is asked of it."""
    return _autoscaler_limit() is not None


def node_answers(node_id: str) -> bool:
    """Whether a node's raylet takes connections, which Ray itself takes many seconds to find out. Waits for it."""
    address = {info["NodeID"]: (info["NodeManagerAddress"], info["NodeManagerPort"]) for info in ray.nodes()}
    try:
        socket.create_connection(address[node_id], _CONNECT_S).close()
    except (OSError, KeyError):
        return False
    return True


def draining_nodes() -> dict[str, float | None]:
    """The nodes that will be taken away, and in how many seconds, where that is known. Asks Ray, and waits for it."""
    try:
        found = global_worker.gcs_client.get_draining_nodes(timeout=_ANSWER_S)  # type: ignore[attr-defined]
    except Exception as error:  # whatever it is, the next look may tell more
        _log.debug("Ray did not tell which nodes are draining: %s", error)
        return {}
    now_ms = time.time() * 1000
    return {node_id: max(0.0, (at_ms - now_ms) / 1000) if at_ms else None for node_id, at_ms in found.items()}


def uses_tls() -> bool:
    """Whether Ray encrypts what it sends."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _autoscaler_limit() -> Mapping[str, float] | None:
    """The resources of the cluster at its largest; None where nothing adds nodes."""
    limit: Mapping[str, float] | None = state.get_max_resources_from_cluster_config()
    return limit
