"""Objects from values: classes and functions by full name, ``__type``, ``__value_type``, and types guessed from text."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import inspect
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

from raysgd.config.argument_names import nearest
from raysgd.errors import ConfigError

TYPE_KEY = "__type"
VALUE_TYPE_KEY = "__value_type"
VALUE_KEY = "value"
#: ``$!(name)`` and ``$!{name}`` are objects.
_REFERENCE_TO_OBJECT = re.compile(r"\$!(?:\(([\w.]+)\)|\{([\w.]+)\})")
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


def entry_of(inside: Any, name: str) -> Any:
    """Return the value of a key, or the entry of a list by its number; None if there is none."""
    if isinstance(inside, list):
        return inside[int(name)] if name.isdecimal() and int(name) < len(inside) else None
    return inside.get(name) if isinstance(inside, Mapping) else None


class Importer:
    """Imports what full names stand for.

    Args:
        allowed: Modules, with all below them, from which may be imported. None: any.
        args: The `TrainerArgs` that ``$!(self)`` stands for; ``$!(vars.x)`` is what its ``vars`` are made of, once.
    """

    def __init__(self, allowed: Sequence[str] | None = None, args: Any = None) -> None:
        self._allowed = None if allowed is None else tuple(allowed)
        self._args = args
        self._vars: Any = None

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
        kinds = _annotations(made)
        resolved = {key: self.resolve(value, kinds.get(key, Any)) for key, value in given.items()} | objects
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

    def resolve(self, value: Any, kind: Any = Any) -> Any:
        """Return what a value of a component's arguments, which is annotated as ``kind``, stands for.

        A text becomes the Python literal that it is, such as a number, if the annotation is not one of texts. A mapping with
        ``__type`` becomes an object of that class, one with ``__value_type`` its ``value`` converted by that type;
        ``__value_type: function`` is the function of that name. ``$!(vars.x)`` is the object that is made of ``vars.x``.
        """
        if isinstance(value, str):
            reference = _REFERENCE_TO_OBJECT.fullmatch(value)
            return (
                _read_text(value, kind) if reference is None else self._find_object(value, reference[1] or reference[2])
            )
        if isinstance(value, Mapping):
            if TYPE_KEY in value:
                return self.build(value[TYPE_KEY], {key: each for key, each in value.items() if key != TYPE_KEY})
            if VALUE_TYPE_KEY in value:
                return self._convert(value)
            inner = _entry_kind(kind, Mapping)
            return {key: self.resolve(each, inner) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.resolve(each, _entry_kind(kind, Iterable)) for each in value]
        return value

    def _find_object(self, reference: str, name: str) -> Any:
        if name == "self":
            return self._args
        if self._vars is None:
            self._vars = {}  # of themselves there are none
            self._vars = {"vars": self.resolve({} if self._args is None else self._args.vars)}
        found = self._vars
        for part in name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise ComponentError(
                    f"{reference} refers to {name}, which is not set; give $!(self) or a name in vars."
                )
            found = found[part]
        return found

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


def _annotations(made: Any) -> dict[str, Any]:
    """Return what the arguments of a class or function are annotated as, where it says so."""
    for is_evaluated in (True, False):  # a name may exist for type checkers alone
        with contextlib.suppress(Exception):
            parameters = inspect.signature(made, eval_str=is_evaluated).parameters.values()
            kinds = {each.name: each.annotation for each in parameters if each.annotation is not each.empty}
            return {name: str if kind == "str" else kind for name, kind in kinds.items()}
    return {}


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _read_text(text: str, kind: Any) -> Any:
    """Return the literal that a text is; the text, if an annotation has texts and not such literals."""
    value, members = guess(text), _members(kind)
    kinds = {get_origin(each) or each for each in members} | ({int} if float in members else set())
    return text if str in members and type(value) not in kinds else value


def _entry_kind(kind: Any, owner: Any) -> Any:
    """Return what the entries of a mapping or an iterable are annotated as."""
    for each in _members(kind):
        origin, args = get_origin(each), get_args(each)
        if isinstance(origin, type) and issubclass(origin, owner) and args:
            return args[-1] if owner is Mapping else args[0]
    return Any


#: Texts that are bools in YAML 1.1 and texts in YAML 1.2.
BOOL_WORDS = {"yes": True, "on": True, "no": False, "off": False}
#: Texts that are values in YAML, and not in Python.
_OF_YAML = {
    "true": True, "false": False, "null": None,
    ".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan,
}  # fmt: skip
#: The kinds of Python's literals that YAML has, too.
_LITERALS = (bool, int, float, str, list, tuple, dict, type(None))


def guess(text: str) -> Any:
    """Return the Python literal that a text is, if YAML has such values, or the text: ``{0}`` is a place in a format."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return _OF_YAML.get(text.lower(), text)
    is_too_large = isinstance(value, float) and math.isinf(value)  # such as an id, 12e4567
    return text if is_too_large or not isinstance(value, _LITERALS) else value


def read_plain(text: str) -> Any:
    """Return what a text without quotes is in a file: a number, a bool, None, or the text."""
    value = None if text in ("", "~") else guess(text)
    return value if value is None or isinstance(value, (bool, int, float)) else text


def read_none(value: Any) -> Any:
    """Return None for the text ``none`` or ``null``, and any other value as it is."""
    return None if isinstance(value, str) and value.lower() in ("none", "null") else value


def read_value(value: Any) -> Any:
    """Return the value that a text means for a field that is not a text."""
    value = read_none(value)
    return BOOL_WORDS.get(value.lower(), guess(value)) if isinstance(value, str) else value


def read_settings(value: Any) -> Any:
    """Return settings in which a text that is a Python literal is that literal."""
    if isinstance(value, Mapping):
        return {key: read_settings(each) for key, each in value.items()}
    if isinstance(value, list):
        return [read_settings(each) for each in value]
    return guess(value) if isinstance(value, str) else value
