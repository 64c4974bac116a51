"""Keep secrets out of what is written down: configs, events, tracebacks."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

REDACTED = "***"
# "token" only as a word of its own: a tokenizer, or a number of tokens, is no secret.
_TOKEN = r"(?:(?<![a-z])token|(?-i:(?<=[a-z])Token))(?![a-z])"
_KEY = r"(?:api|access|private)[_-]?key"
_SECRET = rf"[\w-]*(?:secret|password|passwd|passphrase|credential|{_KEY}|{_TOKEN})[\w-]*"
_SECRET_NAME = re.compile(_SECRET, re.IGNORECASE)
#: Most texts have no such word, and need no look at what is assigned to what.
_HINT = re.compile(r"secret|password|passwd|passphrase|credential|key|token", re.IGNORECASE)
# scheme://user:password@host
_USER_INFO = re.compile(r"(?<=://)[^/\s?#'\"]*@")
# name = 'value', "name": "value", name: value, --name value; the value up to its closing quote or the next blank
_ASSIGNMENT = re.compile(
    rf"""(?P<head>(?P<q>['"]?)\b{_SECRET}(?P=q)\s*(?:=|:)\s*|--{_SECRET}[ \t]+)(?P<value>'[^'\n]*'|"[^"\n]*"|[^\s,;)}}\]]+)""",
    re.IGNORECASE,
)


def is_secret_name(name: Any) -> bool:
    """Whether a value of this name is not to be shown."""
    return isinstance(name, str) and _SECRET_NAME.fullmatch(name) is not None


def redact(value: Any, secrets: Set[str] = frozenset()) -> Any:
    """A copy of a tree of dicts and lists with the values of secret names replaced, and its texts as `redact_text` has them."""
    if isinstance(value, Mapping):
        return {key: REDACTED if is_secret_name(key) else redact(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, secrets) for item in value]
    return redact_text(value, secrets) if isinstance(value, str) else value


def redact_texts(value: Any, secrets: Set[str], untouched: Collection[str] = ()) -> Any:
    """The same, of a tree whose names are our own: only its texts, but for those under the names ``untouched``."""
    if isinstance(value, Mapping):
        return {
            key: item if key in untouched else redact_texts(item, secrets, untouched) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_texts(item, secrets, untouched) for item in value]
    return redact_text(value, secrets) if isinstance(value, str) else value


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with the values of options that have secret names replaced: ``--token=x`` and ``--token x``."""
    shown: list[str] = []
    is_value = False
    for argument in arguments:
        is_option = argument.startswith("-")
        shown.append(REDACTED if is_value and not is_option else redact_text(argument))
        is_value = is_option and is_secret_name(argument.lstrip("-"))
    return shown


def secret_values(value: Any, is_secret: bool = False) -> set[str]:
    """The strings that stand, however deep, under secret names in a config, so that texts can be searched for them."""
    if isinstance(value, Mapping):
        inside = [secret_values(item, is_secret or is_secret_name(key)) for key, item in value.items()]
        return set().union(*inside)
    if isinstance(value, (list, tuple)):
        return set().union(*(secret_values(item, is_secret) for item in value))
    return {value} if is_secret and isinstance(value, str) and len(value) >= 4 else set()


def redact_text(text: str, secrets: Set[str] = frozenset()) -> str:
    """``text`` without the given secrets, what is assigned to secret names in it, and the user's part of URIs."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    text = redact_uri(text)
    return _ASSIGNMENT.sub(lambda match: match["head"] + REDACTED, text) if _HINT.search(text) else text


def redact_uri(text: str) -> str:
    """``text`` with ``s3://***@bucket`` for ``s3://key:secret@bucket``."""
    return _USER_INFO.sub(REDACTED + "@", text) if "://" in text else text


def plain(value: Any, depth: int = 0) -> Any:
    """``value`` as JSON can hold it; what it cannot hold becomes its ``repr``, cut short."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth < 10 and isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if depth < 10 and isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    text = redact_text(repr(value))
    return text if len(text) <= 200 else text[:197] + "..."
