"""The process that removes a Trainer's own placement groups when the TrainerActor is gone.

Ray removes a placement group with the driver it was made under, or with the detached actor that made it. A Trainer in a Tune
trial has neither: when its process is killed, Tune removes the trial's group, but the groups that the Trainer added would stay
until the search's driver ends. The guard must outlive the TrainerActor, so it is a process of its own. It exists only where
there is such a group.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd.controller.watchdog import end_with
from raysgd.workers.placement.cluster import NAMESPACE
from raysgd.workers.placement.slots import remove_placement_groups


class PlacementGuard:
    """A Ray actor that waits for the end of the TrainerActor.

    Args:
        name: Prefix of the names of the groups.
        controller: Handle of the TrainerActor.
    """

    def __init__(self, name: str, controller: Any) -> None:
        end_with(controller, lambda: remove_placement_groups(name))


def start_guard(name: str, controller: Any) -> None:
    """Start a guard, if there is none; returns at once.

    Args:
        name: Prefix of the names of the groups.
        controller: Handle of the TrainerActor.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    ray.remote(PlacementGuard).options(
        name=f"{name}-placement-guard",
        namespace=NAMESPACE,
        num_cpus=0,
        scheduling_strategy=here,
        lifetime="detached",
        get_if_exists=True,
    ).remote(name, controller)
