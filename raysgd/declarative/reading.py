"""`TrainerArgs` from a YAML file, a dict and the words of a command line. Driver side, without torch.

Every value of the tree has a place, a line of the file or a word of the command line, and errors name it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import types
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from raysgd.config.argument_names import nearest
from raysgd.declarative.args import FieldError, HookConfig, HookMapConfig, TrainerArgs
from raysgd.declarative.values import guess
from raysgd.errors import ConfigError, UnknownArgumentError

_Path = tuple[str, ...]
_REFERENCE = re.compile(r"\$\(([\w.-]+)\)")
#: Fields that are settings of raysgd, not arguments of components, whose texts are guessed when these are made.
_SETTINGS = (("trainer",), ("engine",), ("search",), ("compute_config", "pas_config"))
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
        return cls.of_text(text, path)

    @classmethod
    def of_text(cls, text: str, name: str) -> Tree:
        """Read YAML; ``name`` stands for the file in errors."""
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = "" if mark is None else f", line {mark.line + 1}"
            raise ConfigError(f"{name}{line}: {getattr(error, 'problem', None) or error}.") from None
        except RecursionError:
            raise ConfigError(
                f"{name}: values are nested too deeply to be read; write them with fewer levels."
            ) from None
        finally:
            loader.dispose()
        tree = cls()
        if node is None:
            return tree
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{name}: the file is not a mapping of names to values, such as max_epochs: 4.")
        tree.values = _Reader(loader, name, tree.places).read(node, ())
        return tree

    def place_of(self, path: Sequence[str]) -> str:
        """Return where a value is written, with its name."""
        known = next((tuple(path[:end]) for end in range(len(path), -1, -1) if tuple(path[:end]) in self.places), None)
        where = "" if known is None else self.places[known]
        name = ".".join(path)
        return f"{where}, {name}" if where and name else where or name

    def override(self, words: Sequence[str]) -> None:
        """Change values as the words of a command line say: ``--a.b value``, ``--a.b=value``, ``--a.b!`` removes it.

        A flag without a value is true; ``-`` in names counts as ``_``.

        Raises:
            ConfigError: A word is not a flag or its value, or what is to be removed does not exist.
        """
        for word, name, value in _flags(words):
            path = tuple(name.replace("-", "_").split("."))
            if path[:2] == _SPACE and len(path) > 2:
                path, value = self._in_space(path, value)
            if value is _REMOVED:
                self._remove(path, word)
            else:
                self._set(path, value, word)

    def _in_space(self, path: _Path, value: Any) -> tuple[_Path, Any]:
        """Return path and value of an entry of a search's space, whose keys are names with dots.

        The name of a function of ``ray.tune`` may follow the field's: ``--search.space.optimizer.args.lr.uniform [0, 1]``.
        """
        search = self.values.get("search")
        space = search.get("space") if isinstance(search, dict) else None
        *field, kind = path[2:]
        name = ".".join(path[2:])
        if not field or kind not in SPACES or (isinstance(space, dict) and name in space):
            return (*_SPACE, name), value
        return (*_SPACE, ".".join(field)), value if value is _REMOVED else {kind: value}

    def _set(self, path: _Path, value: Any, word: str) -> None:
        inside: Any = self.values
        for place, name in enumerate(path):
            is_last = place == len(path) - 1
            if isinstance(inside, list):
                index = self._index(inside, name, word)
                if is_last:
                    inside[index] = value
                else:
                    inside = inside[index]
            elif is_last:
                inside[name] = value
            else:
                if not isinstance(inside.get(name), (dict, list)):
                    inside[name] = [] if path[place + 1].isdigit() else {}
                    self.places[path[: place + 1]] = f"{COMMAND_LINE} ({word})"
                inside = inside[name]
        self._forget_places(path)
        self.places[path] = f"{COMMAND_LINE} ({word})"

    def _remove(self, path: _Path, word: str) -> None:
        inside: Any = self.values
        for name in path[:-1]:
            inside = inside.get(name) if isinstance(inside, dict) else None
        if not isinstance(inside, dict) or path[-1] not in inside:
            known = list(inside) if isinstance(inside, dict) else []
            raise ConfigError(
                f"{word}: {'.'.join(path)} is not set, so it cannot be removed{nearest(path[-1], known)}."
            )
        del inside[path[-1]]
        self._forget_places(path)

    def _forget_places(self, path: _Path) -> None:
        for place in [place for place in self.places if place[: len(path)] == path]:
            del self.places[place]

    def _index(self, values: list[Any], name: str, word: str) -> int:
        if not name.isdigit() or int(name) > len(values):
            raise ConfigError(f"{word}: {name!r} is not the number of an entry; give 0 to {len(values)}.")
        if int(name) == len(values):
            values.append({})
        return int(name)

    def resolved(self) -> dict[str, Any]:
        """Return the values with every ``$(a.b)`` replaced by the value of that name.

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
        if not isinstance(value, str) or "$(" not in value:
            return value
        if (whole := _REFERENCE.fullmatch(value)) is not None:
            return self._look_up(whole[1], path, using)
        return _REFERENCE.sub(lambda found: str(self._look_up(found[1], path, using)), value)

    def _look_up(self, name: str, path: _Path, using: tuple[str, ...]) -> Any:
        if name in using:
            cycle = " -> ".join((*using[using.index(name) :], name))
            raise ConfigError(f"{self.place_of(path)}: the references form a cycle: {cycle}.")
        inside: Any = self.values
        for part in name.split("."):
            key: Any = int(part) if isinstance(inside, list) and part.isdigit() else part
            try:
                inside = inside[key]
            except (KeyError, IndexError, TypeError):
                known = list(inside) if isinstance(inside, dict) else []
                raise ConfigError(
                    f"{self.place_of(path)}: $({name}) refers to {name}, which is not set{nearest(part, known)}."
                ) from None
        return self._resolve(copy.deepcopy(inside), tuple(name.split(".")), (*using, name))

    def make_args(self) -> TrainerArgs:
        """Make `TrainerArgs` of the values.

        Raises:
            ConfigError: A name is not known or a value is not allowed; the message names the place.
        """
        with self.naming_places():
            args: TrainerArgs = _build(TrainerArgs, self.resolved(), ())
        return args

    @contextlib.contextmanager
    def naming_places(self) -> Iterator[None]:
        """Turn the `FieldError` of the block into an error that names the place of the field."""
        try:
            yield
        except FieldError as error:
            place = self.place_of(error.path)
            kind = UnknownArgumentError if isinstance(error.__cause__, UnknownArgumentError) else ConfigError
            raise kind(f"{place}: {error}" if place else str(error)) from None


def args_of(values: Mapping[str, Any]) -> TrainerArgs:
    """Make `TrainerArgs` of nested dicts.

    Raises:
        ConfigError: A name is not known, or a value is not allowed.
    """
    return Tree(copy.deepcopy(dict(values))).make_args()


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with others in their place; names may have dots: ``{"optimizer.args.lr": 0.1}``."""
    tree = Tree(copy.deepcopy(dict(values)))
    for name, value in changes.items():
        path = tuple(name.split("."))
        inside: Any = tree.values
        for part in path[:-1]:
            if isinstance(inside, list):
                inside = inside[int(part)]
                continue
            if inside.get(part) is None:
                inside[part] = {}
            inside = inside[part]
        if (
            isinstance(value, Mapping)
            and isinstance(inside, MutableMapping)
            and isinstance(inside.get(path[-1]), Mapping)
        ):
            inside[path[-1]] = merge(inside[path[-1]], value)
        elif isinstance(inside, list):
            inside[int(path[-1])] = value
        else:
            inside[path[-1]] = value
    return tree.values


def as_values(args: Any) -> Any:
    """Return nested dicts and lists with the fields of `TrainerArgs`, in their order."""
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        return {each.name: as_values(getattr(args, each.name)) for each in dataclasses.fields(args)}
    if isinstance(args, Mapping):
        return {key: as_values(value) for key, value in args.items()}
    if isinstance(args, (list, tuple)):
        return [as_values(each) for each in args]
    return args


# -- words of a command line -----------------------------------------------------------------------------------------------

_REMOVED: Any = object()


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
            yield word, name[:-1], _REMOVED
        elif place < len(words) and not words[place].startswith("--"):
            yield f"{word} {words[place]}", name, words[place]
            place += 1
        else:
            yield word, name, True


# -- YAML ----------------------------------------------------------------------------------------------------------------


class _Reader:
    """Makes values of YAML's nodes, and writes down where each stands."""

    def __init__(self, loader: yaml.SafeLoader, name: str, places: dict[_Path, str]) -> None:
        self._loader = loader
        self._name = name
        self._places = places
        self._open: list[yaml.Node] = []

    def read(self, node: yaml.Node, path: _Path) -> Any:
        line = f"{self._name}, line {node.start_mark.line + 1}"
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
            return self._scalar(node)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: _Path) -> dict[str, Any]:
        self._loader.flatten_mapping(node)
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key: Any = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            where = f"{self._name}, line {key_node.start_mark.line + 1}"
            is_value = any(part.endswith("args") for part in path[:-1])  # a dict that is the argument of a component
            if not isinstance(key, str) and not (is_value and isinstance(key, (int, float, bool))):
                raise ConfigError(f"{where}: {key!r} is not a name; keys are texts.")
            if not path:
                key = str(key).replace("-", "_")
            if key in found:
                raise ConfigError(f"{where}: {'.'.join((*path, key))} is given twice.")
            self._places[(*path, str(key))] = where
            found[key] = self.read(value_node, (*path, str(key)))
        return found

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            line = node.start_mark.line + 1
            text = getattr(error, "problem", None) or error
            raise ConfigError(f"{self._name}, line {line}: {text}; only plain values can be read.") from None


# -- dataclasses -----------------------------------------------------------------------------------------------------------


def _build(kind: type, values: Any, path: _Path) -> Any:
    """Make a dataclass of a mapping; errors carry the whole path."""
    if not isinstance(values, Mapping):
        raise FieldError(path, f"{values!r} is not a mapping of names to values.")
    hints = get_type_hints(kind)
    known = [each.name for each in dataclasses.fields(kind)]
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            cause = UnknownArgumentError(name)
            raise FieldError((*path, str(name)), f"there is no such field{nearest(str(name), known)}.") from cause
        given[name] = _guessed(value) if (*path, name) in _SETTINGS else _value(hints[name], value, (*path, name))
    try:
        return kind(**given)
    except FieldError as error:
        raise FieldError((*path, *error.path), str(error)) from None


def _guessed(value: Any) -> Any:
    """Return settings in which a text that is a Python literal is that literal."""
    if isinstance(value, Mapping):
        return {key: _guessed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_guessed(each) for each in value]
    return guess(value) if isinstance(value, str) else value


def _value(hint: Any, value: Any, path: _Path) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if types.NoneType in kinds and isinstance(value, str) and value.lower() in ("none", "null"):
        return None
    if isinstance(value, str) and str not in kinds and not any(get_origin(kind) is Literal for kind in kinds):
        value = guess(value)
    if value is None and types.NoneType in kinds:
        return None
    nested = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    if nested == [HookConfig, HookMapConfig]:
        nested = [HookConfig if isinstance(value, Mapping) and "type" in value else HookMapConfig]
    if nested and dataclasses.is_dataclass(value) and type(value) in nested:
        return value
    if nested:
        return _build(nested[0], {} if value is None else value, path)  # type: ignore[arg-type]
    entries = [get_args(kind)[0] for kind in kinds if get_origin(kind) is list]
    if entries and dataclasses.is_dataclass(entries[0]):
        if not isinstance(value, (list, tuple)):
            raise FieldError(path, f"{value!r} is not a list.")
        return [_value(entries[0], each, (*path, str(place))) for place, each in enumerate(value)]
    return value
