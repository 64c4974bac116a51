"""What a function of the user's returned, or raised, on its way out of the worker. Worker side."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Container, Iterable
from types import TracebackType
from typing import Any

from raysgd.errors import ConfigError
from raysgd.workers.pickling import Reducers, dumps_error, dumps_named


def dumps_returned(value: Any, what: str, reducers: Reducers, rank: int | None = None) -> bytes:
    """Pickle what the function ``what`` returned. The error names ``rank``, where the caller gets the values of all.

    Raises:
        ConfigError: It is a coroutine or a generator, of a function that did not look like one.
        SerializationError: It does not pickle.
    """
    check_returned(value, what)
    place = "" if rank is None else f" on rank {rank}"
    return dumps_named(value, f"{what}'s return value{place}", reducers, advice="Return what it is made of.")


def check_returned(value: Any, what: str) -> None:
    """Refuse what was only begun. A coroutine is closed, so that Python does not complain that nobody awaited it."""
    if inspect.iscoroutine(value):
        value.close()
        raise ConfigError(
            f"{what} is async: it returned a coroutine; give a plain function (asyncio.run may be inside)."
        )
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise ConfigError(f"{what} returned a generator, of which nothing has run; give a plain function.")


class CallFailed(Exception):
    """A function of `Trainer.execute`, or a constructor, failed: what the driver makes the user's exception of.

    Attributes:
        data: As `raysgd.controller.outcome.outcome_error` takes it; the exception in it stays a pickle.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.data = data

    def __str__(self) -> str:
        return f"rank {self.data['rank']}: {self.data['summary']}"


def failed_call(error: BaseException, rank: int, node: str, inside: str) -> CallFailed:
    """``error`` with where it was raised, without the frames of the file ``inside``."""
    error.__traceback__ = user_part(error.__traceback__, (inside,))
    return CallFailed(
        {
            "kind": "error",
            "exception": dumps_error(error) if isinstance(error, Exception) else None,
            "type_name": f"{type(error).__module__}.{type(error).__qualname__}",
            "summary": traceback.format_exception_only(error)[-1].strip(),
            "traceback": "".join(traceback.format_exception(error)),
            "rank": rank,
            "node": node,
            "followed": [],
        }
    )


def root_of(first: BaseException, calls: Iterable[asyncio.Future[Any]]) -> BaseException:
    """Of calls on all ranks, the error that the others followed from: the first one that was not raised by a collective."""
    errors = [first, *(call.exception() for call in calls if call.done() and not call.cancelled())]
    return next((error for error in errors if error is not None and not _may_have_followed(error)), first)


def _may_have_followed(error: BaseException) -> bool:
    cause = getattr(error, "cause", error)  # of what Ray makes of it
    return isinstance(cause, CallFailed) and bool(cause.data.get("in_collective"))


def user_part(trace: TracebackType | None, inside: Container[str]) -> TracebackType | None:
    """The traceback from where it leaves the files ``inside``; all of it if it never does."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in inside:
        inner = inner.tb_next
    return inner or trace
