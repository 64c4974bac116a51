"""The folder of a logger's files below the run's folder, which may be on an object store. Runs where the logger runs.

A local run folder is written to directly. For a URI of ``pyarrow.fs`` the files are written to a temporary folder. Changed
files are uploaded every half minute and at the end, always whole: object stores cannot append.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from raysgd.callbacks.base import Callback
from raysgd.result import Event

#: Seconds between two uploads; more if an upload takes long, so that uploads take a tenth of the time at most.
UPLOAD_EVERY_S = 30.0


def open_folder(run_dir: str, *parts: str) -> Folder:
    """Open the folder ``parts`` below ``run_dir``; make it if it does not exist."""
    parsed = urlparse(run_dir)
    if "://" not in run_dir:
        return Folder(Path(run_dir).expanduser().joinpath(*parts))
    if parsed.scheme == "file":
        return Folder(Path(unquote(parsed.path)).joinpath(*parts))
    return StoreFolder(below(run_dir, *parts))


class Folder:
    """A local folder, whose files are in place as soon as they are written.

    Attributes:
        path: The local folder to write files to.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path

    def fetch(self, name: str) -> None:
        """Copy a file that an earlier part of the same run left, if there is one, to ``path``."""

    def sync(self, *, force: bool = False) -> None:
        """Upload changed files, if an upload is due; cheap otherwise."""

    def close(self) -> None:
        """Upload changed files, then delete local copies."""


class StoreFolder(Folder):
    """A folder of an object store, written through a temporary local one."""

    def __init__(self, uri: str, clock: Callable[[], float] = time.monotonic) -> None:
        from pyarrow import fs

        self._uri = uri
        self._clock = clock
        self._store, self._root = fs.FileSystem.from_uri(uri)
        self._store.create_dir(self._root, recursive=True)
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._next_upload = clock() + UPLOAD_EVERY_S
        super().__init__(Path(tempfile.mkdtemp(prefix="raysgd-")))

    def fetch(self, name: str) -> None:
        from pyarrow import fs

        source = f"{self._root}/{name}"
        if self._store.get_file_info(source).type == fs.FileType.File:
            with self._store.open_input_stream(source) as remote, open(self.path / name, "wb") as local:
                shutil.copyfileobj(remote, local)
            self._uploaded[self.path / name] = _stamp(self.path / name)

    def sync(self, *, force: bool = False) -> None:
        begin = self._clock()
        if begin < self._next_upload and not force:
            return
        self._next_upload = begin + UPLOAD_EVERY_S  # also after a failure: do not retry with every result
        for file in sorted(self.path.rglob("*")):
            if file.is_file() and (stamp := _stamp(file)) != self._uploaded.get(file):
                self._upload(file)
                self._uploaded[file] = stamp
        end = self._clock()
        self._next_upload = end + max(UPLOAD_EVERY_S, 10 * (end - begin))

    def close(self) -> None:
        try:
            self.sync(force=True)
        except Exception as error:
            raise OSError(f"the files could not be uploaded to {self._uri}; they are kept in {self.path}.") from error
        shutil.rmtree(self.path, ignore_errors=True)

    def _upload(self, file: Path) -> None:
        target = f"{self._root}/{file.relative_to(self.path).as_posix()}"
        self._store.create_dir(target.rpartition("/")[0], recursive=True)
        sink: Any
        with open(file, "rb") as local, self._store.open_output_stream(target) as sink:
            shutil.copyfileobj(local, sink)


def _stamp(file: Path) -> tuple[int, int]:
    info = file.stat()
    return info.st_size, info.st_mtime_ns


class FileCallback(Callback):
    """Base of the loggers that write into a folder of the run, which their ``on_run_start`` opens."""

    runs_in = "controller"

    _folder: Folder | None = None
    _writer: Any = None  # what a logger closes before the folder, if anything

    def on_event(self, event: Event) -> None:
        if self._folder is not None:
            self._folder.sync()

    def on_run_end(self, error: BaseException | None) -> None:
        writer, folder = self._writer, self._folder
        self._writer = self._folder = None
        if writer is not None:
            writer.close()
        if folder is not None:
            folder.close()


def below(run_dir: str, *parts: str) -> str:
    """Return the path or URI of a folder below the run's folder; a URI's options after ``?`` stay at its end."""
    head, mark, options = _split(run_dir)
    return "/".join([head, *parts]) + mark + options


def parent_of(run_dir: str) -> str:
    """Return the folder that holds the run's folder, without a trailing slash and without a URI's options."""
    return _split(run_dir)[0].rpartition("/")[0]


def _split(run_dir: str) -> tuple[str, str, str]:
    head, mark, options = run_dir.partition("?") if "://" in run_dir else (run_dir, "", "")
    return head.rstrip("/"), mark, options
