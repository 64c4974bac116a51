"""The callback host is started again after its death, a bounded number of times, and ended if callbacks do not end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

import raysgd
from raysgd.controller.processes import hosting
from raysgd.controller.processes.callback_host import find_call
from raysgd.controller.processes.hosting import MAX_RESTARTS, CallbackHosting
from raysgd.workers.liveness.own_processes import ProcessWatch

REQUEST: Any = SimpleNamespace(run_id="run", host_callbacks=b"", reduce={})
INFO: Any = None


class Host:
    """Stands for the actor: each call of ``follow`` gets the next answer, which is an exception to raise, or None to wait."""

    def __init__(self, answers: list[Exception | str | None]) -> None:
        self._answers = answers
        self.follow = SimpleNamespace(remote=self._follow)
        self.describe_call = SimpleNamespace(remote=self._describe)

    def _follow(self, *args: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        return future

    async def _describe(self) -> tuple[str, str]:
        return "Logger.on_run_end", "the stack"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CallbackHosting]:
    """Return a function that makes a hosting whose processes give these answers."""
    monkeypatch.setattr(ray, "kill", lambda actor: None)

    def make(*answers: Any, timeout_s: float = 60.0) -> CallbackHosting:
        host = Host(list(answers))
        starting = SimpleNamespace(remote=lambda controller: host)
        monkeypatch.setattr(hosting, "prepare_process", lambda *args, **options: starting)
        return CallbackHosting("trainer", None, ProcessWatch(60.0), timeout_s)

    return make


async def test_host_that_dies_is_started_again(make: Callable[..., CallbackHosting]) -> None:
    warnings: list[str] = []
    wait = make(ActorDiedError(), ActorDiedError(), "ended").follow(REQUEST, INFO, warnings.append)
    assert await wait() == "ended"
    assert len(warnings) == 2 and all("It is started again" in warning for warning in warnings)


async def test_host_that_dies_too_often_is_not_started_again(make: Callable[..., CallbackHosting]) -> None:
    warnings: list[str] = []
    wait = make(*[ActorDiedError()] * (MAX_RESTARTS + 1)).follow(REQUEST, INFO, warnings.append)
    assert await wait() is None
    assert len(warnings) == MAX_RESTARTS + 1 and "no further calls" in warnings[-1]


async def test_callbacks_that_do_not_end_are_named(make: Callable[..., CallbackHosting]) -> None:
    warnings: list[str] = []
    wait = make(None, timeout_s=0.01).follow(REQUEST, INFO, warnings.append)
    assert await wait() is None
    (warning,) = warnings
    assert "it was in Logger.on_run_end" in warning and warning.endswith("\nthe stack")


async def test_long_wait_for_callbacks_is_announced(
    make: Callable[..., CallbackHosting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "NOTICE_S", 0.01)
    warnings: list[str] = []
    await make(None, timeout_s=0.02).follow(REQUEST, INFO, warnings.append)()
    assert "the run is over, and waits for Logger.on_run_end until 0.02 s after its end" in warnings[0]


async def test_closed_host_is_not_started_again(make: Callable[..., CallbackHosting]) -> None:
    warnings: list[str] = []
    hosted = make(ActorDiedError(), "ended")
    wait = hosted.follow(REQUEST, INFO, warnings.append)
    hosted.close()
    assert await wait() is None and warnings == []


class Waits(raysgd.Callback):
    """Calls a function, as a callback calls its libraries."""

    def on_run_end(self, error: Any) -> Any:
        return send()


def send() -> tuple[str, str] | None:
    return find_call(sys._getframe())


def test_call_of_a_callback_is_found_on_the_stack() -> None:
    found = Waits().on_run_end(None)
    assert found is not None
    name, stack = found
    assert name == "Waits.on_run_end" and "in send" in stack and "test_call_of" not in stack
    assert send() is None, "it is not called by a callback"
