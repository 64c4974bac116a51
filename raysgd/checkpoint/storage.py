"""A folder on local disk or in any ``pyarrow.fs`` file system, with retries and errors that say what failed.

Used by the writer threads of workers, by the control plane (manifests, retention) and by drivers that load checkpoints.
Knows nothing of checkpoints; the layout of those is in `raysgd.checkpoint.store`.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar, final

from raysgd.checkpoint import user_files
from raysgd.checkpoint.arrow_files import ArrowFiles, arrow_fs, local_root
from raysgd.checkpoint.checksum import CHUNK_BYTES, Chunk
from raysgd.checkpoint.files import Files
from raysgd.checkpoint.local_files import LocalFiles
from raysgd.checkpoint.names import FileEntry, check_name, check_relative_path
from raysgd.checkpoint.retry import Retry
from raysgd.errors import CheckpointCorruptError, CheckpointNotFoundError, ConfigError

__all__ = ["Retry", "Storage", "check_name"]

T = TypeVar("T")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@final
class Storage:
    """A folder that may live anywhere. Thread-safe and picklable.

    Names are relative to the folder, one component or several with ``/`` between, and are checked: none leads out of
    it. Operations that fail for a passing reason are tried again.
    """

    def __init__(self, fs: Any, base_path: str, *, uri: str | None = None, retry: Retry | None = None) -> None:
        """
        Args:
            fs: A ``pyarrow.fs`` file system; None: the local disk.
            base_path: The folder in it.
            uri: What `from_uri` makes this storage from, where the file system alone does not tell.
            retry: How transient failures are met.
        """
        local = base_path if fs is None else local_root(fs, base_path)
        self.is_local = local is not None
        self._fs = None if self.is_local else fs
        self._retry = retry or Retry()
        self._on_chunk: Callable[[], None] | None = None
        self._files: Files = ArrowFiles(fs, base_path) if local is None else LocalFiles(os.path.abspath(local))
        self.uri = self._files.root if self.is_local else (uri or f"{fs.type_name}://{base_path}")

    @classmethod
    def from_uri(cls, path_or_uri: str | os.PathLike[str], *, retry: Retry | None = None) -> Storage:
        """The folder at a path (``~`` and relative ones too) or at a URI that ``pyarrow.fs`` understands.

        Raises:
            ConfigError: No file system is known for the URI.
        """
        text = os.fspath(path_or_uri)
        if not text or "\x00" in text:
            raise ConfigError(f"{path_or_uri!r} is no path; give a path or a URI such as s3://bucket/folder.")
        if not _SCHEME.match(text):
            return cls(None, os.path.expanduser(text), retry=retry)
        try:
            fs, path = arrow_fs().FileSystem.from_uri(text)
        except (ValueError, OSError, NotImplementedError) as error:
            raise ConfigError(f"{text!r} cannot be opened: {error}; give a path or a URI of pyarrow.fs.") from error
        return cls(fs, path, uri=text, retry=retry)

    def __repr__(self) -> str:
        return f"Storage({self.uri!r})"

    def is_on(self, other: Storage) -> bool:
        """Whether both are on the same file system, opened alike."""
        if self._fs is None or other._fs is None:
            return self._fs is other._fs
        return bool(self._fs.equals(other._fs))

    @property
    def name(self) -> str:
        """The folder's own name, without what leads to it and without the options of its URI."""
        return self._files.root.rstrip("/").rpartition("/")[2]

    def child(self, *components: str) -> Storage:
        """The folder below this one; it need not exist."""
        for component in components:
            check_name(component, "folder")
        head, mark, query = self.uri.partition("?") if not self.is_local else (self.uri, "", "")
        uri = "/".join([head.rstrip("/"), *components]) + mark + query
        return Storage(self._fs, "/".join([self._files.root, *components]), uri=uri, retry=self._retry)

    def with_retry(self, retry: Retry) -> Storage:
        """The same folder, where transient failures are met in another way."""
        return Storage(self._fs, self._files.root, uri=self.uri, retry=retry)

    def telling(self, on_chunk: Callable[[], None]) -> Storage:
        """The same folder; ``on_chunk`` is called before each try to write a file, and before each chunk of it."""
        folder = copy.copy(self)
        folder._on_chunk = on_chunk
        return folder

    def path_of(self, name: str) -> str:
        """Path or URI of a file, for messages and for local readers."""
        folder = self.uri if self.is_local else self.uri.partition("?")[0]
        return f"{folder.rstrip('/')}/{name}" if name else self.uri

    def write_bytes(self, name: str, data: Chunk, *, atomic: bool = True) -> tuple[int, int]:
        """Write a file durably; returns its size and crc32. With ``atomic`` readers see all of it or the old one."""
        return self.write_chunks(name, lambda: (data,), atomic=atomic)

    def write_chunks(self, name: str, chunks: Callable[[], Iterable[Chunk]], *, atomic: bool = True) -> tuple[int, int]:
        """Stream a file to storage and return its size and crc32.

        Args:
            name: Of the file.
            chunks: Gives the chunks from the start; called again for each retry. A chunk stays unchanged for the call.
            atomic: As for `write_bytes`.
        """
        return self._run("write", name, lambda path: self._files.write(path, self._told(chunks()), atomic=atomic))

    def read_bytes(self, name: str, max_bytes: int | None = None) -> bytes:
        """The content of a file; CheckpointCorruptError where it is larger than ``max_bytes``."""
        return self._run("read", name, lambda path: self._read(path, max_bytes))

    def read_with(self, name: str, function: Callable[[BinaryIO], T]) -> T:
        """What ``function`` makes of the opened file; it is called again where reading fails for a moment."""
        return self._run("read", name, lambda path: self._read_with(path, function))

    def open_input(self, name: str) -> BinaryIO:
        """Open a file for reading; the caller closes it."""
        return self._run("open", name, self._files.open_input)

    def exists(self, name: str = "") -> bool:
        """Whether a file or folder of that name is there; without a name, whether this folder is."""
        return self._run("look for", name, self._files.info) is not None

    def is_folder(self, name: str = "") -> bool:
        found = self._run("look for", name, self._files.info)
        return found is not None and found.is_folder

    def size(self, name: str) -> int:
        """Bytes of a file; CheckpointNotFoundError where there is none."""
        found = self._run("look for", name, self._files.info)
        if found is None or found.is_folder:
            raise CheckpointNotFoundError(f"there is no file {self.path_of(name)}")
        return found.size

    def list_names(self, name: str = "") -> list[str]:
        """The sorted names in this folder (or the one below it); empty where it does not exist."""
        return sorted(self._run("list", name, self._files.list_names))

    def make_dirs(self) -> None:
        """Make this folder. Writing does so by itself; for those who want to fail early."""
        self._run("make", "", self._files.make_dirs)

    def delete_file(self, name: str) -> None:
        """Delete a file if it is there."""
        if self.exists(name):
            self._run("delete", name, self._files.delete_file)

    def delete_tree(self, name: str, marker: str) -> bool:
        """Delete a folder directly below this one, if it is one of ours.

        Args:
            name: One component.
            marker: Regular expression; the folder is ours if it is empty or one of its names matches fully.

        Returns:
            Whether it was deleted: False where it is missing or not ours. Symbolic links are never followed.
        """
        check_name(name, "folder")
        if not self.is_folder(name):
            return False
        names = self.list_names(name)
        if names and not any(re.fullmatch(marker, found) for found in names):
            return False
        self._run("delete", name, self._files.delete_dir)
        return True

    def put_path(self, local_path: str | os.PathLike[str], name: str) -> list[FileEntry]:
        """Copy a local file or folder to the folder ``name`` here; the entries are named relative to this storage."""
        return user_files.put_path(self, local_path, name)

    def fetch_tree(
        self, entries: Sequence[FileEntry], local_dir: str | os.PathLike[str], *, verify: bool = True
    ) -> None:
        """Copy files to a local folder, under their names; CheckpointCorruptError where one is not as listed."""
        user_files.fetch_tree(self, entries, local_dir, verify=verify)

    def _told(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        if self._on_chunk is None:
            return chunks
        self._on_chunk()
        return _telling(chunks, self._on_chunk)

    def _run(self, operation: str, name: str, function: Callable[[str], T]) -> T:
        if name:
            check_relative_path(name, "file")
        return self._retry.run(operation, self.path_of(name), lambda: function(name))

    def _read(self, name: str, max_bytes: int | None) -> bytes:
        with self._files.open_input(name) as stream:
            data = _read_all(stream, None if max_bytes is None else max_bytes + 1)
        if max_bytes is not None and len(data) > max_bytes:
            raise CheckpointCorruptError(f"{self.path_of(name)} is larger than the {max_bytes:,} bytes it may have")
        return data

    def _read_with(self, name: str, function: Callable[[BinaryIO], T]) -> T:
        with self._files.open_input(name) as stream:
            return function(stream)


def _read_all(stream: BinaryIO, limit: int | None) -> bytes:
    """All of a stream, or its first ``limit`` bytes; an unbuffered read may return less than asked for."""
    parts: list[bytes] = []
    left = limit
    while left is None or left > 0:
        part = stream.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
        if not part:
            break
        parts.append(part)
        left = None if left is None else left - len(part)
    return b"".join(parts)


def _telling(chunks: Iterable[Chunk], on_chunk: Callable[[], None]) -> Iterator[Chunk]:
    for chunk in chunks:
        on_chunk()
        yield chunk
