"""The driver's side of the class API, with a stand-in for the TrainerActor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.errors import ConfigError, WorkerError
from raysgd.trainer.class_api import ClassApi


class Actor:
    """Stands for the channel to a TrainerActor; ``has_instances`` is what the real actor knows."""

    def __init__(self) -> None:
        self.is_gone = False
        self.has_instances = False

    def call(self, method: str, *args: Any, may_repeat: bool = True) -> Any:
        if method == "start_class":
            self.has_instances = args[1]
        if method == "execute" and args[2] and not self.has_instances:
            raise WorkerError("the Trainer's controller process died, and the instances with it; call start() again.")
        return []


class Runs:
    """Stands for `RunManager`; connects to a new actor if the last one is gone."""

    def __init__(self) -> None:
        self.latest, self.spec = SimpleNamespace(channel=Actor()), SimpleNamespace(runtime_env=None)

    def check_idle(self) -> None:
        pass

    def connect(self) -> Any:
        if self.latest.channel.is_gone:
            self.latest.channel = Actor()
        return self.latest.channel


def test_functions_are_not_called_without_instances_that_died_with_the_controller() -> None:
    runs: Any = Runs()
    api = ClassApi(runs)
    api.start(dict, (), {})
    api.execute("execute", lambda instance: None, first_only=False)
    runs.latest.channel.is_gone = True
    for _ in range(2):  # until start() is called again
        with pytest.raises(WorkerError, match="call start"):
            api.execute("execute", lambda instance: None, first_only=False)
    api.start(dict, (), {})
    api.execute("execute", lambda instance: None, first_only=False)
    api.start(None, (), {})
    api.execute("execute", lambda: None, first_only=False)


class Counter:
    def __init__(self, start: int, step: int = 1) -> None:
        """Take a start and a step."""


class TakesPair:
    def __init__(self, shape: tuple[int, ...], options: dict[str, int]) -> None:
        """Take a tuple and a dict."""


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (
            ((10,), {"step": 2}),
            {},
            "write start(Counter, 10, step=2). A tuple and a dict that are meant as such are given",
        ),
        (((10, 2), {}), {}, "write start(Counter, 10, 2). A tuple"),
        ((), {"args": (10,), "kwargs": {"step": 2}}, "write start(Counter, 10, step=2)."),
        ((), {"args": (10,)}, "write start(Counter, 10)."),
        ((), {}, "missing a required argument: 'start'; give its arguments after the class."),
        ((1,), {"stp": 2}, "got an unexpected keyword argument 'stp'"),
    ],
)
def test_wrong_arguments_of_a_class_are_answered_with_what_to_write(args: Any, kwargs: Any, text: str) -> None:
    runs: Any = Runs()
    with pytest.raises(ConfigError) as caught:
        ClassApi(runs).start(Counter, args, kwargs)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(((2, 3, 4), {"a": 1}), {}), ((), {"shape": (2, 3), "options": {}}), (((2, 3),), {"options": {}})],
)
def test_class_that_takes_a_tuple_and_a_dict_gets_them(args: Any, kwargs: Any) -> None:
    runs: Any = Runs()
    ClassApi(runs).start(TakesPair, args, kwargs)
    assert runs.latest.channel.has_instances
