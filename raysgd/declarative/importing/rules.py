"""What the tables of the kinds of files are made of: a rule for each key, and the translation that the rules write to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

#: The default of a key that has no effect while it is missing.
NONE: Any = object()


@dataclass
class Translation:
    """A file that becomes one of `raysgd train`.

    Attributes:
        given: The keys of the other file, with dots, and their values.
        values: The fields of the new file.
        remarks: What was not translated: the key, the reason, and what to write by hand.
        unused: Keys that are not needed, and why.
    """

    given: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    remarks: list[tuple[str, str]] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, value: Any) -> None:
        """Set a field, whose name may have dots."""
        *sections, key = name.split(".")
        inside = self.values
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[key] = value

    def remark(self, key: str, text: str) -> None:
        """Add what the user has to know of a key, or has to write for it."""
        self.remarks.append((key, text))


@dataclass(frozen=True)
class Rule:
    """The translation of one key. The functions below make rules.

    Attributes:
        apply: Writes a value to the translation. It gets the translation, the key and the value.
        default: The value that counts if the file does not have the key.
    """

    apply: Callable[[Translation, str, Any], None]
    default: Any = NONE


def to(name: str, *, but: tuple[Any, ...] = (None,), default: Any = NONE) -> Rule:
    """Return the rule of a key whose value is that of a field, other than the values ``but``, which change nothing."""

    def apply(made: Translation, key: str, value: Any) -> None:
        if not is_one_of(value, but):
            made.set(name, value)

    return Rule(apply, default)


def choose(values: Mapping[str, Mapping[str, Any]], otherwise: str, default: Any = NONE) -> Rule:
    """Return the rule of a key whose values stand for fields.

    Args:
        values: The fields by the text of the value.
        otherwise: What to write by hand for other values.
        default: See `Rule`.
    """

    def apply(made: Translation, key: str, value: Any) -> None:
        fields = values.get(str(value).lower())
        if fields is None:
            made.remark(key, f"{value!r} is not translated: {otherwise}")
        for name, meant in (fields or {}).items():
            made.set(name, meant)

    return Rule(apply, default)


def unused(why: str) -> Rule:
    """Return the rule of a key that says nothing here."""

    def apply(made: Translation, key: str, value: Any) -> None:
        made.unused[key] = why

    return Rule(apply)


def by_hand(text: str, *neutral: Any) -> Rule:
    """Return the rule of a key that is not translated; the values ``neutral`` ask for nothing."""

    def apply(made: Translation, key: str, value: Any) -> None:
        if not is_one_of(value, (None, *neutral)):
            made.remark(key, f"{value!r:.100} is not translated: {text}")

    return Rule(apply)


def read_by(key: str) -> Rule:
    """Return the rule of a key that the rule of another key reads."""
    return Rule(lambda made, _, value: None)


def keys(names: str, rule: Rule, section: str = "") -> dict[str, Rule]:
    """Return one rule for several keys of a section; the text has their names."""
    return {f"{section}{name}": rule for name in names.split()}


def is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether a value is one of others; true is not 1, and 1.0 is not 1."""
    return any(type(value) is type(one) and value == one for one in values)


def is_count(value: Any) -> bool:
    """Return whether a value is an int of 1 or more."""
    return type(value) is int and value >= 1


def flatten(values: Mapping[Any, Any], rules: Mapping[str, Rule], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys with dots and their values, as deep as rules have them; keys without a rule at the depth where they end."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name not in rules and isinstance(value, Mapping) and any(one.startswith(f"{name}.") for one in rules):
            yield from flatten(value, rules, f"{name}.")
        else:
            yield name, value


def translate(values: Mapping[str, Any], rules: Mapping[str, Rule]) -> Translation:
    """Apply the rules to a file's values and to the defaults of keys that it does not have."""
    made = Translation(dict(flatten(values, rules)))
    for key, rule in rules.items():
        if (value := made.given.get(key, rule.default)) is not NONE:
            rule.apply(made, key, value)
    for key in made.given:
        if key not in rules:
            made.remark(key, "is not a key of the format that is known here; write by hand what it does.")
    return made
