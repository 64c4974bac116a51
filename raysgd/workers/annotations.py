"""Gives workers the names that annotations of the driver's script use, so that they resolve there as in the script.

With ``from __future__ import annotations``, or in quotes, an annotation is a string, which `typing.get_type_hints`, pydantic and
`transformers.HfArgumentParser` evaluate among the names of the class's module. In a worker ``__main__`` is Ray's program.
Runs in the process that pickles and in the one that unpickles.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import importlib
import operator
import sys
import typing
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle.cloudpickle as cp

#: What names in annotations stand for, apart from types, modules and functions.
_PLAIN = (str, bytes, int, float, tuple, type(None))
_TYPING = ("typing", "typing_extensions", "types", "annotated_types")


class Imported:
    """A module, or an object of one, that the worker imports if it can."""

    def __init__(self, module: str, qualname: str | None = None) -> None:
        self._module = module
        self._qualname = qualname

    def load(self, *, imports: bool) -> Any:
        """Return it.

        Raises:
            ImportError: It cannot be imported; or, without ``imports``, nothing has imported its module yet.
        """
        if not imports and self._module not in sys.modules:
            raise ImportError(self._module)
        module = importlib.import_module(self._module)
        return module if self._qualname is None else operator.attrgetter(self._qualname)(module)


def with_names(obj: Any, reduced: Any) -> Any:
    """Return what cloudpickle has made of a class or function that it pickles by value, with the names in its annotations."""
    is_dynamic = isinstance(reduced, tuple) and len(reduced) == 6
    if isinstance(obj, type) and is_dynamic and reduced[5] is cp._class_setstate:
        names = _names_of_class(obj)
        return (*reduced[:2], (reduced[2], obj.__module__, names), None, None, _set_class) if names else reduced
    if isinstance(obj, FunctionType) and is_dynamic and reduced[5] is cp._function_setstate:
        names = _names_of_function(obj)
        return (*reduced[:2], (reduced[2], obj.__module__, names), None, None, _set_function) if names else reduced
    return reduced


def _set_class(obj: type, state: tuple[Any, str, dict[str, Any]]) -> Any:
    inner, module, names = state
    _provide(module, names, imports=True)
    return cp._class_setstate(obj, inner)


def _set_function(obj: FunctionType, state: tuple[Any, str, dict[str, Any]]) -> None:
    inner, module, names = state
    cp._function_setstate(obj, inner)
    # A function with pandas in an annotation alone must not make its worker import pandas.
    for name, value in _provide(module, names, imports=False).items():
        obj.__globals__.setdefault(name, value)


def _provide(module: str, names: dict[str, Any], *, imports: bool) -> dict[str, Any]:
    """Define the names in the module, if this process has it; returns those that could be loaded."""
    loaded = {}
    for name, value in names.items():
        with contextlib.suppress(ImportError, AttributeError):  # the annotation alone cannot be resolved then
            loaded[name] = value.load(imports=imports) if isinstance(value, Imported) else value
    if (target := sys.modules.get(module)) is not None:
        ours = _provided.setdefault(module, set())
        for name, value in loaded.items():
            if name in ours or name not in vars(
                target
            ):  # the module's own names stay, also those of the driver's script
                vars(target)[name] = value
                ours.add(name)
    return loaded


#: The names that `_provide` has defined, by module: another version of the script may define them again.
_provided: dict[str, set[str]] = {}


def _names_of_class(kind: type) -> dict[str, Any]:
    namespace = vars(sys.modules.get(kind.__module__, ModuleType("")))
    texts = [text for value in vars(kind).get("__annotations__", {}).values() for text in _texts_of(value)]
    for member in vars(kind).values():
        texts += _texts_of_class_bodies(member.__code__) if isinstance(member, FunctionType) else []
    return _found(texts, namespace)


def _names_of_function(function: FunctionType) -> dict[str, Any]:
    texts = [text for value in function.__annotations__.values() for text in _texts_of(value)]
    return _found([*texts, *_texts_of_class_bodies(function.__code__)], function.__globals__)


def _texts_of(annotation: Any) -> list[str]:
    """Return the strings in an annotation that are to be evaluated, as in ``list["Mode"]``."""
    if isinstance(annotation, str):
        return [annotation]
    if isinstance(annotation, typing.ForwardRef):
        return [annotation.__forward_arg__]
    return [text for each in typing.get_args(annotation) if not isinstance(each, str) for text in _texts_of(each)]


def _texts_of_class_bodies(code: CodeType) -> Iterator[str]:
    """Yield the annotations, if they are strings, of classes that are defined in a function."""
    for inner in code.co_consts:
        if not isinstance(inner, CodeType):
            continue
        yield from _texts_of_class_bodies(inner)
        if "__annotations__" in inner.co_names:
            steps = [step for step in dis.get_instructions(inner) if step.opname not in ("CACHE", "EXTENDED_ARG")]
            for step, following in pairwise(steps):
                if (
                    isinstance(step.argval, str)
                    and step.opname == "LOAD_CONST"
                    and following.argval == "__annotations__"
                ):
                    yield step.argval


def _found(texts: Iterable[str], namespace: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        for name in _names_in(text):
            if name in namespace and _may_annotate(namespace[name]):
                found[name] = _by_reference(namespace[name])
    return found


def _names_in(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != text:  # a name in quotes
            yield from _names_in(node.value)


def _may_annotate(value: Any) -> bool:
    is_of_typing = type(value).__module__.partition(".")[0] in _TYPING
    return isinstance(value, (type, ModuleType, FunctionType, *_PLAIN)) or is_of_typing


def _by_reference(value: Any) -> Any:
    """Return an `Imported` for what the worker imports by its name; anything else as it is."""
    if isinstance(value, ModuleType):
        return Imported(value.__name__) if cp._should_pickle_by_reference(value) else value
    if isinstance(value, (type, FunctionType)) and cp._should_pickle_by_reference(value):
        return Imported(value.__module__, value.__qualname__)
    return value
