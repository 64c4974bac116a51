"""The calls of a session to the TrainerActor: a cut connection does not end train_func."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from raysgd.workers.process import build
from raysgd.workers.process.build import ControllerLink

CUT = (GetTimeoutError("no handle"), ActorUnavailableError("the connection was cut", None))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Outcomes of the next calls of Ray, in their order: exceptions are raised."""
    outcomes: list[Any] = []

    def answer(*_: Any, **__: Any) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(build, "_ASK_AGAIN_S", 0)
    monkeypatch.setattr(ray, "get_actor", answer)
    monkeypatch.setattr(ray, "get", answer)
    return outcomes


def test_call_is_made_again_until_there_is_an_answer(calls: list[Any]) -> None:
    actor = SimpleNamespace(join_barrier=SimpleNamespace(remote=lambda *args: args))
    calls += [CUT[0], actor, *CUT, b"answer"]
    assert ControllerLink("controller", "run", 1, 0).join_barrier("broadcast", 0, b"x") == b"answer"
    assert calls == []


def test_death_of_the_trainer_actor_is_an_error(calls: list[Any]) -> None:
    actor = SimpleNamespace(list_checkpoints=SimpleNamespace(remote=lambda *args: args))
    calls += [actor, ActorDiedError()]
    with pytest.raises(ActorDiedError):
        ControllerLink("controller", "run", 1, 0).list_checkpoints(0, 0)
