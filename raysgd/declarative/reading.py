"""`TrainerArgs` from a YAML file, a dict and the words of a command line. Driver side, without torch.

Every value of the tree has a place, a line of the file or a word of the command line, and errors name it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from raysgd._util.logs import get_logger
from raysgd.config.argument_names import nearest
from raysgd.declarative.args import NOT_NEEDED, TrainerArgs
from raysgd.declarative.fields import FieldError
from raysgd.declarative.schema import list_defaults
from raysgd.declarative.values import BOOL_WORDS, TYPE_KEY, entry_of, guess, is_full_name, read_plain, read_settings
from raysgd.errors import ConfigError, UnknownArgumentError

_Path = tuple[str, ...]
_NOTHING: Any = object()
#: ``$(a.b)`` is a field, ``${NAME}`` a field or a variable of the environment; ``$$(`` and ``$${`` are the texts themselves.
_REFERENCE = re.compile(r"\$\$(?=[({])|\$\(([\w.-]+)\)|\$\{\s*([^{}]*?[^{}\s])\s*\}")
#: Sections below which the keys of mappings are any.
_OPEN_SECTIONS = ("trainer", "search", "compute_config")
COMMAND_LINE = "the command line"
#: A few lines of aliases can stand for billions of values.
_MAX_VALUES = 100_000
#: The functions of ``ray.tune`` that make the space of a search.
SPACES = (
    "choice", "uniform", "quniform", "loguniform", "qloguniform", "randn", "randint", "lograndint", "grid_search",
)  # fmt: skip
_SPACE = ("search", "space")


@dataclass
class Tree:
    """The values of a training as they are written, and where each is written.

    Attributes:
        values: Nested dicts and lists.
        places: Where a value is written, by its path; the place of a value that has none is that of what it is in.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[_Path, str] = field(default_factory=dict)

    @classmethod
    def of_file(cls, path: str) -> Tree:
        """Read a YAML file.

        Raises:
            ConfigError: It cannot be read, is not a mapping, or has a key twice.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
        tree = cls()
        loader = _Loader(text, path, tree.places)
        if loader.root is None:
            return tree
        if not isinstance(loader.root, yaml.MappingNode):
            raise ConfigError(f"{path}: the file is not a mapping of names to values, such as max_epochs: 4.")
        tree.values = loader.read(loader.root, ())
        return tree

    def place_of(self, path: Sequence[str]) -> str:
        """Return where a value is written, with its name."""
        known = next((tuple(path[:end]) for end in range(len(path), -1, -1) if tuple(path[:end]) in self.places), None)
        where = "" if known is None else self.places[known]
        name = ".".join(path)
        return f"{where}, {name}" if where and name else where or name

    def override(self, words: Sequence[str]) -> None:
        """Change values as the words of a command line say.

        ``--a.b value`` and ``--a.b=value`` set a value, ``--a.b!`` removes it, ``--a.b+=value`` and ``--a.b-=value`` append an
        entry to a list and remove it. A flag without a value is true; ``-`` in names of fields counts as ``_``. A value that
        begins with a bracket is YAML.

        Raises:
            ConfigError: A word is not a flag or its value, or what is to be removed does not exist.
        """
        before = copy.deepcopy(self.values)
        changed = [self._change(name, value, word) for word, name, value in _flags(words)]
        with self.naming_places():
            check_classes(before, self.values, changed)

    def _change(self, name: str, value: Any, word: str) -> _Path:
        """Make a change, which the user has written as a word; return the path to the value."""
        place = f"{COMMAND_LINE} ({word})"
        change = name[-1:] if name.endswith(("!", "+", "-")) else ""
        parts = tuple(name.removesuffix(change).split("."))
        if parts[:2] == _SPACE and len(parts) > 2:
            parts, value = self._in_space(parts, value)
        inside, key, path = self._find(parts, place, makes=change in ("", "+"))
        found = _entry(inside, key)
        if isinstance(value, str):
            value = _read_word(value, path, place)
        if change in ("!", "-") and found is _NOTHING:
            known = [str(each) for each in inside]
            raise ConfigError(
                f"{word}: {'.'.join(path)} is not set, so it cannot be removed{nearest(path[-1], known)}."
            )
        if change == "!":
            del inside[key]
        elif change:
            entries = [] if found in (_NOTHING, None) else found
            if not isinstance(entries, list):
                raise ConfigError(f"{word}: {'.'.join(path)} is {found!r}, not a list.")
            kept = [each for each in entries if change == "+" or read_settings(each) != read_settings(value)]
            if change == "-" and kept == entries:
                raise ConfigError(f"{word}: {'.'.join(path)} has no entry {value!r}; it is {found!r}.")
            inside[key] = [*kept, value] if change == "+" else kept
        else:
            inside[key] = _changed(found, value) if len(path) == 1 else value
        self._forget_places(path)
        if change != "!":
            self.places[path] = place
        return path

    def _in_space(self, parts: _Path, value: Any) -> tuple[_Path, Any]:
        """Return name and value of an entry of a search's space, whose keys are names with dots.

        The name of a function of ``ray.tune`` may follow the field's: ``--search.space.optimizer.args.lr.uniform [0, 1]``.
        """
        search = self.values.get("search")
        space = search.get("space") if isinstance(search, dict) else None
        *field, kind = parts[2:]
        name = ".".join(parts[2:])
        if not field or kind not in SPACES or (isinstance(space, dict) and name in space):
            return (*_SPACE, name.replace("-", "_")), value
        if isinstance(value, str):
            value = _read_word(value, parts, COMMAND_LINE)
        return (*_SPACE, ".".join(field).replace("-", "_")), {kind: value}

    def _find(self, parts: _Path, place: str, *, makes: bool) -> tuple[Any, Any, _Path]:
        """Return the dict or list that has the value of this name, its key there, and the path to it.

        Args:
            parts: The name, divided at its dots; keys may have dots themselves.
            place: Where it was written.
            makes: Whether dicts and lists on the way that do not exist are made.

        Raises:
            ConfigError: A value on the way is not a dict or list, or a list is shorter.
        """
        inside: Any = self.values
        path: _Path = ()
        while True:
            key, num_parts = _key_of(inside, parts, path)
            path, parts = (*path, str(key)), parts[num_parts:]
            found = _entry(inside, key)
            if isinstance(inside, list) and found is _NOTHING:
                if key != len(inside) or not makes:
                    last = f"the last one is {len(inside) - 1}" if inside else "it is empty"
                    free = f": give {len(inside)}, which appends one" if makes else ""
                    raise ConfigError(f"{place}: {'.'.join(path[:-1])} has no entry {str(key)!r}; {last}{free}.")
                inside.append(None)
            if not parts:
                return inside, key, path
            if found in (_NOTHING, None):
                found = [] if parts[0].isdecimal() else {}
                self.places[path] = place
            elif isinstance(found, str) and (path[:-1] == ("log",) or (len(path) == 1 and is_full_name(found))):
                found = {"type": found}  # the short form of a component
            elif not isinstance(found, (dict, list)):
                raise UnknownArgumentError(f"{place}: {'.'.join(path)} is {found!r}, which has no field {parts[0]!r}.")
            if makes:
                inside[key] = found
            inside = found

    def _forget_places(self, path: _Path) -> None:
        for place in [place for place in self.places if place[: len(path)] == path]:
            del self.places[place]

    def resolved(self) -> dict[str, Any]:
        """Return the values with references and ``~`` replaced by what they stand for.

        Raises:
            ConfigError: A name does not exist, or references form a cycle.
        """
        found: dict[str, Any] = self._resolve(self.values, (), ())
        return found

    def _resolve(self, value: Any, path: _Path, using: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._resolve(each, (*path, str(key)), using) for key, each in value.items()}
        if isinstance(value, list):
            return [self._resolve(each, (*path, str(place)), using) for place, each in enumerate(value)]
        if not isinstance(value, str):
            return value
        if (whole := _REFERENCE.fullmatch(value)) is not None:
            value = self._look_up(whole, path, using)
        else:
            value = _REFERENCE.sub(lambda found: self._part_of_text(found, path, using), value)
        is_of_home = isinstance(value, str) and (value == "~" or value.startswith("~/"))
        return os.path.expanduser(value) if is_of_home else value

    def _part_of_text(self, reference: re.Match[str], path: _Path, using: tuple[str, ...]) -> str:
        value = self._look_up(reference, path, using)
        if value is None or isinstance(value, (dict, list)):
            what = "null" if value is None else f"a {'mapping' if isinstance(value, dict) else 'list'}"
            raise ConfigError(f"{self.place_of(path)}: {reference[0]} is {what}, which cannot be a part of a text.")
        return str(value)

    def _look_up(self, reference: re.Match[str], path: _Path, using: tuple[str, ...]) -> Any:
        field, variable = reference.groups()
        name = field or variable
        if name is None:
            return "$"
        if name in using:
            cycle = " -> ".join((*using[using.index(name) :], name))
            raise ConfigError(f"{self.place_of(path)}: the references form a cycle: {cycle}.")
        space = _entry(self.values.get("search"), "space") if path[0] != "search" else None
        searched = space if isinstance(space, Mapping) else ()
        if any(f"{one}.".startswith(f"{name}.") or f"{name}.".startswith(f"{one}.") for one in searched):
            raise ConfigError(
                f"{self.place_of(path)}: {reference[0]} refers to {name}, which search.space changes: the trials would get the "
                f"value of the file. Give {'.'.join(path)} in search.space, too."
            )
        inside: Any = self.values
        parts, at = tuple(name.split(".")), _Path()
        while parts:
            key, num_parts = _key_of(inside, parts, at)
            if (found := _entry(inside, key)) is _NOTHING:
                if (default := _default_of(name.split("."))) is not None:
                    return default
                if variable is not None and variable in os.environ:
                    return os.environ[variable]
                what = "not set" if variable is None else "neither a field nor a variable of the environment"
                if not at and name in list_defaults():
                    raise ConfigError(
                        f"{self.place_of(path)}: {reference[0]} refers to {name}, which has no value; give one."
                    )
                known = [str(each) for each in inside] if isinstance(inside, dict) else []
                close = nearest(
                    parts[0], known if at else [*known, *list_defaults(), *(os.environ if variable else ())]
                )
                if name in os.environ:
                    close = f"; write ${{{name}}} for the variable of the environment"
                raise ConfigError(
                    f"{self.place_of(path)}: {reference[0]} refers to {name}, which is {what}{close}; ${reference[0]} is the "
                    "text itself."
                )
            inside, at, parts = found, (*at, str(key)), parts[num_parts:]
        return self._resolve(copy.deepcopy(inside), at, (*using, name))

    def make_args(self) -> TrainerArgs:
        """Make `TrainerArgs` of the values.

        Raises:
            ConfigError: A name is not known or a value is not allowed; the message names the place.
        """
        values = self.resolved()
        if unused := pop_not_needed(values):
            named = ", ".join(f"{name} ({why})" for name, why in unused.items())
            get_logger().warning("these fields are not needed, and are not used: %s.", named)
        with self.naming_places():
            return TrainerArgs(**values)

    @contextlib.contextmanager
    def naming_places(self) -> Iterator[None]:
        """Have a `FieldError` of the block name the place of the field; the outermost block decides."""
        try:
            yield
        except FieldError as error:
            raise type(error)(error.path, error.text, self.place_of(error.path)) from None


def pop_not_needed(values: dict[str, Any]) -> dict[str, str]:
    """Remove the fields that a training does without; return their names, and why."""
    unused = {}
    for name, why in NOT_NEEDED.items():
        *above, key = name.split(".")
        section = values.get(above[0]) if above else values
        if isinstance(section, dict) and section.pop(key, _NOTHING) is not _NOTHING:
            unused[name] = why
    return unused


def args_of(values: Mapping[str, Any]) -> TrainerArgs:
    """Make `TrainerArgs` of nested dicts.

    Raises:
        ConfigError: A name is not known, or a value is not allowed.
    """
    return Tree(copy.deepcopy(dict(values))).make_args()


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with others in their place; names may have dots: ``{"optimizer.args.lr": 0.1}``.

    The values of a section change the fields that they have; if its ``type`` is among them, arguments of the class before go.
    """
    tree = Tree(copy.deepcopy(dict(values)))
    for name in sorted(changes, key=lambda name: name.count(".")):  # sections before what is in them
        inside, key, path = tree._find(tuple(name.split(".")), name, makes=True)
        is_section = len(path) == 1 and isinstance(inside, dict)
        inside[key] = _changed(inside.get(key), changes[name]) if is_section else changes[name]
    return tree.values


def _changed(section: Any, changes: Any) -> Any:
    """Return a section with the fields that a mapping has; with another ``type`` arguments of the class before go."""
    if isinstance(changes, str) and is_full_name(changes) and isinstance(section, Mapping):
        changes = {"type": changes}
    if not isinstance(section, Mapping) or not isinstance(changes, Mapping):
        return changes
    kept = {key: value for key, value in section.items() if "type" not in changes or not key.endswith("args")}
    return {**kept, **changes}


def check_classes(before: Any, after: Any, changed: Sequence[_Path], path: _Path = ()) -> None:
    """Check that a class that is in the place of another one does not get arguments of that.

    Args:
        before: Values.
        after: The same after changes.
        changed: The paths of the changes.
        path: Where the values are.

    Raises:
        FieldError: It does; the message names them.
    """
    if isinstance(before, list) and isinstance(after, list):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if not isinstance(before, dict) or not isinstance(after, dict):
        return
    for key, value in after.items():
        check_classes(before.get(key), value, changed, (*path, str(key)))
    is_argument = any(part.endswith("args") for part in path)
    kind = TYPE_KEY if is_argument else "type"
    old, new = before.get(kind), after.get(kind)
    if old == new or not is_full_name(old) or not is_full_name(new):
        return
    for owner in [path] if is_argument else [(*path, key) for key in after if key.endswith("args")]:
        args = after if is_argument else after[owner[-1]]
        here = [(*owner, str(key)) for key in args or () if key != kind]
        if left := [each[-1] for each in here if not any(each[: len(one)] == one for one in changed)]:
            raise FieldError(
                (*path, kind),
                f"{new} is another class than {old}, whose arguments it would get: {', '.join(left)}. Give {'.'.join(owner)} "
                "with all arguments that it shall have, or '{}' for none.",
            )


def _default_of(parts: Sequence[str]) -> Any:
    found: Any = list_defaults()
    for part in parts:
        found = entry_of(found, part)
    return found


def _entry(inside: Any, key: Any) -> Any:
    """Return the value of a key or the entry of a number; `_NOTHING` if there is none."""
    try:
        return inside[key]
    except (KeyError, IndexError, TypeError):
        return _NOTHING


def _key_of(inside: Any, parts: _Path, path: _Path) -> tuple[Any, int]:
    """Return the key of a dict, or the number of an entry, that the first parts of a name are, and how many parts."""
    if isinstance(inside, list):
        return (int(parts[0]) if parts[0].isdecimal() else parts[0]), 1
    keys = list(inside) if isinstance(inside, dict) else []
    names = [".".join(parts[: end + 1]) for end in range(len(parts))]
    found = [(key, place + 1) for place, name in enumerate(names) for key in keys if str(key) == name]
    if len(found) > 1:
        either = " or ".join(repr(key) for key, _ in found)
        raise ConfigError(f"{'.'.join((*path, *parts))} may be in {either}; give the mapping as a whole.")
    found = found or [(names[0].replace("-", "_"), 1)]
    if found[0][0] in keys or not _has_any_keys(path):
        return found[0]
    are_numbers = bool(keys) and all(type(key) is int for key in keys) and parts[0].isdecimal()
    return (int(parts[0]) if are_numbers else parts[0]), 1


def _has_any_keys(path: _Path) -> bool:
    """Return whether the keys of the mapping at this path are any, not names of fields or arguments."""
    return len(path) > 1 and (path[0] in _OPEN_SECTIONS or any(part.endswith("args") for part in path[:-1]))


# -- words of a command line -----------------------------------------------------------------------------------------------


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield what each flag is, as it was written, its name and its value."""
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("--") or word == "--":
            raise ConfigError(
                f"{word!r} is neither a flag nor the value of one; write --name value, such as --max_epochs 2."
            )
        name, is_pair, value = word[2:].partition("=")
        if is_pair:
            yield word, name, value
        elif name.endswith("!"):
            yield word, name, None
        elif place < len(words) and not words[place].startswith("--"):
            yield f"{word} {words[place]}", name, words[place]
            place += 1
        else:
            yield f"{word} without a value", name, True


def _read_word(text: str, path: _Path, place: str) -> Any:
    """Return the list or mapping that a text of the command line is, or the text."""
    _check_bool_word(text, path, place)
    if text[:1] not in tuple("[{"):
        return text
    if isinstance(value := guess(text), (list, dict)):
        return value
    try:
        loader = _Loader(text, place, {})
    except ConfigError as error:
        if _REFERENCE.search(text) and text.endswith(("]", "}")):
            raise ConfigError(f"{error}") from None
        return text  # such as "[CLS] first"
    return loader.read(loader.root, path)


def _check_bool_word(text: str, path: _Path, place: str) -> None:
    """Refuse a word that may be a bool or a text, where no field says which.

    Raises:
        ConfigError: It is one.
    """
    is_typed = len(path) < 2 or not (_has_any_keys(path) or path[0] == "engine" or path[-2].endswith("args"))
    if text.lower() in BOOL_WORDS and not is_typed:
        raise ConfigError(
            f"{place}, {'.'.join(path)}: {text} is a bool in YAML 1.1 and a text in YAML 1.2; write "
            f"{str(BOOL_WORDS[text.lower()]).lower()}, or with quotes \"'{text}'\" for the text."
        )


# -- YAML ----------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Makes values of YAML, and writes down where each stands.

    A text without quotes is the number, bool or null that it is for Python or YAML 1.2. Dates, times, octal numbers and words
    such as ``on``, which are values in YAML 1.1, are texts.

    Raises:
        ConfigError: It is not YAML.
    """

    def __init__(self, text: str, name: str, places: dict[_Path, str]) -> None:
        self._file, self._places = name, places
        self._open: list[yaml.Node] = []
        try:
            super().__init__(text)
            self.root = self.get_single_node()
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = "" if mark is None else f", line {mark.line + 1}"
            advice = "; in brackets, quote references: {a: '${NAME}'}" if "${" in text else ""
            raise ConfigError(f"{name}{line}: {_explain(error)}{advice}.") from None
        except RecursionError:
            raise ConfigError(
                f"{name}: values are nested too deeply to be read; write them with fewer levels."
            ) from None

    def resolve(self, kind: type, value: Any, implicit: Any) -> Any:
        """Return the tag of a value that has none in the text."""
        if kind is yaml.ScalarNode and implicit[0]:
            return "tag:yaml.org,2002:merge" if value == "<<" else _PLAIN
        return super().resolve(kind, value, implicit)

    def read(self, node: yaml.Node, path: _Path) -> Any:
        """Return the value of a node, which is at this path."""
        line = f"{self._file}, line {node.start_mark.line + 1}"
        self._places.setdefault(path, line)
        if len(self._places) > _MAX_VALUES:
            raise ConfigError(
                f"{line}: the file has more than {_MAX_VALUES:,} values, as aliases repeat theirs; write fewer."
            )
        if any(node is each for each in self._open):
            raise ConfigError(f"{line}: the value contains itself.")
        self._open.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.read(each, (*path, str(place))) for place, each in enumerate(node.value)]
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            value = self._scalar(node)
            if node.tag == _PLAIN:
                _check_bool_word(str(value), path, line)
            return value
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: _Path) -> dict[Any, Any]:
        self.flatten_mapping(node)
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key: Any = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            where = f"{self._file}, line {key_node.start_mark.line + 1}"
            if not isinstance(key, str) and not (_has_any_keys(path) and isinstance(key, (int, float, bool))):
                raise ConfigError(f"{where}: {key!r} is not a name; keys are texts.")
            key = key if path else str(key).replace("-", "_")
            if key in found:
                raise ConfigError(f"{where}: {'.'.join((*path, key))} is given twice.")
            self._places[(*path, str(key))] = where
            found[key] = self.read(value_node, (*path, str(key)))
        return found

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            line = f"{self._file}, line {node.start_mark.line + 1}"
            raise ConfigError(f"{line}: {_explain(error)}; only plain values can be read.") from None


#: The tag of a text without quotes.
_PLAIN = "!plain"
_Loader.add_constructor(_PLAIN, lambda loader, node: read_plain(node.value))


def _explain(error: Exception) -> str:
    problem = str(getattr(error, "problem", None) or error)
    context = f"{getattr(error, 'context', '')}, " if problem.startswith("but ") else ""
    return " ".join((context + problem).split())
