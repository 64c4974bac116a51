"""Checks names of files and folders that come from outside: from a user or a manifest.

A manifest is data that somebody else may have written, and its names are joined to a path: ``..``, absolute paths and
separators must never get that far. Pure; runs in every process.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from raysgd.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
_MAX_COMPONENT_BYTES = 255
_MAX_PATH_BYTES = 4096
BLOCK_BYTES = 8 << 20
_MAX_BLOCKS = 1024


class FileEntry(NamedTuple):
    """One file of a checkpoint as its manifest lists it.

    Attributes:
        name: Relative to the checkpoint's folder, ``/`` between components.
        size: Bytes.
        crc32: Of the whole file, as ``zlib.crc32`` gives it.
        blocks: The crc32 of the file up to the end of each of its blocks but the last one; their size is `block_size`.
            With it a block can be checked alone. Empty for a file of one block, and for one of an older manifest.
    """

    name: str
    size: int
    crc32: int
    blocks: tuple[int, ...] = ()


def block_size(file_bytes: int) -> int:
    """Return the bytes of the blocks of a file: 8 MiB, doubled until there are at most 1,024 of them."""
    size = BLOCK_BYTES
    while file_bytes > size * _MAX_BLOCKS:
        size *= 2
    return size


def num_blocks(file_bytes: int) -> int:
    return -(-file_bytes // block_size(file_bytes))


def check_name(name: Any, what: str = "name") -> str:
    """Check for one path component of letters, digits, ``.``, ``_`` and ``-``.

    Raises:
        ConfigError: It is anything else.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):
        raise ConfigError(
            f"{what}={name!r} cannot name a file or folder; give 1 to 128 of A-Z a-z 0-9 . _ - (not '.', '..')."
        )
    return name


def check_relative_path(path: Any, what: str = "path") -> str:
    """Check for a relative path that stays inside its folder. Looser than `check_name`: users name their own files.

    Raises:
        ConfigError: It is absolute, has ``.``, ``..`` or empty components, backslashes or control characters, or is too
            long.
    """
    if not isinstance(path, str) or _CONTROL.search(path) or not _fits(path):
        raise ConfigError(f"{what}={path!r} is not a relative path of printable characters: rename the file.")
    for component in path.split("/"):
        if component in ("", ".", "..") or len(component.encode()) > _MAX_COMPONENT_BYTES:
            raise ConfigError(
                f"{what}={path!r} has the component {component!r}; give a plain relative path such as 'a/b.bin'."
            )
    return path


def _fits(path: str) -> bool:
    try:
        return len(path.encode()) <= _MAX_PATH_BYTES
    except UnicodeEncodeError:  # JSON cannot hold a file name that is not text in the system's encoding
        return False
