"""Flags of a command: ``--name value``, ``--name=value``, and switches that may stand alone.

The flags end at the first word that is neither a flag nor its value; the words from there on are not looked at. So a flag of
a script cannot be taken for one of the command.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from raysgd.config.argument_names import nearest
from raysgd.errors import ConfigError, UnknownArgumentError

_BOOLS = {"true": True, "false": False}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag.

    Attributes:
        name: The name with its dashes.
        help: What it does, for ``--help``.
        parse: Makes the value of the text; raises a `ConfigError` or a ValueError.
        metavar: The value in ``--help``.
        is_switch: The flag may stand alone for True; ``true`` or ``false`` may follow.
        may_repeat: The values of all occurrences are a list.
        group: The heading in ``--help``.
    """

    name: str
    help: str
    parse: Callable[[str], Any] = str
    metavar: str = "TEXT"
    is_switch: bool = False
    may_repeat: bool = False
    group: str = "options"


def parse_bool(text: str) -> bool:
    """Return the value of ``true`` or ``false``."""
    if text.lower() not in _BOOLS:
        raise ConfigError("give true or false")
    return _BOOLS[text.lower()]


def parse_int(text: str) -> int:
    """Return an int, written in digits."""
    return _convert(int, text, "an int")


def parse_number(text: str) -> float:
    """Return a number."""
    return _convert(float, text, "a number")


def _convert(kind: Callable[[str], T], text: str, what: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not {what}") from None


@dataclass(frozen=True)
class Parsed:
    """The meaning of the words of a command line.

    Attributes:
        values: The values of the given flags, by name.
        remaining: The words after the flags.
        wants_help: ``--help`` was among the flags.
    """

    values: dict[str, Any]
    remaining: list[str]
    wants_help: bool = False


def parse_flags(words: Sequence[str], flags: Sequence[Flag], hints: Mapping[str, str]) -> Parsed:
    """Parse the flags at the beginning of ``words``.

    Args:
        words: The command line after the command's name.
        flags: The flags that exist.
        hints: What to say about flags of other programs, by name.

    Raises:
        UnknownArgumentError: A flag does not exist; the message names the nearest.
        ConfigError: A value is missing, cannot be parsed, or is given twice.
    """
    by_name = {flag.name: flag for flag in flags}
    values: dict[str, Any] = {}
    place = 0
    while place < len(words) and words[place].startswith("-"):
        name, has_value, text = words[place].partition("=")
        place += 1
        if name == "--":
            break
        if name in ("-h", "--help"):
            return Parsed(values, [], wants_help=True)
        if (flag := by_name.get(name)) is None:
            raise _unknown(name, by_name, hints)
        if not has_value:
            if flag.is_switch:
                is_next = place < len(words) and words[place].lower() in _BOOLS
                text = words[place] if is_next else "true"
                place += is_next
            elif place == len(words) or words[place].partition("=")[0] in by_name:
                raise ConfigError(f"{name} needs a value: {name} {flag.metavar}.")
            else:
                text = words[place]
                place += 1
        _add(values, flag, text)
    return Parsed(values, list(words[place:]))


def _add(values: dict[str, Any], flag: Flag, text: str) -> None:
    try:
        value = flag.parse(text)
    except ValueError as error:  # a ConfigError is one, too
        raise ConfigError(f"{flag.name} {text}: {str(error).rstrip('.')}.") from None
    if flag.may_repeat:
        values.setdefault(flag.name, []).append(value)
    elif flag.name in values:
        raise ConfigError(f"{flag.name} is given twice.")
    else:
        values[flag.name] = value


def _unknown(name: str, known: Mapping[str, Flag], hints: Mapping[str, str]) -> UnknownArgumentError:
    plain = name.lower().replace("_", "-")
    if plain in hints:
        return UnknownArgumentError(f"{name} is not known: {hints[plain]}.")
    return UnknownArgumentError(f"{name} is not known{nearest(plain, known)}; flags of the script follow its name.")


def format_help(usage: str, description: str, flags: Sequence[Flag]) -> str:
    """Return the text of ``--help``."""
    parser = argparse.ArgumentParser(usage=usage, description=description, add_help=False)
    groups: dict[str, Any] = {}
    for flag in flags:
        group = groups.get(flag.group) or groups.setdefault(flag.group, parser.add_argument_group(flag.group))
        metavar = f"[{flag.metavar}]" if flag.is_switch else flag.metavar
        group.add_argument(flag.name, help=flag.help.replace("%", "%%"), metavar=metavar)
    groups["options"].add_argument("--help", action="store_true", help="show this text")
    return parser.format_help()
