"""Objects from values: classes and functions by full name, ``__type``, ``__value_type``, and types guessed from text.

`explain_missing` finds out without an import that a full name does not exist.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import importlib.util
import inspect
import math
import sys
import tokenize
import types
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from raysgd.config.argument_names import nearest
from raysgd.errors import ConfigError

TYPE_KEY = "__type"
VALUE_TYPE_KEY = "__value_type"
VALUE_KEY = "value"
#: What is said of a text that is none.
NO_FULL_NAME = "is not the full name of a class or function; give one such as torch.optim.Adam."


class ComponentError(ConfigError):
    """A component of the training does not exist, or does not work as it is configured; no traceback is needed."""


@contextlib.contextmanager
def naming(field: str) -> Iterator[None]:
    """Put the name of the field before the errors of components in the block."""
    try:
        yield
    except ComponentError as error:
        raise ComponentError(f"{field}: {error}") from error.__cause__


def is_full_name(name: Any) -> bool:
    """Return whether a text can be the full name of a class or function."""
    parts = name.split(".") if isinstance(name, str) else []
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


class Importer:
    """Imports what full names stand for.

    Args:
        allowed: Modules, with all below them, from which may be imported. None: any.
    """

    def __init__(self, allowed: Sequence[str] | None = None) -> None:
        self._allowed = None if allowed is None else tuple(allowed)

    def load(self, name: Any) -> Any:
        """Return the class, function or value with this full name, such as ``torch.optim.Adam``.

        Raises:
            ComponentError: It does not exist, cannot be imported, or is not allowed.
        """
        if not is_full_name(name):
            raise ComponentError(f"{name!r} {NO_FULL_NAME}")
        parts = name.split(".")
        self.check_allowed(name, name)
        for place in range(len(parts) - 1, 0, -1):
            module_name = ".".join(parts[:place])
            try:
                found = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                    raise ComponentError(f"{name}: the import of {module_name} failed: {error}.") from error
                continue
            for part in parts[place:]:
                if not hasattr(found, part):
                    close = nearest(part, [each for each in dir(found) if not each.startswith("_")])
                    raise ComponentError(f"{name}: {module_name} has no {part!r}{close}.")
                found = getattr(found, part)
                if isinstance(found, types.ModuleType):  # such as torch.os
                    self.check_allowed(found.__name__, name)
            return found
        raise ComponentError(
            f"{name}: there is no module {parts[0]!r}; modules are looked for in the working directory and in what is installed."
        )

    def check_allowed(self, module: str, name: str) -> None:
        """Check that a module, or a full name, may be imported for ``name``.

        Raises:
            ComponentError: It is not below what is allowed.
        """
        allowed = self._allowed
        if allowed is not None and not any(module == each or module.startswith(f"{each}.") for each in allowed):
            raise ComponentError(f"{name} may not be imported: --allow-import allows {', '.join(allowed)}.")

    def build(self, name: str, given: Mapping[str, Any], *args: Any, **objects: Any) -> Any:
        """Call the class or function with this full name.

        Args:
            name: Its full name.
            given: Arguments as they are written, which are resolved.
            *args: Further arguments, which come first.
            **objects: Further arguments by name.

        Raises:
            ComponentError: It does not exist, or does not take these arguments.
        """
        made = self.load(name)
        texts = _text_arguments(made)
        resolved = {
            key: value if key in texts and isinstance(value, str) else self.resolve(value)
            for key, value in given.items()
        } | objects
        if not callable(made):
            raise ComponentError(f"{name} is not callable; give the full name of a class or function.")
        try:
            return made(*args, **resolved)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # from inside
            raise ComponentError(
                f"{name} cannot be called with {', '.join(resolved) or 'no arguments'}: {error}."
            ) from None

    def resolve(self, value: Any) -> Any:
        """Return what a value of a component's arguments stands for.

        A text becomes the Python literal that it is, such as a number, if it is one. A mapping with ``__type`` becomes an object
        of that class, one with ``__value_type`` its ``value`` converted by that type; ``__value_type: function`` is the function
        of that name.
        """
        if isinstance(value, str):
            return guess(value)
        if isinstance(value, Mapping):
            if TYPE_KEY in value:
                return self.build(value[TYPE_KEY], {key: each for key, each in value.items() if key != TYPE_KEY})
            if VALUE_TYPE_KEY in value:
                return self._convert(value)
            return {key: self.resolve(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.resolve(each) for each in value]
        return value

    def _convert(self, value: Mapping[str, Any]) -> Any:
        kind = value[VALUE_TYPE_KEY]
        if set(value) != {VALUE_TYPE_KEY, VALUE_KEY}:
            raise ComponentError(
                f"{VALUE_TYPE_KEY}: {kind} needs exactly one other key, {VALUE_KEY!r}; it has {sorted(value)}."
            )
        if not isinstance(kind, str):
            raise ComponentError(f"{VALUE_TYPE_KEY}: {kind!r} is not a text; give a type such as str.")
        if kind == "function":
            return self.load(value[VALUE_KEY])
        convert = self.load(kind) if "." in kind else getattr(builtins, kind, None)
        if not isinstance(convert, type) and ("." not in kind or not callable(convert)):
            raise ComponentError(f"{VALUE_TYPE_KEY}: {kind} is not a type; give one such as str, or a full name.")
        try:
            return convert(value[VALUE_KEY])
        except (TypeError, ValueError) as error:
            raise ComponentError(f"{value[VALUE_KEY]!r} cannot be made {kind}: {error}.") from None


def _text_arguments(made: Any) -> set[str]:
    """Return the arguments of a class or function that are annotated as texts."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {each.name for each in parameters if each.annotation in (str, "str")}


#: Texts that are values in YAML, and not in Python.
_OF_YAML = {
    "true": True, "false": False, "null": None,
    ".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan,
}  # fmt: skip


def guess(text: str) -> Any:
    """Return the Python literal that a text is, or the text."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return _OF_YAML.get(text.lower(), text)
    return text if value is ... else value


# -- names that do not exist -----------------------------------------------------------------------------------------------

#: Names by which a module can get attributes that its source does not show.
_DYNAMIC = {
    "*", "__getattr__", "__path__", "__dict__", "globals", "locals", "vars", "exec", "eval", "setattr",
    "import_module", "__import__", "sys.modules",
}  # fmt: skip


def explain_missing(name: str) -> str | None:
    """Return why a full name certainly does not exist, as the source of its module says; None if it may exist.

    The source is read, not executed, and no package is imported. Modules that are not written in Python, and those whose
    attributes their source does not show, such as one with ``from other import *``, may have any name.
    """
    if not is_full_name(name):
        return None
    first, *parts = name.split(".")
    if first == "__main__":  # that of a worker is another one
        return None
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):  # a module without a specification, such as one that a notebook has made
        return None
    for part in parts:
        if spec is None:
            return None
        inner = _find_submodule(spec, part)
        if inner is None:
            return _explain_missing_attribute(name, spec, part)
        spec = inner
    return None


def _find_submodule(package: ModuleSpec, name: str) -> ModuleSpec | None:
    places, full_name = package.submodule_search_locations, f"{package.name}.{name}"
    try:
        return None if places is None else PathFinder.find_spec(full_name, list(places))
    except KeyError:  # a folder without __init__.py, which needs the imported package
        return ModuleSpec(full_name, None)


def _explain_missing_attribute(name: str, module: ModuleSpec, part: str) -> str | None:
    if part.startswith("__") or hasattr(sys.modules.get(module.name), part):
        return None
    names = _names_in(module.origin)
    if names is None or part in names:
        return None
    close = nearest(part, [each for each in names if not each.startswith("_")])
    return f"{name}: {module.name} has no {part!r}{close}."


def _names_in(path: str | None) -> set[str] | None:
    """Return all names that a source file binds or uses anywhere; None if its module may have others."""
    if path is None or not path.endswith(".py"):
        return None
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # an import says more about these
        return None
    names = {name for node in ast.walk(tree) for name in _names_of(node)}
    return None if names & _DYNAMIC else names


def _names_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0]
        if node.name == "modules" or (node.name == "sys" and node.asname):  # from sys import modules
            yield "sys.modules"
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        if node.attr in _DYNAMIC:
            yield node.attr
        elif node.attr == "modules" and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.modules"
    elif isinstance(node, ast.Global):
        yield from node.names
    else:  # a function, class, exception or pattern
        for field in ("name", "rest"):
            if isinstance(name := getattr(node, field, None), str):
                yield name
