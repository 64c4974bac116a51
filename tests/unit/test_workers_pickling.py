"""Pickles of the user's objects: models unwrapped on the way, and errors that name the part that does not pickle."""

from __future__ import annotations

import functools
import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import ray.cloudpickle
import torch

from raysgd.errors import SerializationError
from raysgd.workers.pickling import dumps, dumps_error, dumps_named, loads

LOCK = threading.Lock()


def by_value(source: str, name: str = "train_func", **variables: Any) -> Any:
    """A function as a notebook or a script defines it: it travels by value, with what it refers to."""
    namespace = {"__name__": "__main__", **variables}
    exec(source, namespace)
    return namespace[name]


def path_of(obj: Any, name: str = "config") -> str:
    with pytest.raises(SerializationError) as caught:
        dumps_named(obj, name)
    assert str(caught.value).startswith(caught.value.path)
    return caught.value.path


# -- what pickles ------------------------------------------------------------------------------------------------------


def test_functions_defined_anywhere_come_back() -> None:
    base = 2
    function = loads(dumps(lambda x: x + base))
    assert function(3) == 5


def test_a_pickle_opens_from_a_memoryview() -> None:
    assert loads(memoryview(dumps({"a": 1}))) == {"a": 1}


# -- what does not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"lr": 0.1, "lock": LOCK}, "config['lock']"),
        ({"model": {"layers": [1, 2, {"lock": LOCK}]}}, "config['model']['layers'][2]['lock']"),
        ({"pair": (1, LOCK)}, "config['pair'][1]"),
        ({3: LOCK}, "config[3]"),
    ],
)
def test_the_offending_key_is_named(config: Any, path: str) -> None:
    assert path_of(config) == path


def test_the_message_says_what_it_is_why_and_what_to_do() -> None:
    with pytest.raises(SerializationError) as caught:
        dumps_named({"connection": LOCK}, "config")
    text = str(caught.value)
    for expected in ("config['connection']", "_thread.lock", "cannot pickle", "Make it inside train_func"):
        assert expected in text
    assert isinstance(caught.value.__cause__, TypeError)


def test_the_offending_attribute_of_an_object_is_named() -> None:
    class Model:
        def __init__(self) -> None:
            self.size = 3
            self.guard = LOCK

    assert path_of({"model": Model()}) == "config['model'].guard"


def test_the_offending_closure_variable_is_named() -> None:
    fine, lock = 1, threading.Lock()

    def train_func(config: Any) -> Any:
        return fine, lock

    assert path_of(train_func, "train_func") == "train_func (its variable 'lock')"


def test_the_offending_variable_of_a_function_that_is_called_is_named() -> None:
    lock = threading.Lock()

    def helper() -> Any:
        return lock

    def train_func(config: Any) -> Any:
        return helper()

    assert path_of(train_func, "train_func") == "train_func (its variable 'helper') (its variable 'lock')"


@pytest.mark.parametrize(
    "source",
    [
        "def train_func(config):\n    return lock",
        "def train_func(config):\n    return [lock for _ in range(3)]",
        "def train_func(config):\n    def inner():\n        return lock\n    return inner()",
        "def train_func(config):\n    return lock if config else train_func({})",
    ],
)
def test_the_offending_global_of_a_script_is_named(source: str) -> None:
    function = by_value(source, lock=LOCK, fine=1)
    assert path_of(function, "train_func") == "train_func (its global variable 'lock')"


def test_a_default_value_that_does_not_pickle_is_named() -> None:
    function = by_value("def train_func(config, guard=lock):\n    return guard", lock=LOCK)
    assert path_of(function, "train_func") == "train_func (a default value)"


def test_what_a_partial_or_a_method_is_bound_to_is_named() -> None:
    class Job:
        def __init__(self) -> None:
            self.guard = LOCK

        def train(self, config: Any) -> None: ...

    def train_func(config: Any, guard: Any) -> None: ...

    assert path_of(functools.partial(train_func, guard=LOCK), "train_func") == "train_func.keywords['guard']"
    assert path_of(functools.partial(train_func, {}, LOCK), "train_func") == "train_func.args[1]"
    assert path_of(Job().train, "train_func") == "train_func.__self__.guard"


def test_a_variable_that_has_no_value_yet_is_no_offender() -> None:
    lock = threading.Lock()

    def train_func(config: Any) -> Any:
        return later, lock

    path = path_of(train_func, "train_func")
    later = 1
    assert path == "train_func (its variable 'lock')"
    assert later


def test_an_object_whose_own_pickling_fails_is_named_itself() -> None:
    class Closed:
        def __reduce__(self) -> Any:
            raise RuntimeError("not like this")

    with pytest.raises(SerializationError, match="RuntimeError: not like this") as caught:
        dumps_named([1, Closed()], "state")
    assert caught.value.path == "state[1]"


def test_something_that_holds_itself_and_does_not_pickle_is_named_too() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    loop["lock"] = LOCK
    assert path_of(loop) == "config['lock']"


# -- what train_func returns -------------------------------------------------------------------------------------------


class Wrapped(torch.nn.Module):
    """Stands for what `prepare_model` makes of a model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def same(obj: Any) -> Any:
    return obj


UNWRAP: dict[type, Callable[[Any], tuple[Any, ...]]] = {Wrapped: lambda wrapped: (same, (wrapped.module,))}


def test_wrapped_models_arrive_unwrapped_wherever_they_sit() -> None:
    model = torch.nn.Linear(2, 1)
    value = {"model": Wrapped(model), "list": [Wrapped(model)], "loss": 0.5}
    back = loads(dumps_named(value, "the value", UNWRAP))
    assert type(back["model"]) is torch.nn.Linear
    assert back["list"][0] is back["model"]  # one model, as it was
    assert back["loss"] == 0.5
    assert torch.equal(back["model"].weight, model.weight)


def test_a_wrapper_inside_a_wrapper_is_unwrapped_to_the_core() -> None:
    assert type(loads(dumps(Wrapped(Wrapped(torch.nn.Linear(1, 1))), UNWRAP))) is torch.nn.Linear


def test_the_part_of_a_wrapped_model_that_does_not_pickle_is_named() -> None:
    model = torch.nn.Linear(1, 1)
    model.guard = LOCK  # type: ignore[assignment]
    with pytest.raises(SerializationError, match="lock"):
        dumps_named({"model": Wrapped(model)}, "the value", UNWRAP)


# -- exceptions --------------------------------------------------------------------------------------------------------


class NeedsTwo(Exception):
    """As many libraries have them: it is made of more than its message."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code


class NeedsKeyword(ValueError):
    def __init__(self, *, field: str) -> None:
        super().__init__(f"bad {field}")
        self.field = field


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), NeedsTwo(3, "x"), NeedsKeyword(field="x"), OSError(2, "x")]
)
def test_an_exception_comes_back_as_its_own_type_with_all_it_has(error: BaseException) -> None:
    data = dumps_error(error)
    assert data is not None
    back = cloudpickle.loads(data)
    assert type(back) is type(error)
    assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))


def test_an_exception_that_holds_what_does_not_pickle_is_none() -> None:
    with socket.socket() as connection:
        error = ValueError("x")
        error.connection = connection  # type: ignore[attr-defined]
        assert dumps_error(error) is None


def test_an_exception_whose_class_is_local_comes_back() -> None:
    class Local(Exception):
        pass

    data = dumps_error(Local("x"))
    assert data is not None
    assert str(pickle.loads(data)) == "x"


class Known:
    """Something that Ray was told how to pickle, as by `ray.util.register_serializer`."""


def test_what_ray_was_told_holds_but_not_against_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ray.cloudpickle.CloudPickler.dispatch, Known, lambda _: (str, ("Ray's",)))
    assert loads(dumps([Known()])) == ["Ray's"]
    assert loads(dumps([Known()], {Known: lambda _: (str, ("the backend's",))})) == ["the backend's"]
