"""Files on a local (or mounted) disk, written so that they survive a power cut and a reader never sees half of one.

Plain ``os`` calls rather than ``pyarrow.fs``: Arrow's local files have neither fsync nor rename-over, and a write must
keep up with ``dd conv=fsync``. Symbolic links below the root are refused: a checkpoint holds none, so one that appears
there was planted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from typing import BinaryIO, final

from raysgd.checkpoint.checksum import Checksum, Chunk
from raysgd.checkpoint.files import FileInfo, Files
from raysgd.errors import CheckpointCorruptError

TEMPORARY_PREFIX = ".tmp-"


@final
class LocalFiles(Files):
    """Files below a folder of the local disk. Thread-safe."""

    def __init__(self, root: str) -> None:
        self.root = root

    def write(self, name: str, chunks: Iterable[Chunk], *, atomic: bool) -> tuple[int, int]:
        path = self._path(name)
        folder = os.path.dirname(path)
        _make_dirs(folder)
        # Written aside and renamed: a process that was cut off must not truncate what another has finished since.
        target = os.path.join(folder, f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}") if atomic else path
        try:
            written = _write_file(target, chunks, exclusive=atomic)
            if atomic:
                os.replace(target, path)
        except BaseException:  # AttemptEnded as well: leave no remains behind
            if atomic:
                with contextlib.suppress(OSError):
                    os.unlink(target)
            raise
        _sync_folder(folder)
        return written

    def open_input(self, name: str) -> BinaryIO:
        path = self._path(name)
        try:
            # O_NONBLOCK: a fifo under that name must not hang us; it does nothing to a file.
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

    def make_dirs(self, name: str) -> None:
        _make_dirs(self._path(name))

    def delete_file(self, name: str) -> None:
        os.unlink(self._path(name))

    def delete_dir(self, name: str) -> None:
        shutil.rmtree(self._path(name))  # refuses a link at the top and unlinks, never enters, those below

    def _path(self, name: str) -> str:
        """The path of ``name``; no folder on the way from the root may be a link."""
        path = self.root
        *folders, last = name.split("/")
        for folder in folders:
            path = os.path.join(path, folder)
            if os.path.islink(path):
                raise _link(path)
        return os.path.join(path, last) if last else path


def _write_file(path: str, chunks: Iterable[Chunk], *, exclusive: bool) -> tuple[int, int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_EXCL if exclusive else os.O_TRUNC)
    descriptor = os.open(path, flags, 0o666)
    try:
        with Checksum() as checksum:
            size = 0
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                checksum.update(view)
                _write_all(descriptor, view)
                size += len(view)
            os.fsync(descriptor)
            return size, checksum.result()
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, view: memoryview) -> None:
    while len(view):  # a write may be short: a full disk, a signal, the 2 GiB limit
        view = view[os.write(descriptor, view) :]


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
    """Make renames and new entries durable. Some network and overlay file systems cannot: no failure of ours."""
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
    return CheckpointCorruptError(f"{path} is a symbolic link; a checkpoint holds none, so it is not followed")
