"""`Storage`: a folder on local disk or in any ``pyarrow.fs`` file system, with retries and errors that say what failed.

Used by the writer threads of workers, by the control plane (manifests, retention) and by drivers that load checkpoints.
Knows nothing of checkpoints, whose layout is in `raysgd.checkpoint.store`.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, final
from urllib.parse import quote

from raysgd._util.redact import redact_uri
from raysgd.checkpoint.storage.files import (
    ArrowFiles,
    Checksum,
    Chunk,
    FileInfo,
    Files,
    LocalFiles,
    Written,
    arrow_fs,
    chunks_of,
    local_root,
)
from raysgd.checkpoint.storage.names import FileEntry, check_name, check_relative_path
from raysgd.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    RaySGDError,
    StorageError,
)

T = TypeVar("T")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# Errors that waiting does not cure: a full or read-only disk, missing permissions, a path of the wrong kind.
_PERMANENT = {
    getattr(errno, name)
    for name in (
        "ENOSPC EDQUOT EFBIG EROFS EACCES EPERM ENOENT ENOTDIR EISDIR EEXIST ENOTEMPTY ENAMETOOLONG ELOOP EINVAL EXDEV"
    ).split()
}
# The same for S3, whose errors pyarrow raises as an OSError without a number.
_PERMANENT_ON_S3 = re.compile(
    r"\bAWS Error (ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|SIGNATURE_DOES_NOT_MATCH)\b"
)

#: Seconds of the wait after the first failure. Each further wait is twice as long, up to the maximum.
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0


@dataclass(frozen=True)
class Retry:
    """How often an operation is tried that fails for a transient reason.

    Attributes:
        tries: Calls in all, including the first.
        sleep: Waits that many seconds; tests replace it.
    """

    tries: int = 5
    sleep: Callable[[float], object] = time.sleep

    def run(self, operation: str, path: str, function: Callable[[], T]) -> T:
        """Call ``function`` until it succeeds.

        Args:
            operation: A verb for the message, such as ``write``.
            path: What it works on, for the message.
            function: Must be able to start over.

        Raises:
            CheckpointNotFoundError: ``path`` does not exist.
            StorageError: It failed for a permanent reason, or in all tries.
        """
        delay_s = _FIRST_DELAY_S
        for attempt in range(1, self.tries + 1):
            try:
                return function()
            except RaySGDError:  # says what happened, and would be raised again
                raise
            except FileNotFoundError as error:
                raise CheckpointNotFoundError(f"could not {operation} {path}: it does not exist") from error
            except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
                if attempt == self.tries or not is_transient(error):
                    raise _storage_error(operation, path, attempt, error) from error
            self.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
        raise AssertionError("unreachable: the last try returns or raises")


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    if not isinstance(error, OSError) or isinstance(error, PermissionError):
        return False
    return error.errno not in _PERMANENT and _PERMANENT_ON_S3.search(str(error)) is None


def _storage_error(operation: str, path: str, tries: int, error: Exception) -> StorageError:
    often = "once" if tries == 1 else f"{tries} times"
    text = f"could not {operation} {path} (tried {often}): {type(error).__name__}: {error}"
    return StorageError(text, operation=operation, path=path, tries=tries)


#: Outlasts a storage outage of a minute: retries after 0.1, 0.3, 0.7, 1.5, 3.1 and 6.3 s, and then every 5 s.
PATIENT = Retry(tries=18)


def retry_of_writes(on_write_error: str) -> Retry:
    """Return the retries of checkpoint writes: patient where a failed write ends the run, short where the run continues."""
    return PATIENT if on_write_error == "raise" else Retry()


@final
class Storage:
    """A folder on any file system. Thread-safe and picklable.

    Names are relative to the folder, with ``/`` between components, and are checked: none leads out of the folder.
    Operations that fail for a transient reason are retried.
    """

    def __init__(self, fs: Any, base_path: str, *, uri: str | None = None, retry: Retry | None = None) -> None:
        """
        Args:
            fs: A ``pyarrow.fs`` file system; None: the local disk.
            base_path: The folder in it.
            uri: URI from which `from_uri` makes this storage, where the file system does not reveal it.
            retry: How transient failures are retried.
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
        """Open the folder at a path (also a relative one, or with ``~``) or at a URI that ``pyarrow.fs`` understands.

        Raises:
            ConfigError: No file system is known for the URI.
        """
        text = os.fspath(path_or_uri)
        if not text or "\x00" in text:
            raise ConfigError(f"{path_or_uri!r} is not a path: give a path or a URI such as s3://bucket/folder.")
        if not _SCHEME.match(text):
            return cls(None, os.path.expanduser(text), retry=retry)
        try:
            fs, path = arrow_fs().FileSystem.from_uri(text)
        except (ValueError, OSError, NotImplementedError) as error:
            raise ConfigError(f"{text!r} cannot be opened ({error}): give a path or a URI of pyarrow.fs.") from error
        return cls(fs, path, uri=text, retry=retry)

    def __repr__(self) -> str:
        return f"Storage({redact_uri(self.uri)!r})"

    def is_on(self, other: Storage) -> bool:
        """Whether both folders are on the same file system, opened with the same options."""
        if self._fs is None or other._fs is None:
            return self._fs is other._fs
        return bool(self._fs.equals(other._fs))

    @property
    def name(self) -> str:
        """The last component of the folder's path, without the options of its URI."""
        return self._files.root.rstrip("/").rpartition("/")[2]

    def child(self, *components: str) -> Storage:
        """Return a folder below this one; it need not exist."""
        for component in components:
            check_name(component, "folder")
        return self.below("/".join(components))

    def below(self, path: str) -> Storage:
        """Return a folder below this one by its relative path, whose names need not be such as raysgd gives.

        Raises:
            ConfigError: The path leads out of this folder, or has a name that no folder can have.
        """
        check_relative_path(path, "folder")
        head, mark, query = self.uri.partition("?") if not self.is_local else (self.uri, "", "")
        name = path if self.is_local else quote(path, safe="/=+,:@")
        uri = f"{head.rstrip('/')}/{name}{mark}{query}"
        return Storage(self._fs, f"{self._files.root}/{path}", uri=uri, retry=self._retry)

    def parent(self) -> Storage:
        """Return the folder that this one is in."""
        head, mark, query = self.uri.partition("?") if not self.is_local else (self.uri, "", "")
        uri = head.rstrip("/").rpartition("/")[0] + mark + query
        return Storage(self._fs, self._files.root.rstrip("/").rpartition("/")[0] or "/", uri=uri, retry=self._retry)

    def with_retry(self, retry: Retry) -> Storage:
        """Return the same folder with other retries."""
        return Storage(self._fs, self._files.root, uri=self.uri, retry=retry)

    def with_progress(self, on_chunk: Callable[[], None]) -> Storage:
        """Return the same folder; it calls ``on_chunk`` before each try to write a file and before each chunk of it."""
        folder = copy.copy(self)
        folder._on_chunk = on_chunk
        return folder

    def path_of(self, name: str) -> str:
        """Return the path or URI of a file, or of the folder for ``""``; for local readers, and for messages without secrets."""
        folder = self.uri if self.is_local else redact_uri(self.uri.partition("?")[0])
        return f"{folder.rstrip('/')}/{name}" if name else folder

    # -- files -------------------------------------------------------------------------------------------

    def write_bytes(self, name: str, data: Chunk) -> Written:
        """Write a file durably, and return its size and checksums. A reader sees the old file or the new one."""
        return self.write_chunks(name, lambda: (data,))

    def write_chunks(self, name: str, chunks: Callable[[], Iterable[Chunk]]) -> Written:
        """Write a file from chunks; otherwise like `write_bytes`.

        Args:
            name: The file's name.
            chunks: Returns the chunks from the start; called again for each retry. A chunk must not change during the call.
        """
        return self._run("write", name, lambda name: self._files.write(name, self._with_progress(chunks())))

    def read_bytes(self, name: str, max_bytes: int | None = None) -> bytes:
        """Read a file; CheckpointCorruptError if it is larger than ``max_bytes``."""

        def read(stream: BinaryIO) -> bytes:
            parts: list[bytes] = []
            size = 0
            for part in chunks_of(stream):
                parts.append(part)
                size += len(part)
                if max_bytes is not None and size > max_bytes:
                    raise CheckpointCorruptError(f"{self.path_of(name)} is larger than the allowed {max_bytes:,} bytes")
            return b"".join(parts)

        return self.read_with(name, read)

    def read_with(self, name: str, function: Callable[[BinaryIO], T]) -> T:
        """Call ``function`` with the opened file and return its result; it is called again after a transient failure."""

        def read(name: str) -> T:
            with self._files.open_input(name) as stream:
                return function(stream)

        return self._run("read", name, read)

    def open_input(self, name: str) -> BinaryIO:
        """Open a file for reading; the caller closes it."""
        return self._run("open", name, self._files.open_input)

    def exists(self, name: str = "") -> bool:
        """Whether a file or folder of that name exists; without a name, whether this folder does."""
        return self._info(name) is not None

    def is_folder(self, name: str) -> bool:
        found = self._info(name)
        return found is not None and found.is_folder

    def size(self, name: str) -> int:
        """Return the bytes of a file; CheckpointNotFoundError if it does not exist."""
        found = self._info(name)
        if found is None or found.is_folder:
            raise CheckpointNotFoundError(f"there is no file {self.path_of(name)}")
        return found.size

    def delete_file(self, name: str) -> None:
        """Delete a file if it exists."""
        if self.exists(name):
            self._run("delete", name, self._files.delete_file)

    # -- folders -----------------------------------------------------------------------------------------

    def list_names(self, name: str = "") -> list[str]:
        """Return the sorted names in this folder, or in one below it; empty if the folder does not exist."""
        return sorted(self._run("list", name, self._files.list_names))

    def list_folders(self) -> list[Storage]:
        """Return the folders in this folder, sorted by name. Symbolic links are left out, and names that are not text."""
        found = []
        for name in sorted(self._run("list", "", self._files.list_folders)):
            with contextlib.suppress(ConfigError):
                found.append(self.below(name))
        return found

    def make_dirs(self) -> None:
        """Make this folder. Writing a file makes it too; this is for callers that want to fail early."""
        self._run("make", "", self._files.make_dirs)

    def delete_tree(self, name: str, marker: str) -> None:
        """Delete a folder below this one if raysgd made it. Symbolic links are never followed.

        Args:
            name: Its relative path.
            marker: Regular expression; raysgd made the folder if it is empty or if one of its names matches fully.
        """
        check_relative_path(name, "folder")
        if not self.is_folder(name):
            return
        names = self.list_names(name)
        if not names or any(re.fullmatch(marker, found) for found in names):
            self._run("delete", name, self._files.delete_dir)

    def put_path(self, local_path: str | os.PathLike[str], name: str) -> list[FileEntry]:
        """Copy a local file, or all files of a local folder, to the folder ``name`` here.

        Links to files are followed, since the user made them. Links to folders, sockets and the like are refused. An empty
        folder is an empty list; empty folders in it are not kept.

        Returns:
            The copied files; their names are relative to this storage.

        Raises:
            CheckpointNotFoundError: ``local_path`` does not exist.
            CheckpointError: It holds something that is neither a file nor a folder.
        """
        check_name(name, "folder")
        source = os.path.abspath(os.path.expanduser(os.fspath(local_path)))
        if not os.path.exists(source):
            raise CheckpointNotFoundError(f"save_checkpoint(files=True): {source} does not exist")
        found = sorted(_walk(source)) if os.path.isdir(source) else [(os.path.basename(source), source)]
        return [self._put_file(path, f"{name}/{check_relative_path(relative, 'file')}") for relative, path in found]

    def fetch_tree(self, entries: Sequence[FileEntry], local_dir: str) -> None:
        """Copy files to a local folder under their relative names.

        Raises:
            CheckpointCorruptError: A file does not have the listed size or checksum.
        """
        for entry in entries:
            check_relative_path(entry.name, "file")
            target = os.path.join(local_dir, entry.name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if self.read_with(entry.name, functools.partial(_copy_to, target))[:2] != (entry.size, entry.crc32):
                raise CheckpointCorruptError(f"{self.path_of(entry.name)} does not match its manifest (size or crc32)")

    # -- private -----------------------------------------------------------------------------------------

    def _run(self, operation: str, name: str, function: Callable[[str], T]) -> T:
        if name:
            check_relative_path(name, "file")
        return self._retry.run(operation, self.path_of(name), lambda: function(name))

    def _info(self, name: str) -> FileInfo | None:
        return self._run("look for", name, self._files.info)

    def _with_progress(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        if self._on_chunk is None:
            return chunks
        self._on_chunk()
        return _report_chunks(chunks, self._on_chunk)

    def _put_file(self, path: str, name: str) -> FileEntry:
        size, crc32, _ = self.write_chunks(name, lambda: read_chunks(path))  # these files are only read whole
        return FileEntry(name, size, crc32)


def read_chunks(path: str) -> Iterator[bytes]:
    """Read a local file in chunks. Each is a buffer of its own, since the checksum thread lags behind."""
    with open(path, "rb", buffering=0) as stream:
        yield from chunks_of(stream)


def _report_chunks(chunks: Iterable[Chunk], on_chunk: Callable[[], None]) -> Iterator[Chunk]:
    for chunk in chunks:
        on_chunk()
        yield chunk


def _walk(folder: str) -> Iterator[tuple[str, str]]:
    """Yield (relative name, path) of each file below ``folder``."""
    for here, folders, files in os.walk(folder, onerror=_raise):
        for name in folders + files:
            path = os.path.join(here, name)
            if os.path.isfile(path):
                yield os.path.relpath(path, folder), path
            elif not os.path.isdir(path) or os.path.islink(path):
                raise CheckpointError(
                    f"save_checkpoint(files=True): {path} is neither a file nor a real folder: leave it out"
                )


def _raise(error: OSError) -> None:
    raise error


def _copy_to(target: str, stream: BinaryIO) -> Written:
    with open(target, "wb") as out, Checksum() as checksum:
        checksum.pass_on(chunks_of(stream), out.write)
        return checksum.result()
