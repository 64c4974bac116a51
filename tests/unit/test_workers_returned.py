"""What a function of the user's returned or raised, on its way out of a worker."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from raysgd.errors import ConfigError, SerializationError
from raysgd.workers.pickling import loads
from raysgd.workers.returned import CallFailed, check_returned, dumps_returned, failed_call, root_of


async def coroutine() -> None: ...


async def async_generator() -> AsyncIterator[int]:
    yield 1


def generator() -> Iterator[int]:
    yield 1


def test_a_coroutine_is_refused_and_closed_so_that_nobody_complains() -> None:
    value = coroutine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigError, match="train_func is async: it returned a coroutine; give a plain function"):
            check_returned(value, "train_func")
        assert inspect.getcoroutinestate(value) == inspect.CORO_CLOSED
        del value


@pytest.mark.parametrize("value", [generator(), async_generator(), (n for n in range(3))])
def test_a_generator_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="the function returned a generator, of which nothing has run"):
        check_returned(value, "the function")


@pytest.mark.parametrize("value", [None, 1, [1], {"f": 1}, "text"])
def test_a_value_travels(value: Any) -> None:
    assert loads(dumps_returned(value, "train_func", {})) == value


@pytest.mark.parametrize(
    ("value", "rank", "path"),
    [
        ({"l": threading.Lock()}, None, "train_func's return value ['l']"),
        ({"l": [threading.Lock()]}, 3, "train_func's return value on rank 3 ['l'][0]"),
        (threading.Lock(), None, "train_func's return value"),
    ],
)
def test_a_value_that_does_not_pickle_is_named(value: Any, rank: int | None, path: str) -> None:
    with pytest.raises(SerializationError) as caught:
        dumps_returned(value, "train_func", {}, rank)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path} cannot be sent to another process: a _thread.lock does not pickle")
    assert str(caught.value).endswith("Return what it is made of.")


def test_an_error_travels_with_its_place() -> None:
    try:
        raise LookupError("no data")
    except LookupError as error:
        failed = pickle.loads(pickle.dumps(failed_call(error, 2, "host (ip)", "elsewhere.py")))
    assert isinstance(failed, CallFailed)
    assert str(failed) == "rank 2: LookupError: no data"
    assert (failed.data["rank"], failed.data["node"]) == (2, "host (ip)")
    assert "test_workers_returned.py" in failed.data["traceback"]


def test_of_several_ranks_the_one_that_the_others_followed_is_told() -> None:
    def failing(error: BaseException, in_collective: bool) -> BaseException:
        failed = failed_call(error, 0, "here", __file__)
        failed.data["in_collective"] = in_collective
        return failed

    async def find(first: BaseException, *errors: BaseException | None) -> BaseException:
        calls: list[asyncio.Future[Any]] = []
        for error in errors:
            calls.append(asyncio.get_running_loop().create_future())
            if error is None:
                calls[-1].set_result(None)
            else:
                calls[-1].set_exception(error)
        calls.append(asyncio.get_running_loop().create_future())  # one that has not ended
        return root_of(first, calls)

    followed, own = failing(RuntimeError("Connection closed by peer"), True), failing(LookupError("x"), False)
    assert asyncio.run(find(followed, followed, None, own)) is own
    assert asyncio.run(find(own, followed, own)) is own
    assert asyncio.run(find(followed, followed, None)) is followed
    assert asyncio.run(find(ValueError("of Ray"), followed)).args == ("of Ray",)
