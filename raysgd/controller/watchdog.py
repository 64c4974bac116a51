"""The watchdog of processes that outlive one process of the TrainerActor, but end with the Trainer."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

#: Seconds before a TrainerActor that is being started again is asked again.
ASK_AGAIN_S = 0.1


def end_with(controller: Any) -> None:
    """End this actor when the TrainerActor is gone for good; a restart is waited for.

    Args:
        controller: Handle of the TrainerActor.
    """
    me = ray.get_runtime_context().current_actor
    threading.Thread(target=_wait, args=(controller, me), name="raysgd-watchdog", daemon=True).start()


def _wait(controller: Any, me: Any) -> None:
    ask(controller, "wait_for_end")  # which has no answer
    ray.kill(me)


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
    while ray.is_initialized():  # a call would start Ray again
        try:
            ray.get(controller.endpoint.remote())
            return True
        except ActorUnavailableError:
            time.sleep(ASK_AGAIN_S)
        except RayError:
            break
    return False
