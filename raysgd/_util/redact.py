"""Remove secrets from what is written to files: configs, events, tracebacks."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

REDACTED = "***"
# "token" only as a separate word: a tokenizer, or a number of tokens, is not a secret.
_TOKEN = r"(?:(?<![a-z])token|(?-i:(?<=[a-z])Token))(?![a-z])"
_KEY = r"(?:api|access|private)[_-]?key"
_SECRET = rf"[\w-]*(?:secret|password|passwd|passphrase|credential|{_KEY}|{_TOKEN})[\w-]*"
_SECRET_NAME = re.compile(_SECRET, re.IGNORECASE)
#: Most texts have none of these words; the slower search for assignments is skipped for them.
_HINT = re.compile(r"secret|password|passwd|passphrase|credential|key|token", re.IGNORECASE)
# scheme://user:password@host
_USER_INFO = re.compile(r"(?<=://)[^/\s?#'\"]*@")
# name = 'value', "name": "value", name: value, --name value; the value up to its closing quote or the next blank
_ASSIGNMENT = re.compile(
    rf"""(?P<head>(?P<q>['"]?)\b{_SECRET}(?P=q)\s*(?:=|:)\s*|--{_SECRET}[ \t]+)(?P<value>'[^'\n]*'|"[^"\n]*"|[^\s,;)}}\]]+)""",
    re.IGNORECASE,
)


def is_secret_name(name: Any) -> bool:
    """Return whether a value of this name is a secret."""
    return isinstance(name, str) and _SECRET_NAME.fullmatch(name) is not None


def redact(value: Any, secrets: Set[str] = frozenset()) -> Any:
    """Copy a tree of dicts and lists; replace the values of secret names, and redact texts by `redact_text`."""
    if isinstance(value, Mapping):
        return {key: REDACTED if is_secret_name(key) else redact(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, secrets) for item in value]
    return redact_text(value, secrets) if isinstance(value, str) else value


def redact_texts(value: Any, secrets: Set[str], untouched: Collection[str] = ()) -> Any:
    """Copy a tree whose names are raysgd's own; redact its texts, except under the names ``untouched``."""
    if isinstance(value, Mapping):
        return {
            key: item if key in untouched else redact_texts(item, secrets, untouched) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_texts(item, secrets, untouched) for item in value]
    return redact_text(value, secrets) if isinstance(value, str) else value


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Replace the values of options with secret names in a command line: ``--token=x`` and ``--token x``."""
    shown: list[str] = []
    is_value = False
    for argument in arguments:
        is_option = argument.startswith("-")
        shown.append(REDACTED if is_value and not is_option else redact_text(argument))
        is_value = is_option and is_secret_name(argument.lstrip("-"))
    return shown


def secret_values(value: Any, is_secret: bool = False) -> set[str]:
    """Return the strings under secret names in a config, at any depth, so that texts can be searched for them."""
    if isinstance(value, Mapping):
        inside = [secret_values(item, is_secret or is_secret_name(key)) for key, item in value.items()]
        return set().union(*inside)
    if isinstance(value, (list, tuple)):
        return set().union(*(secret_values(item, is_secret) for item in value))
    return {value} if is_secret and isinstance(value, str) and len(value) >= 4 else set()


def redact_text(text: str, secrets: Set[str] = frozenset()) -> str:
    """Remove from a text the given secrets, the values assigned to secret names, and the user part of URIs."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    text = redact_uri(text)
    return _ASSIGNMENT.sub(lambda match: match["head"] + REDACTED, text) if _HINT.search(text) else text


def redact_uri(text: str) -> str:
    """Replace ``s3://key:secret@bucket`` in a text by ``s3://***@bucket``."""
    return _USER_INFO.sub(REDACTED + "@", text) if "://" in text else text


def plain(value: Any, depth: int = 0) -> Any:
    """Convert a value to what JSON can hold; other objects become their ``repr``, cut to 200 characters."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth < 10 and isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if depth < 10 and isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    text = redact_text(repr(value))
    return text if len(text) <= 200 else text[:197] + "..."
