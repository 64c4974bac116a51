"""The watchdog of processes that outlive one process of the TrainerActor, but end with the Trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

#: Seconds between two calls to a TrainerActor that is being restarted.
ASK_AGAIN_S = 0.1


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
