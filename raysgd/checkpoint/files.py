"""What `Storage` needs of a place that holds files; one implementation for local disks, one for ``pyarrow.fs``."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

from raysgd.checkpoint.checksum import Chunk


@dataclass(frozen=True)
class FileInfo:
    """What there is under a name.

    Attributes:
        size: Bytes of a file, 0 of a folder.
        is_folder: A folder, not a file.
    """

    size: int
    is_folder: bool


class Files(abc.ABC):
    """Files and folders below one root.

    `Storage` calls these from any thread; an implementation keeps no state between calls. Names are relative to the
    root, ``/`` between components, and were checked by the caller; ``""`` is the root. Failures are ``OSError``;
    ``FileNotFoundError`` where nothing is there. None of the calls retries.
    """

    root: str

    @abc.abstractmethod
    def write(self, name: str, chunks: Iterable[Chunk], *, atomic: bool) -> tuple[int, int]:
        """Write a file, replacing one of that name, and return its size and crc32.

        When it returns the bytes are as durable as the place can make them. With ``atomic`` a reader sees the old file
        or the new one, never a part. Missing folders are made.
        """

    @abc.abstractmethod
    def open_input(self, name: str) -> BinaryIO:
        """Open for reading; the caller closes it."""

    @abc.abstractmethod
    def info(self, name: str) -> FileInfo | None:
        """What is there, or None."""

    @abc.abstractmethod
    def list_names(self, name: str) -> list[str]:
        """The names directly in a folder, unsorted; empty where there is no such folder."""

    @abc.abstractmethod
    def make_dirs(self, name: str) -> None:
        """Make a folder and those above it, unless they are there."""

    @abc.abstractmethod
    def delete_file(self, name: str) -> None:
        """Delete a file; FileNotFoundError where there is none."""

    @abc.abstractmethod
    def delete_dir(self, name: str) -> None:
        """Delete a folder and all in it, without following symbolic links."""
