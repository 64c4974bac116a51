"""Files on a local (or mounted) disk and on ``pyarrow.fs`` file systems, written with a checksum.

Local files survive a power cut, and a reader never sees half of one. They use plain ``os`` calls: ``pyarrow.fs`` has
neither fsync nor an atomic replace for local files, and a write must keep up with ``dd conv=fsync``. Symbolic links below
the root are refused: raysgd makes none, so someone else planted a link that appears there.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import importlib
import os
import queue
import secrets
import shutil
import stat
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast, final

from raysgd.checkpoint.storage.names import BLOCK_BYTES, block_size, num_blocks
from raysgd.errors import CheckpointCorruptError

Chunk: TypeAlias = "bytes | bytearray | memoryview"

CHUNK_BYTES = BLOCK_BYTES
_INLINE_BYTES = 1 << 20  # below this a thread costs more than it saves
_MAX_AHEAD = 4  # chunks by which the checksum may lag behind the writer
TEMPORARY_PREFIX = ".tmp-"


def chunks_of(stream: BinaryIO) -> Iterator[bytes]:
    """Read a stream to its end. An unbuffered stream may give shorter chunks."""
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


class Written(NamedTuple):
    """The size and checksums of a file that was written: the fields of a `FileEntry` but its name."""

    size: int
    crc32: int
    blocks: tuple[int, ...] = ()


class Checksum:
    """The crc32 of a stream and of its blocks, computed in a second thread while the stream is read or written.

    A crc of 512 MB takes about as long as handing the bytes to the kernel, so one after the other would halve the speed of
    a write. ``zlib.crc32`` and ``os.write`` both release the GIL. Used by one thread at a time; a chunk must not change
    until the `with` block ends.
    """

    def __init__(self) -> None:
        self._crc32 = 0
        self._size = 0
        self._ends: list[int] = []  # the crc32 at the end of each BLOCK_BYTES
        self._chunks: queue.Queue[Chunk | None] = queue.Queue(_MAX_AHEAD)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Checksum:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()

    def update(self, chunk: Chunk) -> None:
        if self._thread is None and (len(chunk) < _INLINE_BYTES or not self._start()):
            self._add(chunk)
        else:
            self._chunks.put(chunk)

    def pass_on(self, chunks: Iterable[Chunk], write: Callable[[memoryview], object]) -> None:
        """Give all chunks to ``write``."""
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            self.update(view)
            write(view)

    def result(self) -> Written:
        """Return the size and the checksums of all chunks so far; waits for the second thread."""
        self._finish()
        step = block_size(self._size) // BLOCK_BYTES
        ends = self._ends[step - 1 :: step][: max(0, num_blocks(self._size) - 1)]
        return Written(self._size, self._crc32, tuple(ends))

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="raysgd-crc32", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._add(chunk)

    def _add(self, chunk: Chunk) -> None:
        view = memoryview(chunk)
        while len(view):
            part = view[: BLOCK_BYTES - self._size % BLOCK_BYTES]
            self._crc32 = zlib.crc32(part, self._crc32)
            self._size += len(part)
            if self._size % BLOCK_BYTES == 0:
                self._ends.append(self._crc32)
            view = view[len(part) :]

    def _finish(self) -> None:
        if self._thread is not None:
            self._chunks.put(None)
            self._thread.join()
            self._thread = None


class FileInfo(NamedTuple):
    """A file or folder that exists: its size in bytes, which is 0 for a folder."""

    size: int
    is_folder: bool


class Files(abc.ABC):
    """Files and folders below one root.

    `Storage` calls these from any thread; an implementation keeps no state between calls. Names are relative to the
    root, with ``/`` between components, and the caller has checked them; ``""`` is the root. A failure raises
    ``OSError``, and ``FileNotFoundError`` if nothing of that name exists. No call retries.
    """

    root: str

    @abc.abstractmethod
    def write(self, name: str, chunks: Iterable[Chunk]) -> Written:
        """Write or replace a file and return its size and checksums.

        When it returns, the bytes are as durable as the file system can make them. A reader sees the old file or the new
        one, never a part of it. A write that fails leaves the old file, or none. Missing folders are made.
        """

    @abc.abstractmethod
    def open_input(self, name: str) -> BinaryIO:
        """Open for reading; the caller closes it."""

    @abc.abstractmethod
    def info(self, name: str) -> FileInfo | None:
        """Return what has that name, or None."""

    @abc.abstractmethod
    def list_names(self, name: str) -> list[str]:
        """Return the names directly in a folder, unsorted; empty if there is no such folder."""

    @abc.abstractmethod
    def list_folders(self, name: str) -> list[str]:
        """Return those of `list_names` that are folders, and no symbolic links."""

    @abc.abstractmethod
    def make_dirs(self, name: str) -> None:
        """Make a folder and its parents, unless they exist."""

    @abc.abstractmethod
    def delete_file(self, name: str) -> None:
        """Delete a file; FileNotFoundError if it does not exist."""

    @abc.abstractmethod
    def delete_dir(self, name: str) -> None:
        """Delete a folder and all in it, without following symbolic links."""


@final
class LocalFiles(Files):
    """Files below a folder of the local disk. Thread-safe."""

    def __init__(self, root: str) -> None:
        self.root = root

    def write(self, name: str, chunks: Iterable[Chunk]) -> Written:
        path = self._path(name)
        folder = os.path.dirname(path)
        _make_dirs(folder)
        # Write to a temporary name and rename: a process that is cut off must not truncate a file that another finished.
        temporary = os.path.join(folder, f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
        try:
            written = _write_file(temporary, chunks)
            os.replace(temporary, path)
        except BaseException:  # also AttemptEnded: remove the temporary file
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_folder(folder)
        return written

    def open_input(self, name: str) -> BinaryIO:
        path = self._path(name)
        try:
            # O_NONBLOCK: opening a fifo of that name must not block; it has no effect on a file.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _link(path) from error
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise IsADirectoryError(errno.EISDIR, "not a regular file", path)
        return os.fdopen(descriptor, "rb", buffering=0)

    def info(self, name: str) -> FileInfo | None:
        path = self._path(name)
        try:
            found = os.lstat(path) if name else os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISLNK(found.st_mode):
            raise _link(path)
        is_folder = stat.S_ISDIR(found.st_mode)
        return FileInfo(size=0 if is_folder else found.st_size, is_folder=is_folder)

    def list_names(self, name: str) -> list[str]:
        try:
            return os.listdir(self._path(name))
        except FileNotFoundError:
            return []

    def list_folders(self, name: str) -> list[str]:
        try:
            with os.scandir(self._path(name)) as found:
                return [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def make_dirs(self, name: str) -> None:
        _make_dirs(self._path(name))

    def delete_file(self, name: str) -> None:
        os.unlink(self._path(name))

    def delete_dir(self, name: str) -> None:
        shutil.rmtree(self._path(name))  # refuses a link at the top and unlinks, never enters, those below

    def _path(self, name: str) -> str:
        """Return the path of ``name``; refuse links among the folders from the root to it."""
        path = self.root
        *folders, last = name.split("/")
        for folder in folders:
            path = os.path.join(path, folder)
            if os.path.islink(path):
                raise _link(path)
        return os.path.join(path, last) if last else path


def _write_file(path: str, chunks: Iterable[Chunk]) -> Written:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def write(view: memoryview) -> None:
        while len(view):  # a write may be short: a full disk, a signal, the 2 GiB limit
            view = view[os.write(descriptor, view) :]

    try:
        with Checksum() as checksum:
            checksum.pass_on(chunks, write)
            os.fsync(descriptor)  # while the second thread finishes the checksum
            return checksum.result()
    finally:
        os.close(descriptor)


def _make_dirs(path: str) -> None:
    """``os.makedirs`` whose new entries survive a power cut."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        _make_dirs(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    if not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    _sync_folder(parent)


def _sync_folder(path: str) -> None:
    """Make renames and new entries durable. Some network and overlay file systems cannot, which is not an error."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(descriptor)


def _link(path: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{path} is a symbolic link, which raysgd does not follow: put the file or folder itself there"
    )


def arrow_fs() -> Any:
    """Import ``pyarrow.fs``, which has no type stubs."""
    return importlib.import_module("pyarrow.fs")


def local_root(fs: Any, path: str) -> str | None:
    """Return the path on the local disk if ``fs`` is local (or a sub-tree of a local one), else None."""
    arrow = arrow_fs()
    while isinstance(fs, arrow.SubTreeFileSystem):
        path = f"{fs.base_path.rstrip('/')}/{path.lstrip('/')}"
        fs = fs.base_fs
    return path if isinstance(fs, arrow.LocalFileSystem) else None


@final
class ArrowFiles(Files):
    """Files below a path of a ``pyarrow.fs`` file system: S3, GCS, Azure, HDFS, fsspec adapters. Thread-safe.

    A put to an object store is always atomic: the object appears when its stream is closed. pyarrow cannot abort a stream,
    so a write that is interrupted deletes what it has put, and with it the file that was there before.
    """

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self.root = root.rstrip("/")

    def write(self, name: str, chunks: Iterable[Chunk]) -> Written:
        stream = self._open_output(name)
        with Checksum() as checksum:
            try:
                checksum.pass_on(chunks, stream.write)
            except BaseException:  # also AttemptEnded
                with contextlib.suppress(OSError, ValueError):
                    stream.close()  # fails if a put has failed; the object is then as it was
                    self.delete_file(name)
                raise
            stream.close()
            return checksum.result()

    def open_input(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self._fs.open_input_file(self._path(name)))

    def info(self, name: str) -> FileInfo | None:
        found = self._fs.get_file_info(self._path(name))
        if found.type == arrow_fs().FileType.NotFound:
            return None
        is_folder = found.type == arrow_fs().FileType.Directory
        return FileInfo(size=0 if is_folder else int(found.size), is_folder=is_folder)

    def list_names(self, name: str) -> list[str]:
        return [found.base_name for found in self._list(name)]

    def list_folders(self, name: str) -> list[str]:
        return [found.base_name for found in self._list(name) if found.type == arrow_fs().FileType.Directory]

    def make_dirs(self, name: str) -> None:
        self._fs.create_dir(self._path(name), recursive=True)

    def delete_file(self, name: str) -> None:
        self._fs.delete_file(self._path(name))

    def delete_dir(self, name: str) -> None:
        self._fs.delete_dir(self._path(name))

    def _list(self, name: str) -> list[Any]:
        selector = arrow_fs().FileSelector(self._path(name), allow_not_found=True, recursive=False)
        return list(self._fs.get_file_info(selector))

    def _open_output(self, name: str) -> Any:
        path = self._path(name)
        # compression=None: by default Arrow compresses files that are named *.gz.
        try:
            return self._fs.open_output_stream(path, compression=None)
        except FileNotFoundError:  # a file system with real folders
            self._fs.create_dir(path.rpartition("/")[0], recursive=True)
            return self._fs.open_output_stream(path, compression=None)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root
