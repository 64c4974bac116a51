"""The user's objects are pickled with models unwrapped; errors name the part that cannot be pickled."""

from __future__ import annotations

import functools
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import ray.cloudpickle
import torch

from raysgd.errors import SerializationError
from raysgd.workers.pickling import Packed, dumps, dumps_call, dumps_error, dumps_named, loads, loads_call

LOCK = threading.Lock()


def by_value(source: str, name: str = "train_func", **variables: Any) -> Any:
    """Define a function as in a notebook or a script: it is pickled by value with its globals."""
    namespace = {"__name__": "__main__", **variables}
    exec(source, namespace)
    return namespace[name]


def path_of(obj: Any, name: str = "config") -> str:
    with pytest.raises(SerializationError) as caught:
        dumps_named(obj, name)
    assert str(caught.value).startswith(caught.value.path)
    return caught.value.path


# -- what pickles ------------------------------------------------------------------------------------------------------


def test_function_defined_anywhere_can_be_unpickled() -> None:
    base = 2
    function = loads(dumps(lambda x: x + base))
    assert function(3) == 5


def test_pickle_is_read_from_a_memoryview() -> None:
    assert loads(memoryview(dumps({"a": 1}))) == {"a": 1}


def test_code_finds_the_arguments_of_the_drivers_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    call = dumps_call(by_value("def train_func(): import sys; return sys.argv"), "train_func")
    bound = dumps(Packed.of(by_value("def train_func(): import sys; return sys.argv"), "train_func").bind({}))
    monkeypatch.setattr(sys, "argv", ["default_worker.py", "--node-ip-address=10.0.0.1"])
    assert loads_call(call)() == ["train.py", "--lr", "0.1"]
    monkeypatch.setattr(sys, "argv", ["default_worker.py", "--node-ip-address=10.0.0.1"])
    assert loads(bound)() == ["train.py", "--lr", "0.1"]


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
def test_error_names_the_key_that_cannot_be_pickled(config: Any, path: str) -> None:
    assert path_of(config) == path


def test_message_names_the_part_the_reason_and_the_advice() -> None:
    with pytest.raises(SerializationError) as caught:
        dumps_named({"connection": LOCK}, "config")
    text = str(caught.value)
    for expected in ("config['connection']", "_thread.lock", "cannot pickle", "Create it inside train_func"):
        assert expected in text
    assert isinstance(caught.value.__cause__, TypeError)


def test_error_names_the_attribute_of_an_object() -> None:
    class Model:
        def __init__(self) -> None:
            self.size = 3
            self.guard = LOCK

    assert path_of({"model": Model()}) == "config['model'].guard"


def test_error_names_the_closure_variable() -> None:
    fine, lock = 1, threading.Lock()

    def train_func(config: Any) -> Any:
        return fine, lock

    assert path_of(train_func, "train_func") == "train_func (its variable 'lock')"


def test_error_names_the_variable_of_a_called_function() -> None:
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
def test_error_names_the_global_variable_of_a_script(source: str) -> None:
    function = by_value(source, lock=LOCK, fine=1)
    assert path_of(function, "train_func") == "train_func (its global variable 'lock')"


def test_error_names_a_default_value() -> None:
    function = by_value("def train_func(config, guard=lock):\n    return guard", lock=LOCK)
    assert path_of(function, "train_func") == "train_func (a default value)"


def test_error_names_what_a_partial_or_a_method_is_bound_to() -> None:
    class Job:
        def __init__(self) -> None:
            self.guard = LOCK

        def train(self, config: Any) -> None: ...

    def train_func(config: Any, guard: Any) -> None: ...

    assert path_of(functools.partial(train_func, guard=LOCK), "train_func") == "train_func.keywords['guard']"
    assert path_of(functools.partial(train_func, {}, LOCK), "train_func") == "train_func.args[1]"
    assert path_of(Job().train, "train_func") == "train_func.__self__.guard"


def test_variable_without_a_value_is_ignored() -> None:
    lock = threading.Lock()

    def train_func(config: Any) -> Any:
        return later, lock

    path = path_of(train_func, "train_func")
    later = 1
    assert path == "train_func (its variable 'lock')"
    assert later


def test_error_names_an_object_whose_own_pickling_fails() -> None:
    class Closed:
        def __reduce__(self) -> Any:
            raise RuntimeError("not like this")

    with pytest.raises(SerializationError, match="RuntimeError: not like this") as caught:
        dumps_named([1, Closed()], "state")
    assert caught.value.path == "state[1]"


def test_error_names_an_object_that_refers_to_itself() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    loop["lock"] = LOCK
    assert path_of(loop) == "config['lock']"


# -- what train_func returns -------------------------------------------------------------------------------------------


class Wrapped(torch.nn.Module):
    """A wrapper like that of `prepare_model`."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def same(obj: Any) -> Any:
    return obj


UNWRAP: dict[type, Callable[[Any], tuple[Any, ...]]] = {Wrapped: lambda wrapped: (same, (wrapped.module,))}


def test_wrapped_models_are_unwrapped_anywhere_in_the_value() -> None:
    model = torch.nn.Linear(2, 1)
    value = {"model": Wrapped(model), "list": [Wrapped(model)], "loss": 0.5}
    back = loads(dumps_named(value, "the value", UNWRAP))
    assert type(back["model"]) is torch.nn.Linear
    assert back["list"][0] is back["model"]  # one model, as it was
    assert back["loss"] == 0.5
    assert torch.equal(back["model"].weight, model.weight)


def test_nested_wrappers_are_unwrapped() -> None:
    assert type(loads(dumps(Wrapped(Wrapped(torch.nn.Linear(1, 1))), UNWRAP))) is torch.nn.Linear


def test_error_names_the_part_of_a_wrapped_model() -> None:
    model = torch.nn.Linear(1, 1)
    model.guard = LOCK  # type: ignore[assignment]
    with pytest.raises(SerializationError, match="lock"):
        dumps_named({"model": Wrapped(model)}, "the value", UNWRAP)


# -- exceptions --------------------------------------------------------------------------------------------------------


class NeedsTwo(Exception):
    """An exception with more parameters than its message, as many libraries have."""

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
def test_exception_keeps_its_type_and_attributes(error: BaseException) -> None:
    data = dumps_error(error)
    assert data is not None
    back = cloudpickle.loads(data)
    assert type(back) is type(error)
    assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))


def test_exception_with_an_unpicklable_attribute_gives_none() -> None:
    with socket.socket() as connection:
        error = ValueError("x")
        error.connection = connection  # type: ignore[attr-defined]
        assert dumps_error(error) is None


def test_exception_of_a_local_class_can_be_unpickled() -> None:
    class Local(Exception):
        pass

    data = dumps_error(Local("x"))
    assert data is not None
    assert str(pickle.loads(data)) == "x"


class Known:
    """A type with a serializer registered by `ray.util.register_serializer`."""


def test_backend_reducers_have_precedence_over_rays_serializers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ray.cloudpickle.CloudPickler.dispatch, Known, lambda _: (str, ("Ray's",)))
    assert loads(dumps([Known()])) == ["Ray's"]
    assert loads(dumps([Known()], {Known: lambda _: (str, ("the backend's",))})) == ["the backend's"]
