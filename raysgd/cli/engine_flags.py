"""The flags ``--engine.*`` and the file of ``--engine-config``, which make an `EngineConfig`. Driver side, without torch."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from raysgd.cli.flags import Flag, parse_bool, parse_int, parse_number
from raysgd.config.argument_names import nearest
from raysgd.engine.config import EngineConfig
from raysgd.errors import ConfigError, UnknownArgumentError

PREFIX = "--engine."
FILE_FLAG = "--engine-config"
_GROUP = "Engine"
_NOTHING = ("none", "null")
_FIELD = re.compile(r"\b(\w+)(?==| cuts)")
_PARSERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    bool: (parse_bool, "true|false"),
    int: (parse_int, "N"),
    float: (parse_number, "NUMBER"),
    str: (str, "TEXT"),
}


def engine_flags() -> list[Flag]:
    """Return a flag for each field of `EngineConfig`, and the one for a file."""
    texts = _texts_of_fields()
    made = [
        Flag(
            FILE_FLAG,
            help=f"file with fields of the engine, .yaml or .json; {PREFIX}* flags override it",
            metavar="FILE",
            group=_GROUP,
        )
    ]
    for name, hint in _hints().items():
        made.append(
            Flag(
                _flag_of(name),
                help=texts.get(name, ""),
                parse=partial(parse_field, name),
                metavar=_metavar(hint),
                is_switch=bool in (hint, *get_args(hint)),
                group=_GROUP,
            )
        )
    return made


def parse_field(name: str, text: str) -> Any:
    """Return the value of a field that is written as text.

    Raises:
        ConfigError: The text is not a value of the field's type.
    """
    hint = _hints()[name]
    if NoneType in get_args(hint):
        if text.lower() in _NOTHING:
            return None
        hint = next(kind for kind in get_args(hint) if kind is not NoneType)
    return _PARSERS[str if get_origin(hint) is Literal else hint][0](text)


def make_engine_config(given: Mapping[str, Any]) -> EngineConfig | None:
    """Make the config that the flags of a command mean; None if there is none among them.

    Args:
        given: The values of all flags, by name.

    Raises:
        ConfigError: The file cannot be read, or a value is not allowed; the message names file or flag, and the field.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if (path := given.get(FILE_FLAG)) is not None:
        for name, value in read_file(path).items():
            values[name], sources[name] = value, path
    for name in _hints():
        if (flag := _flag_of(name)) in given:
            values[name], sources[name] = given[flag], flag
    if not sources and path is None:
        return None
    try:
        return EngineConfig.of(values)
    except ConfigError as error:
        named = [found for found in _FIELD.findall(str(error)) if found in sources]
        where = sources[named[0]] if named else (path or f"{PREFIX}*")
        raise type(error)(f"{where}: {error}") from None


def read_file(path: str) -> dict[str, Any]:
    """Return the fields in a file, by their names in `EngineConfig`.

    Raises:
        ConfigError: It cannot be read, or has a key that is not a field.
    """
    read = _load(path)
    if not isinstance(read, Mapping):
        raise ConfigError(f"{path}: the file is not a mapping of fields to values, such as precision: bf16.")
    known = list(_hints())
    values: dict[str, Any] = {}
    for key, value in read.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UnknownArgumentError(f"{path}: {key!r} is not a field of the engine{nearest(name, known)}.")
        if name in values:
            raise ConfigError(f"{path}: {key!r} is given twice.")
        try:
            values[name] = parse_field(name, value) if isinstance(value, str) else value
        except ConfigError as error:
            raise ConfigError(f"{path}: {key}: {error}.") from None
    return values


def _load(path: str) -> Any:
    kind = Path(path).suffix.lower()
    if kind not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"{FILE_FLAG} {path}: give a file that ends in .yaml or .json.")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{FILE_FLAG} {path}: the file cannot be read: {error}.") from None
    if kind == ".json":
        try:
            return json.loads(text, object_pairs_hook=partial(_without_duplicates, path))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {error.lineno}: {error.msg}.") from None
    import yaml  # a package that Ray needs

    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}.") from None
    return {} if read is None else read  # a file of comments alone


def _without_duplicates(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for place, (key, _) in enumerate(pairs):
        if key in (earlier for earlier, _ in pairs[:place]):
            raise ConfigError(f"{path}: {key!r} is given twice.")
    return dict(pairs)


def _hints() -> dict[str, Any]:
    hints = get_type_hints(EngineConfig)
    return {field.name: hints[field.name] for field in fields(EngineConfig)}


def _flag_of(name: str) -> str:
    return PREFIX + name.replace("_", "-")


def _metavar(hint: Any) -> str:
    choices = [choice for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        return "|".join(choices)
    metavar = next(metavar for kind, (_, metavar) in _PARSERS.items() if kind in (hint, *get_args(hint)))
    return f"{metavar}|none" if hint == bool | None else metavar


def _texts_of_fields() -> dict[str, str]:
    """Return what the docstring of `EngineConfig` says of each field."""
    _, _, listed = inspect.cleandoc(EngineConfig.__doc__ or "").partition("Attributes:\n")
    texts: dict[str, str] = {}
    name = ""
    for line in listed.splitlines():
        if found := re.match(r" {4}(\w+): (.*)", line):
            name = found[1]
            texts[name] = found[2]
        elif name and line.strip():
            texts[name] += f" {line.strip()}"
    return {name: text.replace("``", "").replace("`", "") for name, text in texts.items()}
