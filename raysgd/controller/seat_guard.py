"""The process that removes a Trainer's own placement groups when the TrainerActor is gone.

Ray removes a group with the driver that it was made under, or with a detached actor that made it. A Trainer in a Tune trial
is neither: where its process is killed, Tune removes the trial's group, and what the Trainer has asked for beside that
would stay until the search's driver ends. A process of its own, since it must outlive the other; there is one only where
there is such a group.
"""

from __future__ import annotations

import threading
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd.controller.lifeline import ask
from raysgd.workers.cluster import NAMESPACE
from raysgd.workers.seats import remove_placements


class SeatGuard:
    """A Ray actor that waits.

    Args:
        name: Begins the names of the groups.
        controller: Handle of the TrainerActor.
    """

    def __init__(self, name: str, controller: Any) -> None:
        me = ray.get_runtime_context().current_actor
        threading.Thread(target=_guard, args=(name, controller, me), name="raysgd-guard", daemon=True).start()


def start_guard(name: str, controller: Any) -> None:
    """Start one, if there is none; returns at once.

    Args:
        name: Begins the names of the groups.
        controller: Handle of the TrainerActor.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    ray.remote(SeatGuard).options(
        name=f"{name}-seats",
        namespace=NAMESPACE,
        num_cpus=0,
        scheduling_strategy=here,
        lifetime="detached",
        get_if_exists=True,
    ).remote(name, controller)


def _guard(name: str, controller: Any, me: Any) -> None:
    ask(controller, "live_on")  # which has no answer
    remove_placements(name)
    ray.kill(me)
