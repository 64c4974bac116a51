"""A double of what Ray says about its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import ray
from ray._private.state import state

Resources = Mapping[str, float]


class RayState:
    """The nodes that Ray lists. They are living and differ in their resources only.

    Attributes:
        nodes: The total resources of each node.
        free: The free resources of each node; all of them, if it is not in here.
        limit: The resources that an autoscaler may reach; None without one.
    """

    def __init__(self, nodes: Mapping[str, Resources], limit: Resources | None = None) -> None:
        self.nodes = nodes
        self.free: dict[str, Resources] = {}
        self.limit = limit

    def install(self, monkeypatch: pytest.MonkeyPatch) -> RayState:
        """Make Ray answer with this state."""
        monkeypatch.setattr(ray, "nodes", self._list)
        monkeypatch.setattr(state, "available_resources_per_node", lambda: {**self.nodes, **self.free})
        monkeypatch.setattr(state, "get_max_resources_from_cluster_config", lambda: self.limit)
        return self

    def _list(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "NodeManagerHostname": node, "Resources": resources, "Alive": True}
            for node, resources in self.nodes.items()
        ]
