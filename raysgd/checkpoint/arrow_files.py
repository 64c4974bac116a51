"""Files of any ``pyarrow.fs`` file system: S3, GCS, Azure, HDFS, fsspec adapters, Arrow's mock.

``pyarrow`` is imported on first use, since a run on a local disk needs none of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, BinaryIO, cast, final

from raysgd.checkpoint.checksum import Checksum, Chunk
from raysgd.checkpoint.files import FileInfo, Files


def arrow_fs() -> Any:
    """The module ``pyarrow.fs``, which has no type stubs."""
    return importlib.import_module("pyarrow.fs")


def local_root(fs: Any, path: str) -> str | None:
    """The path on the local disk where ``fs`` is one (possibly a sub-tree of it), else None."""
    arrow = arrow_fs()
    while isinstance(fs, arrow.SubTreeFileSystem):
        path = f"{fs.base_path.rstrip('/')}/{path.lstrip('/')}"
        fs = fs.base_fs
    return path if isinstance(fs, arrow.LocalFileSystem) else None


@final
class ArrowFiles(Files):
    """Files below a path of a ``pyarrow.fs`` file system. Thread-safe, as those are.

    A put to an object store is atomic by itself: the object appears when its stream is closed.
    """

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self.root = root.rstrip("/")

    def write(self, name: str, chunks: Iterable[Chunk], *, atomic: bool) -> tuple[int, int]:
        with self._open_output(name) as stream, Checksum() as checksum:
            size = 0
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                checksum.update(view)
                stream.write(view)
                size += len(view)
            crc32 = checksum.result()
        return size, crc32

    def open_input(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self._fs.open_input_file(self._path(name)))

    def info(self, name: str) -> FileInfo | None:
        found = self._fs.get_file_info(self._path(name))
        if found.type == arrow_fs().FileType.NotFound:
            return None
        is_folder = found.type == arrow_fs().FileType.Directory
        return FileInfo(size=0 if is_folder else int(found.size), is_folder=is_folder)

    def list_names(self, name: str) -> list[str]:
        selector = arrow_fs().FileSelector(self._path(name), allow_not_found=True, recursive=False)
        return [found.base_name for found in self._fs.get_file_info(selector)]

    def make_dirs(self, name: str) -> None:
        self._fs.create_dir(self._path(name), recursive=True)

    def delete_file(self, name: str) -> None:
        self._fs.delete_file(self._path(name))

    def delete_dir(self, name: str) -> None:
        self._fs.delete_dir(self._path(name))

    def _open_output(self, name: str) -> Any:
        path = self._path(name)
        # compression=None: by default Arrow compresses what is named *.gz behind the writer's back.
        try:
            return self._fs.open_output_stream(path, compression=None)
        except FileNotFoundError:  # a file system with real folders
            self._fs.create_dir(path.rpartition("/")[0], recursive=True)
            return self._fs.open_output_stream(path, compression=None)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root
