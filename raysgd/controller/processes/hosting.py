"""Starts the callback host, starts it again after its death, and ends it if callbacks do not end. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raysgd.controller.processes.callback_host import CallbackHost
from raysgd.controller.requests import RunRequest
from raysgd.controller.watchdog import prepare_process
from raysgd.result import RunInfo
from raysgd.session.events import Failed
from raysgd.workers.liveness.death_reasons import first_line
from raysgd.workers.liveness.own_processes import CALLBACK_HOST, ProcessWatch
from raysgd.workers.placement.calls import call_cluster, post_to_cluster

#: How often the process is started again in one run.
MAX_RESTARTS = 3
#: Seconds after the run's end after which a warning says what the run still waits for.
NOTICE_S = 30.0
#: The time for the process to say what it does, before it is ended.
_DESCRIBE_TIMEOUT_S = 2.0


class CallbackHosting:
    """The callback host of a Trainer, for one run after the other.

    Args:
        name: Name of the TrainerActor, which the actor's name is made of.
        controller: Handle of the TrainerActor.
        watch: Watches the process.
        timeout_s: Seconds that callbacks have after the end of a run.
    """

    def __init__(self, name: str, controller: Any, watch: ProcessWatch, timeout_s: float) -> None:
        self._name = name
        self._controller = controller
        self._watch = watch
        self._timeout_s = timeout_s
        self._actor: Any = None
        self._why = ""
        self._is_closed = False

    def follow(
        self, request: RunRequest, info: RunInfo, warn: Callable[[str], None]
    ) -> Callable[[], Coroutine[Any, Any, Failed | None]]:
        """Begin to call the callbacks of a run.

        Returns:
            A function to await after the run's end: it waits for the callbacks' end, and returns the error of a critical one.
        """
        following = asyncio.ensure_future(self._follow(request, info, warn))
        return lambda: self._wait(following, warn)

    def close(self) -> None:
        """End the process."""
        self._is_closed = True
        self._end()

    async def _follow(self, request: RunRequest, info: RunInfo, warn: Callable[[str], None]) -> Failed | None:
        for restart in range(MAX_RESTARTS + 1):
            try:
                actor = await self._start()
                done = actor.follow.remote(request.run_id, info, request.host_callbacks, dict(request.reduce))
                failed: Failed | None = await done
                return failed
            except RayTaskError as error:
                warn(
                    f"the callbacks on the controller's side were not called: {type(error.cause).__name__}: {error.cause}"
                )
                return None
            except RayError as error:
                if self._is_closed:
                    return None
                why, self._why, self._actor = self._why or first_line(error), "", None
                then = (
                    "It is started again, and its callbacks get the run from the beginning."
                    if restart < MAX_RESTARTS
                    else f"It was started again {MAX_RESTARTS} times, so its callbacks get no further calls in this run."
                )
                warn(f"{CALLBACK_HOST} is gone: {why}. {then}")
        return None

    async def _wait(self, following: asyncio.Future[Failed | None], warn: Callable[[str], None]) -> Failed | None:
        notice_s = min(NOTICE_S, self._timeout_s)
        await asyncio.wait([following], timeout=notice_s)
        if not following.done() and self._timeout_s > notice_s:
            call, stack = await self._describe()
            warn(
                f"the run is over, and waits for {call} until {self._timeout_s:g} s after its end. "
                f"FailureConfig(callback_timeout_s=...) sets that time.{stack}"
            )
            await asyncio.wait([following], timeout=self._timeout_s - notice_s)
        if following.done():
            return following.result()
        call, stack = await self._describe()
        following.cancel()
        self._end()
        warn(
            f"{CALLBACK_HOST} was killed, because it had not ended {self._timeout_s:g} s after the run: it was in {call}. "
            f"What it had not written is lost. FailureConfig(callback_timeout_s=...) gives callbacks more time.{stack}"
        )
        return None

    async def _describe(self) -> tuple[str, str]:
        """Return the callback's method that the process is in, and its stack on lines of its own."""
        with contextlib.suppress(RayError, asyncio.TimeoutError):
            if self._actor is not None:
                call = await asyncio.wait_for(self._actor.describe_call.remote(), _DESCRIBE_TIMEOUT_S)
                return ("its callbacks' code", "") if call is None else (call[0], f"\n{call[1]}")
        return "a callback, whose name is not known, because its process does not answer", ""

    async def _start(self) -> Any:
        if self._actor is None:
            # On this node, because the callbacks write to the same disk.
            start = prepare_process(CallbackHost, f"{self._name}-callbacks", is_bound_to_node=True)
            self._actor = actor = await call_cluster(start.remote, self._controller)
            self._watch.add(CALLBACK_HOST, lambda: actor, on_kill=self._on_kill)
        return self._actor

    def _on_kill(self, why: str) -> None:
        self._why = f"it {why}, and was killed"

    def _end(self) -> None:
        self._watch.remove(CALLBACK_HOST)
        if self._actor is not None:
            post_to_cluster(ray.kill, self._actor)
            self._actor = None
