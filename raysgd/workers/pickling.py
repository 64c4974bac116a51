"""Pickles the user's functions, values and exceptions. Runs in the driver and in workers, never in the TrainerActor.

The value of train_func arrives as if the function had been called directly: while the value is pickled, the backend's
reducers unwrap models and move tensors to the CPU, wherever they are in the value.

The pickler is users' own cloudpickle (``cloudpickle.register_pickle_by_value``) with the reducers of Ray's private copy,
which pickle an `ObjectRef` together with its owner; without the owner, `ray.get` of the reference hangs.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import sys
import traceback
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, TracebackType
from typing import Any

import cloudpickle
import ray
import ray.cloudpickle

from raysgd._util import numeric_settings
from raysgd._util.tracebacks import hide_own_frames
from raysgd.errors import ConfigError, SerializationError
from raysgd.workers.annotations import with_names

Reducers = Mapping[type, Callable[[Any], tuple[Any, ...]]]


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, reducers: Reducers, *, gives_names: bool) -> None:
        super().__init__(file, protocol=5)
        self._gives_names = gives_names
        self._reducers = tuple(reducers.items())
        own = super().dispatch_table
        self._ray_reducers = {
            kind: reduce for kind, reduce in ray.cloudpickle.CloudPickler.dispatch.items() if kind not in own
        }

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if (
            kind.__name__ == "ndarray" and kind.__module__ == "numpy"
        ):  # there may be thousands, and no reducer is for them
            return obj.__reduce_ex__(5)
        for base, reduce in self._reducers:  # before Ray's, which users can extend to tensors
            if isinstance(obj, base):
                return reduce(obj)
        if (ray_reduce := self._ray_reducers.get(kind)) is not None:
            return ray_reduce(obj)
        reduced = super().reducer_override(obj)
        return with_names(obj, reduced) if self._gives_names else reduced


def dumps(obj: Any, reducers: Reducers | None = None) -> bytes:
    """Pickle ``obj``; raise whatever one of its parts raises."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, reducers or {}, gives_names=True).dump(obj)
    except Exception:  # perhaps what an annotation names does not pickle, which the object does not need
        buffer = io.BytesIO()
        _Pickler(buffer, reducers or {}, gives_names=False).dump(obj)
    return buffer.getvalue()


def dumps_named(
    obj: Any,
    name: str,
    reducers: Reducers | None = None,
    advice: str = "Create it inside train_func, or pass the values it is built from.",
) -> bytes:
    """Pickle ``obj``; the error names the part that cannot be pickled.

    ``name`` is what messages call the object: a name in code, such as ``config``, or a phrase. ``advice`` ends the message.

    Raises:
        SerializationError: A part cannot be pickled; ``path`` says which one.
    """
    try:
        return dumps(obj, reducers)
    except Exception as error:
        inside, part = _find_unpicklable(obj, "", reducers)
        path = f"{name} {inside}" if " " in name and inside.startswith(("[", ".")) else name + inside
        kind = f"a {type(part).__module__}.{type(part).__qualname__}"
        reason = f"{kind} does not pickle ({type(error).__name__}: {error}). {advice}"
        if isinstance(error, SerializationError):  # of a reducer, which says what to do
            reason = str(error)
        raise SerializationError(f"{path} cannot be sent to another process: {reason}", path=path) from error


def _find_unpicklable(obj: Any, path: str, reducers: Reducers | None, above: tuple[Any, ...] = ()) -> tuple[str, Any]:
    """Return the path to the innermost part of ``obj`` that cannot be pickled, and the part."""
    above = (*above, obj)
    is_reduced = reducers is not None and isinstance(obj, tuple(reducers))
    for name, part in [] if is_reduced or len(above) > 20 else _parts(obj):
        if any(part is outer for outer in above):  # a function that calls itself
            continue
        try:
            dumps(part, reducers)
        except Exception:
            return _find_unpicklable(part, path + name, reducers, above)
    return path, obj


@dataclass(frozen=True)
class Shared:
    """A reference to an argument in the object store."""

    ref: Any


@dataclass(frozen=True)
class Packed:
    """A pickled function of the user's and its name, for processes that only pass it on: unpickling may import a framework."""

    data: bytes = field(repr=False)
    name: str

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Packed:
        """Pickle a function.

        Raises:
            SerializationError: A part cannot be pickled; the message names it.
        """
        return cls(dumps_call(function, name), getattr(function, "__qualname__", type(function).__name__))

    def bind(self, keywords: Mapping[str, Any]) -> Callable[..., Any]:
        """Return a callable that unpickles as the function with these arguments; `Shared` ones are fetched there."""
        return _Bound(self, keywords)


class _Bound:
    def __init__(self, packed: Packed, keywords: Mapping[str, Any]) -> None:
        self._packed = packed
        self._keywords = dict(keywords)
        self.__qualname__ = self.__name__ = packed.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _open_bound(self._packed.data, self._keywords)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_bound, (self._packed.data, self._keywords)


def _open_bound(data: bytes, keywords: Mapping[str, Any]) -> Any:
    function = loads_call(data)
    values = {name: ray.get(value.ref) if isinstance(value, Shared) else value for name, value in keywords.items()}
    return functools.partial(function, **values) if values else function


def dumps_error(error: BaseException) -> bytes | None:
    """Pickle an exception so that it can be unpickled; return None if that is impossible.

    Pickle recreates an exception from its message alone, which fails if ``__init__`` has further parameters. Such an
    exception is recreated from its attributes, without a call of ``__init__``.
    """
    for carried in (error, _WithoutInit(error)):
        try:
            data = dumps(carried)
            loads(data)
        except Exception:  # the exception holds a lock or a socket, or its __init__ has further parameters
            continue
        return data
    return None


class _WithoutInit:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self._error), self._error.args, vars(self._error))


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


def loads(data: bytes | memoryview) -> Any:
    """Unpickle the result of `dumps`."""
    return cloudpickle.loads(data)


def dumps_call(obj: Any, name: str, variables: Collection[str] = ()) -> bytes:
    """Pickle what workers are to call, with this script's arguments and numeric settings; errors as for `dumps_named`.

    Args:
        obj: What is to be called.
        name: Its name in errors.
        variables: Environment variables that workers get; see `raysgd._util.numeric_settings.read_changed`.
    """
    return dumps((list(sys.argv), numeric_settings.read_changed(variables), dumps_named(obj, name)))


def loads_call(data: bytes | memoryview) -> Any:
    """Unpickle the result of `dumps_call`. ``sys.argv``, which train_func may parse, and settings become those of the driver."""
    argv, settings, pickled = loads(data)
    sys.argv[:] = argv  # first: a module that is imported for the pickle may read it, or compute something
    numeric_settings.write(settings)
    return loads(pickled)


def _parts(obj: Any) -> list[tuple[str, Any]]:
    if isinstance(obj, Mapping):
        return [(f"[{key!r}]", value) for key, value in obj.items()]
    if isinstance(obj, (list, tuple, set, frozenset)):
        return [(f"[{i}]", value) for i, value in enumerate(obj)]
    if isinstance(obj, functools.partial):
        return [(".func", obj.func), (".args", obj.args), (".keywords", obj.keywords)]
    if isinstance(obj, MethodType):
        return [(".__self__", obj.__self__), (".__func__", obj.__func__)]
    if isinstance(obj, FunctionType):
        return _variables(obj)
    kind: Any = type(obj)
    if hasattr(obj, "__dict__") and not isinstance(obj, type) and kind.__reduce__ is object.__reduce__:
        return [(f".{name}", value) for name, value in vars(obj).items()]
    return []


def _variables(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the variables that are pickled with a function, by their names in messages."""
    found: list[tuple[str, Any]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append((f" (its variable {name!r})", cell.cell_contents))
        except ValueError:  # the variable has no value yet
            continue
    for name in dict.fromkeys(_names(function.__code__)):
        if name in function.__globals__:
            found.append((f" (its global variable {name!r})", function.__globals__[name]))
    return [*found, *((" (a default value)", value) for value in function.__defaults__ or ())]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# -- values and errors of the user's functions ------------------------------------------------------------------------


def dumps_returned(value: Any, what: str, reducers: Reducers, rank: int | None = None) -> bytes:
    """Pickle the value that the function named ``what`` returned; messages name the rank if one is given.

    Raises:
        ConfigError: The value is a coroutine or a generator.
        SerializationError: A part cannot be pickled.
    """
    check_returned(value, what)
    suffix = "" if rank is None else f" on rank {rank}"
    advice = "Return the values it is built from."
    return dumps_named(value, f"{what}'s return value{suffix}", reducers, advice=advice)


def check_returned(value: Any, what: str) -> None:
    """Raise a ConfigError if a function returned a coroutine or a generator: its body has not run."""
    if inspect.iscoroutine(value):
        value.close()  # otherwise Python warns that it was never awaited
        raise ConfigError(f"{what} is async: it returned a coroutine; give a plain function (it may call asyncio.run).")
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise ConfigError(f"{what} returned a generator, whose body has not run; give a plain function.")


class CallFailed(Exception):
    """A function of `Trainer.execute`, or a constructor, raised an exception, which the driver raises again.

    Attributes:
        data: The argument of `raysgd.controller.journal.outcome.outcome_error`; the exception in it stays pickled.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.data = data

    def __str__(self) -> str:
        return f"rank {self.data['rank']}: {self.data['summary']}"


def failed_call(error: BaseException, rank: int, node: str, inside: str) -> CallFailed:
    """Return ``error`` with its rank, node and traceback, without the frames of the file ``inside``."""
    error.__traceback__ = user_part(error.__traceback__, (inside,))
    hide_own_frames(error)
    return CallFailed(
        {
            "kind": "error",
            "exception": dumps_error(error) if isinstance(error, Exception) else None,
            "type_name": f"{type(error).__module__}.{type(error).__qualname__}",
            "summary": last_line(error),
            "traceback": "".join(traceback.format_exception(error)),
            "rank": rank,
            "node": node,
            "followed": [],
        }
    )


def last_line(error: BaseException) -> str:
    """Return type and text of an exception, as the last line of its traceback, without notes."""
    shown: Any = traceback.TracebackException(type(error), error, None)
    shown.__notes__ = None
    return str(list(shown.format_exception_only())[-1]).strip()


def find_root_cause(first: BaseException, calls: Iterable[asyncio.Future[Any]]) -> BaseException:
    """Return the root cause among the errors of all ranks: the first one that does not come from a collective."""
    errors = [first, *(call.exception() for call in calls if call.done() and not call.cancelled())]
    return next((error for error in errors if error is not None and not _may_have_followed(error)), first)


def _may_have_followed(error: BaseException) -> bool:
    cause = getattr(error, "cause", error)  # Ray wraps the error
    return isinstance(cause, CallFailed) and bool(cause.data.get("in_collective"))


def user_part(trace: TracebackType | None, inside: Container[str]) -> TracebackType | None:
    """Return the traceback without its first frames, those in the files ``inside``; all of it if no other frame follows."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in inside:
        inner = inner.tb_next
    return inner or trace
