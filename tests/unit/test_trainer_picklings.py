"""How often the arguments of a run are pickled: each once, however large they are."""

from __future__ import annotations

import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from raysgd.callbacks import Callback
from raysgd.controller.requests import RunRequest
from raysgd.errors import SerializationError
from raysgd.trainer import assembly
from raysgd.trainer.arguments import RunArguments
from raysgd.trainer.channel import Channel
from raysgd.trainer.spec import make_spec
from raysgd.workers.pickling import dumps, loads_call

#: The picklings of each object, by its name.
picklings: Counter[str] = Counter()


class Counted:
    """An object that counts how often it is pickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        picklings[self.name] += 1
        return type(self), (self.name,)


class CountedFunction(Counted):
    def __call__(self, config: dict[str, Any]) -> str:
        return f"{self.name} with {config['values'].name}"


class CountedInWorker(Counted, Callback):
    runs_in = "worker"


class CountedInController(Counted, Callback):
    runs_in = "controller"


class CountedInDriver(Counted, Callback):
    runs_in = "driver"


class Begun(Exception):
    """Raised in place of sending a request to a TrainerActor."""

    def __init__(self, request: RunRequest) -> None:
        super().__init__()
        self.request = request


class RaisingChannel:
    def begin(self, request: RunRequest) -> None:
        raise Begun(request)


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env={}))
    monkeypatch.setattr(ray, "put", lambda data: data)
    picklings.clear()


def request_for(run: RunArguments) -> RunRequest:
    """Return what a Trainer would send to its TrainerActor for this run."""
    spec = make_spec(backend="none")
    with pytest.raises(Begun) as begun:
        assembly.begin_run(cast(Channel, RaisingChannel()), spec, assembly.check_run(run), "runs")
    return begun.value.request


def test_each_argument_of_a_run_is_pickled_once() -> None:
    config = {"values": Counted("config"), "weights": b"w" * (assembly._INLINE_BYTES + 1)}
    callbacks = [CountedInWorker("worker"), CountedInController("controller"), CountedInDriver("driver")]
    state = {"step": Counted("resume_from")}
    request = request_for(RunArguments(CountedFunction("train_func"), config, None, callbacks, state))
    dumps(request)  # as Ray does to send it
    assert picklings == {"config": 1, "train_func": 1, "worker": 1, "controller": 1, "resume_from": 1}
    function, received = loads_call(request.task.code)
    assert function(received) == "train_func with config" and received["weights"] == config["weights"]


GENERATOR = (number for number in range(3))  # does not pickle


@pytest.mark.parametrize(
    ("function", "config", "path"),
    [
        (len, {"model": {"rows": GENERATOR}}, "config['model']['rows']"),
        (functools.partial(len, GENERATOR), {}, "train_func.args[0]"),
    ],
)
def test_error_names_the_part_that_does_not_pickle(function: Any, config: dict[str, Any], path: str) -> None:
    with pytest.raises(SerializationError) as raised:
        request_for(RunArguments(function, config))
    assert raised.value.path == path
