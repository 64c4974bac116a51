"""Pickles of the user's objects. Worker and driver side, never the controller.

What train_func returns arrives as if it had been called directly: the backend's reducers unwrap models and bring tensors
to the CPU while they are pickled, wherever in the value they sit.

cloudpickle is the one that users know (``cloudpickle.register_pickle_by_value``). Ray brings a copy of its own, which is
told how references to objects are pickled with their owner: what an `ObjectRef` of the user's is asked for hangs without.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

import cloudpickle
import ray
import ray.cloudpickle

from raysgd.errors import SerializationError

Reducers = Mapping[type, Callable[[Any], tuple[Any, ...]]]


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, reducers: Reducers) -> None:
        super().__init__(file, protocol=5)
        self._reducers = tuple(reducers.items())
        own = super().dispatch_table
        self._of_ray = {kind: how for kind, how in ray.cloudpickle.CloudPickler.dispatch.items() if kind not in own}

    def reducer_override(self, obj: Any) -> Any:
        for kind, reduce in self._reducers:  # before Ray's: it can be told to pickle tensors, too, where they are
            if isinstance(obj, kind):
                return reduce(obj)
        if (of_ray := self._of_ray.get(type(obj))) is not None:
            return of_ray(obj)
        return super().reducer_override(obj)


def dumps(obj: Any, reducers: Reducers | None = None) -> bytes:
    """Pickle ``obj``.

    Raises:
        Exception: Whatever pickling its parts raised.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, reducers or {}).dump(obj)
    return buffer.getvalue()


def dumps_named(
    obj: Any,
    name: str,
    reducers: Reducers | None = None,
    advice: str = "Make it inside train_func, or pass what it is made of.",
) -> bytes:
    """Pickle ``obj``, and name the part that does not pickle: ``name`` is one of code, such as ``config``, or some words.

    Raises:
        SerializationError: It does not pickle; ``path`` says which part.
    """
    try:
        return dumps(obj, reducers)
    except Exception as error:
        inside, part = find_unpicklable(obj, "", reducers)
        path = f"{name} {inside}" if " " in name and inside.startswith(("[", ".")) else name + inside
        raise SerializationError(
            f"{path} cannot be sent to another process: a {type(part).__module__}.{type(part).__qualname__} does not pickle "
            f"({type(error).__name__}: {error}). {advice}",
            path=path,
        ) from error


def find_unpicklable(
    obj: Any, path: str, reducers: Reducers | None = None, above: tuple[Any, ...] = ()
) -> tuple[str, Any]:
    """The innermost part of ``obj`` that does not pickle, and where it sits."""
    above = (*above, obj)
    for name, part in _parts(obj) if len(above) <= 20 else []:
        if any(part is outer for outer in above):  # a function that calls itself
            continue
        try:
            dumps(part, reducers)
        except Exception:
            return find_unpicklable(part, path + name, reducers, above)
    return path, obj


@dataclass(frozen=True)
class Shared:
    """An argument that is in the object store.

    Attributes:
        ref: Where.
    """

    ref: Any


@dataclass(frozen=True)
class Packed:
    """A function of the user's as a pickle, for processes that only hand it on: opening it may import a framework.

    Attributes:
        name: Of the function, as users are told of it.
    """

    data: bytes = field(repr=False)
    name: str

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Packed:
        """Pack one.

        Raises:
            SerializationError: It does not pickle; names the part.
        """
        return cls(dumps_named(function, name), getattr(function, "__qualname__", type(function).__name__))

    def bind(self, keywords: Mapping[str, Any]) -> Callable[..., Any]:
        """What stands for the function with these arguments here, and is that once it is pickled and opened.

        Args:
            keywords: By name; what is `Shared` is fetched where it is opened.
        """
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
    function = loads(data)
    values = {name: ray.get(value.ref) if isinstance(value, Shared) else value for name, value in keywords.items()}
    return functools.partial(function, **values) if values else function


def dumps_error(error: BaseException) -> bytes | None:
    """Pickle an exception so that it can be opened again; None where it cannot.

    Many exceptions are made of more than their message, and pickle would make them of the message alone, which fails
    when they are opened. Those travel as they are, without a second call of their ``__init__``.
    """
    for carried in (error, _AsItIs(error)):
        try:
            data = dumps(carried)
            loads(data)
        except Exception:  # a lock or a socket in it, or an __init__ that wants more
            continue
        return data
    return None


class _AsItIs:
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
    """Open a pickle made by `dumps`."""
    return cloudpickle.loads(data)


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
    if hasattr(obj, "__dict__") and not isinstance(obj, type):
        return [(f".{name}", value) for name, value in vars(obj).items()]
    return []


def _variables(function: FunctionType) -> list[tuple[str, Any]]:
    """What a function that travels by value takes with it."""
    found: list[tuple[str, Any]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append((f" (its variable {name!r})", cell.cell_contents))
        except ValueError:  # it has no value yet
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
