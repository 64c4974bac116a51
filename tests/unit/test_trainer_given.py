"""What may be given to a run, and errors that say what was given, what is allowed and what to do."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.controller.shelf import Start
from raysgd.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from raysgd.trainer.given import check_config, check_returns, check_train_func, resolve_start
from raysgd.workers.entry import takes_config


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


def only_kwargs(**kwargs: Any) -> str:
    return "called"


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
        only_kwargs,
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
        {}.update,  # written in C: tells little about itself
    ],
    ids=name_of,
)
def test_functions_that_can_be_called_with_the_config_are_accepted_and_called(function: Any) -> None:
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
        (Job, "is no function"),
        (dict, "is no function"),
        (None, "is no function"),
        ("train", "is no function"),
        (no_argument(), "is no function"),
        (two, "needs config, lr"),
        (lambda a, b: None, "needs a, b"),
        (keyword_only, "needs config, lr"),
        (Job.train, "needs self, config"),
    ],
    ids=name_of,
)
def test_what_cannot_be_trained_with_is_refused(function: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        check_train_func(function)
    assert "train_func" in str(caught.value)


def test_the_error_for_a_second_argument_shows_the_signature_and_a_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        check_train_func(two)
    assert "two(config" in str(caught.value) and "functools.partial" in str(caught.value)


# -- config ------------------------------------------------------------------------------------------------------------


def test_no_config_is_an_empty_one() -> None:
    assert check_config(None) == {}


@pytest.mark.parametrize("config", [{}, {"lr": 0.1}, MappingProxyType({"lr": 0.1})])
def test_a_config_is_a_dict_of_our_own(config: Any) -> None:
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
def test_what_is_no_config_is_refused(config: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_config(config)


@pytest.mark.parametrize("returns", ["first", "all"])
def test_returns(returns: str) -> None:
    assert check_returns(returns) == returns


@pytest.mark.parametrize("returns", ["last", None, True, 0, ["all"]])
def test_what_returns_cannot_be_is_refused_with_what_it_can(returns: Any) -> None:
    with pytest.raises(ConfigError, match=r"'first' .* or 'all'"):
        check_returns(returns)


# -- where to start from -----------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A checkpoint of another run, without files."""
    manifest = Manifest(number=9, attempt=1, iteration=7, time_total_s=1.5, world_size=1, created_s=0.0)
    return CheckpointStore(Storage.from_uri(tmp_path)).commit(manifest)


def test_a_run_starts_from_nothing_by_default() -> None:
    assert resolve_start(None) == (Start(), None)


@pytest.mark.parametrize("kind", [str, Path, Checkpoint.from_path])
def test_a_checkpoint_is_gone_on_from_in_a_run_that_counts_its_own(kind: Callable[[str], Any], checkpoint: str) -> None:
    start, state = resolve_start(kind(checkpoint))
    assert state is None
    assert start == Start(checkpoint, iteration=7, time_total_s=1.5, number=0)


def test_a_state_is_what_the_first_attempt_loads() -> None:
    state = {"epoch": 3}
    assert resolve_start(state) == (Start(), state)


@pytest.mark.parametrize(
    ("given", "kind"), [(3, "an int"), (0.5, "a float"), ([1], "a list"), (True, "a bool"), (b"x", "a bytes")]
)
def test_what_is_neither_a_checkpoint_nor_a_path_nor_a_state_is_refused(given: Any, kind: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"run\(checkpoint=\.\.\.\) got {kind}; give a Checkpoint, a path, or a state"
    ):
        resolve_start(given)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint at"):
        resolve_start(tmp_path / "nothing")


def test_a_checkpoint_that_was_deleted_meanwhile_is_refused(tmp_path: Path, checkpoint: str) -> None:
    held = Checkpoint.from_path(checkpoint)
    CheckpointStore(Storage.from_uri(tmp_path)).delete(9)
    with pytest.raises(CheckpointNotFoundError):
        resolve_start(held)


def test_a_checkpoint_in_memory_alone_cannot_be_started_from() -> None:
    with pytest.raises(CheckpointError, match="memory only"):
        resolve_start(Checkpoint(None))
