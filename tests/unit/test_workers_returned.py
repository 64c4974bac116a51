"""Values and errors of the user's functions are pickled in a worker for the driver."""

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
from raysgd.workers.pickling import CallFailed, check_returned, dumps_returned, failed_call, find_root_cause, loads


async def coroutine() -> None: ...


async def async_generator() -> AsyncIterator[int]:
    yield 1


def generator() -> Iterator[int]:
    yield 1


def test_coroutine_is_refused_and_closed_without_a_warning() -> None:
    value = coroutine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigError, match="train_func is async: it returned a coroutine; give a plain function"):
            check_returned(value, "train_func")
        assert inspect.getcoroutinestate(value) == inspect.CORO_CLOSED
        del value


@pytest.mark.parametrize("value", [generator(), async_generator(), (n for n in range(3))])
def test_generator_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="the function returned a generator, whose body has not run"):
        check_returned(value, "the function")


@pytest.mark.parametrize("value", [None, 1, [1], {"f": 1}, "text"])
def test_value_can_be_unpickled(value: Any) -> None:
    assert loads(dumps_returned(value, "train_func", {})) == value


@pytest.mark.parametrize(
    ("value", "rank", "path"),
    [
        ({"l": threading.Lock()}, None, "train_func's return value ['l']"),
        ({"l": [threading.Lock()]}, 3, "train_func's return value on rank 3 ['l'][0]"),
        (threading.Lock(), None, "train_func's return value"),
    ],
)
def test_error_names_the_part_that_cannot_be_pickled(value: Any, rank: int | None, path: str) -> None:
    with pytest.raises(SerializationError) as caught:
        dumps_returned(value, "train_func", {}, rank)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path} cannot be sent to another process: a _thread.lock does not pickle")
    assert str(caught.value).endswith("Return the values it is built from.")


def test_error_keeps_its_rank_node_and_traceback() -> None:
    try:
        raise LookupError("no data")
    except LookupError as error:
        failed = pickle.loads(pickle.dumps(failed_call(error, 2, "host (ip)", "elsewhere.py")))
    assert isinstance(failed, CallFailed)
    assert str(failed) == "rank 2: LookupError: no data"
    assert (failed.data["rank"], failed.data["node"]) == (2, "host (ip)")
    assert "test_workers_returned.py" in failed.data["traceback"]


def test_notes_of_an_error_are_in_its_traceback_and_not_in_its_summary() -> None:
    error = LookupError("no data")
    error.__notes__ = ["Mount the folder."]  # what `add_note` does from Python 3.11 on
    failed = failed_call(error, 2, "host (ip)", "elsewhere.py")
    assert str(failed) == "rank 2: LookupError: no data"


def test_root_cause_is_the_first_error_not_raised_by_a_collective() -> None:
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
        calls.append(asyncio.get_running_loop().create_future())  # a call that has not ended
        return find_root_cause(first, calls)

    followed, own = failing(RuntimeError("Connection closed by peer"), True), failing(LookupError("x"), False)
    assert asyncio.run(find(followed, followed, None, own)) is own
    assert asyncio.run(find(own, followed, own)) is own
    assert asyncio.run(find(followed, followed, None)) is followed
    assert asyncio.run(find(ValueError("of Ray"), followed)).args == ("of Ray",)
