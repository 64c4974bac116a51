"""The conformance suite for storage, over the local disk and file systems in the memory of the process."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pyarrow.fs

from raysgd.checkpoint.storage.storage import Storage
from raysgd.testing.storage_suite import StorageSuite


class TestLocalDisk(StorageSuite):
    def make_storage(self, tmp_path: Path) -> Storage:
        return Storage.from_uri(tmp_path / "base")


class TestSubTreeOfTheLocalDisk(StorageSuite):
    """Ray Tune gives a trial's folder like this; it is written as any local folder."""

    def make_storage(self, tmp_path: Path) -> Storage:
        return Storage(pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem()), "base")


class TestArrowFileSystem(StorageSuite):
    is_atomic = False
    is_picklable = False

    def make_storage(self, tmp_path: Path) -> Storage:
        return Storage(pyarrow.fs._MockFileSystem(), "bucket/base")


class TestFsspecFileSystem(StorageSuite):
    is_atomic = False
    is_picklable = False

    def make_storage(self, tmp_path: Path) -> Storage:
        handler = pyarrow.fs.FSSpecHandler(fsspec.filesystem("memory"))
        return Storage(pyarrow.fs.PyFileSystem(handler), f"base-{tmp_path.name}")
