"""Processes that outlive a restart of the TrainerActor, but end with the Trainer: how they start and end, and two guards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd.workers.liveness.own_processes import CONTROLLER, ProcessWatch
from raysgd.workers.liveness.watched import Watched, watched_actor
from raysgd.workers.placement.cluster import NAMESPACE, place_near
from raysgd.workers.placement.slots import remove_placement_groups

#: Seconds between two calls to a TrainerActor that is being restarted.
ASK_AGAIN_S = 0.1


def prepare_process(kind: type, name: str, *, is_bound_to_node: bool = False) -> Any:
    """Return the Ray actor class ``kind`` with the options of such a process: detached, on this node, without CPUs.

    Args:
        kind: The class.
        name: The actor's name; a live actor of that name is used again.
        is_bound_to_node: No other node can take the process when this one is lost.
    """
    here = ray.get_runtime_context().get_node_id()
    bound = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}
    where = bound if is_bound_to_node else place_near(here)
    return watched_actor(kind).options(name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, **where)


def end_with(controller: Any, before: Callable[[], None] = lambda: None) -> None:
    """End this actor when the TrainerActor is gone for good. A restart of the TrainerActor is waited for.

    Args:
        controller: Handle of the TrainerActor.
        before: Called when the TrainerActor is gone, before this actor ends.
    """
    me = ray.get_runtime_context().current_actor

    def wait() -> None:
        ask(controller, "wait_for_end")  # it never answers, so the call ends with the TrainerActor
        before()
        ray.kill(me)

    threading.Thread(target=wait, name="raysgd-watchdog", daemon=True).start()


class PlacementGuard(Watched):
    """A Ray actor that removes a Trainer's own placement groups when the TrainerActor is gone.

    Ray removes a placement group with the driver it was made under, or with the detached actor that made it. A Trainer in a
    Tune trial has neither: when its process is killed, Tune removes the trial's group, but the groups that the Trainer added
    would stay until the search's driver ends. Only such a Trainer has a guard.

    Args:
        name: Prefix of the names of the groups.
        controller: Handle of the TrainerActor.
    """

    def __init__(self, name: str, controller: Any) -> None:
        end_with(controller, lambda: remove_placement_groups(name))


class ControllerGuard(Watched):
    """A Ray actor that watches the TrainerActor of a detached Trainer, until its end.

    The driver of such a Trainer may be gone, and a run that is paused, over, or waits for resources has no other process.

    Args:
        controller: Handle of the TrainerActor.
        timeout_s: See `ProcessWatch`.
    """

    def __init__(self, controller: Any, timeout_s: float) -> None:
        self._controller = controller
        self._watch = ProcessWatch(timeout_s)
        self._watch_controller()
        end_with(controller)

    def _watch_controller(self) -> None:
        # One that has died for good ends this process; see `end_with`.
        self._watch.add(CONTROLLER, lambda: self._controller, on_gone=self._watch_controller)


def ask(controller: Any, method: str, *args: Any) -> None:
    """Call a method of the TrainerActor until it answers, or is gone for good."""
    while True:
        try:
            ray.get(getattr(controller, method).remote(*args))
            return
        except RayActorError:
            if not comes_back(controller):
                return
        except RayError:
            return


def comes_back(controller: Any) -> bool:
    """Wait for a TrainerActor that did not answer; returns whether it answers again, maybe after a restart."""
    while ray.is_initialized():  # otherwise the call below would start Ray again
        try:
            ray.get(controller.endpoint.remote())
            return True
        except ActorUnavailableError:
            time.sleep(ASK_AGAIN_S)
        except RayError:
            break
    return False
