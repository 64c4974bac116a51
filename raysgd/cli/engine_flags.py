"""The flags ``--engine.*`` and the file of ``--engine-config``, which make an `EngineConfig`. Driver side, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from raysgd._util.text import read_attributes
from raysgd.cli.flags import Flag
from raysgd.declarative.values import read_value
from raysgd.engine.config import EngineConfig
from raysgd.errors import ConfigError

PREFIX = "--engine."
FILE_FLAG = "--engine-config"
_GROUP = "Engine"
_METAVARS = {bool: "true|false", int: "N", float: "NUMBER", str: "TEXT"}


def engine_flags() -> list[Flag]:
    """Return a flag for each field of `EngineConfig`, and the one for a file."""
    about = f"file with fields of the engine, .yaml or .json; {PREFIX}* flags override it"
    texts = read_attributes(EngineConfig.__doc__)
    return [
        Flag(FILE_FLAG, help=about, metavar="FILE", group=_GROUP),
        *(
            Flag(
                PREFIX + name.replace("_", "-"),
                help=texts.get(name, ""),
                parse=read_value,
                metavar=_metavar(hint),
                is_switch=bool in (hint, *get_args(hint)),
                group=_GROUP,
            )
            for name, hint in get_type_hints(EngineConfig).items()
        ),
    ]


def _metavar(hint: Any) -> str:
    choices = [choice for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        return "|".join(choices)
    metavar = next(metavar for kind, metavar in _METAVARS.items() if kind in (hint, *get_args(hint)))
    return f"{metavar}|none" if hint == bool | None else metavar


def make_engine_config(given: Mapping[str, Any]) -> EngineConfig | None:
    """Make the config that the flags of a command mean; None if there is none among them.

    Args:
        given: The values of all flags, by name.

    Raises:
        ConfigError: The file cannot be read, or a value is not allowed; the message names file and line, or flag, and the field.
    """
    flags = [name for name in given if name.startswith(PREFIX)]
    path = given.get(FILE_FLAG)
    if path is None and not flags:
        return None
    from raysgd.declarative.fields import of_field
    from raysgd.declarative.reading import Tree

    if path is not None and Path(path).suffix.lower() not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"{FILE_FLAG} {path}: give a file that ends in .yaml or .json.")
    tree = Tree() if path is None else Tree.of_file(path)
    for flag in flags:
        name = flag.removeprefix(PREFIX).replace("-", "_")
        tree.values[name], tree.places[(name,)] = given[flag], flag
    with tree.naming_places(), of_field(names=tree.values):
        return EngineConfig.of({name: read_value(value) for name, value in tree.values.items()})
