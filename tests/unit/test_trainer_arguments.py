"""The arguments of a run: what is accepted, and the errors for what is not."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from types import MappingProxyType
from typing import Any

import pytest

from raysgd.errors import ConfigError
from raysgd.trainer.arguments import check_config, check_returns, check_train_func
from raysgd.workers.process.train_thread import takes_config


def no_argument() -> str:
    return "called"


def one_argument(config: Any) -> Any:
    return config


def defaulted(config: Any = None) -> Any:
    return config


def extra_defaulted(config: Any, lr: float = 0.1, *, momentum: float = 0.9) -> Any:
    return config


def all_defaulted(config: Any = None, lr: float = 0.1) -> Any:
    return config


def keyword_defaulted(*, lr: float = 0.1) -> str:
    return "called"


def starred(*args: Any, **kwargs: Any) -> Any:
    return args[0]


def positional_only(config: Any, /) -> Any:
    return config


def two(config: Any, lr: float) -> Any:
    return config


def keyword_only(config: Any, *, lr: float) -> Any:
    return config


async def coroutine(config: Any) -> None: ...


def generator(config: Any) -> Iterator[int]:
    yield 1


async def async_generator(config: Any) -> AsyncIterator[int]:
    yield 1


class Job:
    def train(self, config: Any) -> Any:
        return config

    async def train_async(self, config: Any) -> None: ...

    @staticmethod
    def static(config: Any) -> Any:
        return config

    @classmethod
    def of_class(cls, config: Any) -> Any:
        return config

    def __call__(self, config: Any) -> Any:
        return config


class AsyncJob:
    async def __call__(self, config: Any) -> None: ...


class GeneratorJob:
    def __call__(self, config: Any) -> Iterator[int]:
        yield 1


def through(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@functools.wraps(coroutine)
def made_synchronous(config: Any) -> Any:
    asyncio.run(coroutine(config))
    return config


def name_of(given: Any) -> str:
    plain = given.func if isinstance(given, functools.partial) else given
    return f"{type(given).__name__} {getattr(plain, '__qualname__', plain if isinstance(plain, str) else '')}"


CONFIG = {"lr": 0.1}


@pytest.mark.parametrize(
    "function",
    [
        no_argument,
        one_argument,
        defaulted,
        extra_defaulted,
        all_defaulted,
        keyword_defaulted,
        starred,
        positional_only,
        lambda: "called",
        lambda config: config,
        Job().train,
        Job.static,
        Job.of_class,
        Job(),
        functools.partial(two, lr=0.1),
        functools.partial(keyword_only, lr=0.1),
        functools.partial(one_argument),
        functools.partial(functools.partial(two), lr=0.1),
        through(one_argument),
        through(no_argument),
        made_synchronous,
        {}.update,  # written in C: has no signature
    ],
    ids=name_of,
)
def test_functions_of_zero_or_one_argument_are_accepted(function: Any) -> None:
    assert check_train_func(function) is function
    value = function(CONFIG) if takes_config(function) else function()
    assert value in (CONFIG, "called", None)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (coroutine, "is async"),
        (async_generator, "is async"),
        (functools.partial(coroutine), "is async"),
        (functools.partial(functools.partial(coroutine), {}), "is async"),
        (Job().train_async, "is async"),
        (AsyncJob(), "is async"),
        (functools.partial(AsyncJob()), "is async"),
        (generator, "is a generator"),
        (functools.partial(generator), "is a generator"),
        (GeneratorJob(), "is a generator"),
        (Job, "is not a function"),
        (dict, "is not a function"),
        (None, "is not a function"),
        ("train", "is not a function"),
        (no_argument(), "is not a function"),
        (two, "needs config, lr"),
        (lambda a, b: None, "needs a, b"),
        (keyword_only, "needs config, lr"),
        (Job.train, "needs self, config"),
    ],
    ids=name_of,
)
def test_invalid_train_func_is_refused(function: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        check_train_func(function)
    assert "train_func" in str(caught.value)


def test_error_for_a_second_argument_shows_the_signature_and_a_solution() -> None:
    with pytest.raises(ConfigError) as caught:
        check_train_func(two)
    assert "two(config" in str(caught.value) and "functools.partial" in str(caught.value)


# -- config ------------------------------------------------------------------------------------------------------------


def test_missing_config_is_an_empty_dict() -> None:
    assert check_config(None) == {}


@pytest.mark.parametrize("config", [{}, {"lr": 0.1}, MappingProxyType({"lr": 0.1})])
def test_config_is_copied(config: Any) -> None:
    checked = check_config(config)
    assert checked == dict(config)
    checked["more"] = 1
    assert "more" not in config


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ([("lr", 0.1)], "is a list; give a dict"),
        ("lr=0.1", "is a str; give a dict"),
        (0.1, "is a float; give a dict"),
        ({1: 2}, "has the key 1, an int; give strings"),
        ({("a", "b"): 2}, "a tuple; give strings"),
        ({None: 2}, "a NoneType; give strings"),
    ],
)
def test_invalid_config_is_refused(config: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_config(config)


@pytest.mark.parametrize("returns", ["first", "all"])
def test_returns(returns: str) -> None:
    assert check_returns(returns) == returns


@pytest.mark.parametrize("returns", ["last", None, True, 0, ["all"]])
def test_invalid_returns_is_refused_with_the_valid_values(returns: Any) -> None:
    with pytest.raises(ConfigError, match=r"'first' .* or 'all'"):
        check_returns(returns)
