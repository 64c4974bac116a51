"""Processes that outlive the TrainerActor's, so that the next one finds them, but not the Trainer."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

#: Seconds before a TrainerActor that is being started again is asked again.
ASK_AGAIN_S = 0.1


def end_with(controller: Any) -> None:
    """End this actor when the TrainerActor is gone for good; while it is started again, this waits.

    Args:
        controller: Its handle.
    """
    me = ray.get_runtime_context().current_actor
    threading.Thread(target=_wait, args=(controller, me), name="raysgd-lifeline", daemon=True).start()


def _wait(controller: Any, me: Any) -> None:
    ask(controller, "live_on")  # which has no answer
    ray.kill(me)


def ask(controller: Any, method: str, *args: Any) -> None:
    """Call a method of the TrainerActor until it has answered, or is gone for good."""
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
    """Whether a TrainerActor that did not answer is there, now or when it has been started again. Waits for it."""
    while ray.is_initialized():  # a call would start Ray anew
        try:
            ray.get(controller.endpoint.remote())
            return True
        except ActorUnavailableError:
            time.sleep(ASK_AGAIN_S)
        except RayError:
            break
    return False
