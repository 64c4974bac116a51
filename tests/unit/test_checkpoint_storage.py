"""Storage: names, URIs, links, retries. The suite in tests/conformance has what every storage does."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import fsspec
import pyarrow.fs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.checkpoint.storage import files, names
from raysgd.checkpoint.storage.files import Checksum
from raysgd.checkpoint.storage.names import check_name
from raysgd.checkpoint.storage.storage import Retry, Storage, is_transient
from raysgd.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    StorageError,
)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage.from_uri(tmp_path / "base")


class Flaky:
    """Fails with the given errors, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.mark.parametrize("uri", ["s3://bucket/runs?region=eu&endpoint=http://h:9/x", "s3://bucket/runs/?a=b", "s3://b"])
def test_name_has_no_options_of_the_uri(uri: str) -> None:
    runs = Storage(pyarrow.fs._MockFileSystem(), "bucket/runs", uri=uri)
    assert runs.name == "runs"
    assert runs.child("run_001").name == "run_001"


def test_reading_starts_over_after_a_transient_failure(tmp_path: Path) -> None:
    storage = Storage.from_uri(tmp_path, retry=retry()[0])
    storage.write_bytes("a.bin", b"abc")
    failures = [OSError(errno.EIO, "input/output")]

    def read(stream: BinaryIO) -> bytes:
        data = stream.read(1)
        if failures:
            raise failures.pop()
        return data + stream.read()

    assert storage.read_with("a.bin", read) == b"abc"


def test_empty_folder_is_no_files(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "source" / "empty").mkdir(parents=True)
    assert storage.put_path(tmp_path / "source", "files") == []


def test_sockets_and_links_to_folders_are_refused_as_user_files(tmp_path: Path) -> None:
    storage = Storage.from_uri(tmp_path / "base")
    with pytest.raises(CheckpointNotFoundError, match="nothing"):
        storage.put_path(tmp_path / "nothing", "x")
    source = tmp_path / "source"
    source.mkdir()
    (source / "link").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="link"):
        storage.put_path(source, "x")
    (source / "link").unlink()
    os.mkfifo(source / "fifo")
    with pytest.raises(CheckpointError, match="fifo"):
        storage.put_path(source, "x")


def test_uris_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for each in (tmp_path / "runs", str(tmp_path / "runs"), "~/runs", "runs", f"file://{tmp_path}/runs"):
        storage = Storage.from_uri(each)
        assert storage.is_local
        assert storage.uri == str(tmp_path / "runs")
        assert Storage.from_uri(storage.child("a").uri).uri == str(tmp_path / "runs" / "a")


def test_query_of_a_uri_stays_at_the_end() -> None:
    storage = Storage(pyarrow.fs._MockFileSystem(), "bucket/base", uri="s3://bucket/base?region=eu")
    assert not storage.is_local
    assert storage.child("a", "b").uri == "s3://bucket/base/a/b?region=eu"
    assert storage.child("a").path_of("x") == "s3://bucket/base/a/x"


def test_local_path_may_contain_a_question_mark(tmp_path: Path) -> None:
    child = Storage.from_uri(tmp_path / "what?").child("a")
    child.write_bytes("x", b"1")
    assert (tmp_path / "what?" / "a" / "x").exists()
    assert child.path_of("x") == str(tmp_path / "what?" / "a" / "x")


@pytest.mark.parametrize("uri", ["nosuch://bucket/x", "", "a\x00b"])
def test_invalid_paths_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError):
        Storage.from_uri(uri)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\n", "ä", "a" * 129, None, 3, b"a", "a b"])
def test_invalid_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="folder="):
        check_name(name, "folder")


@pytest.mark.parametrize("name", ["../a", "/a", "a/../b", "a//b", "a/", "a/.", "a\x00b", "a\\b", "a\nb", "x" * 256])
def test_names_outside_the_folder_are_refused(storage: Storage, name: str) -> None:
    for call in (storage.read_bytes, storage.open_input, storage.size, storage.exists, storage.delete_file):
        with pytest.raises(ConfigError):
            call(name)
    with pytest.raises(ConfigError):
        storage.write_bytes(name, b"")
    with pytest.raises(ConfigError):
        storage.child(name)


def test_link_in_place_of_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "a").symlink_to(tmp_path / "victim")
    Storage.from_uri(tmp_path / "base").write_bytes("a", b"new")
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert (tmp_path / "base" / "a").read_bytes() == b"new" and not (tmp_path / "base" / "a").is_symlink()


def test_links_are_not_followed_for_reading(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    base = tmp_path / "base"
    base.mkdir()
    (base / "file").symlink_to(tmp_path / "outside" / "secret")
    (base / "folder").symlink_to(tmp_path / "outside")
    storage = Storage.from_uri(base)
    for name in ("file", "folder/secret"):
        for call in (storage.read_bytes, storage.size, storage.open_input):
            with pytest.raises(CheckpointCorruptError, match="symbolic link"):
                call(name)


def test_links_are_not_followed_for_deleting(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"1")
    base = tmp_path / "base"
    (base / "ours").mkdir(parents=True)
    (base / "ours" / "marker").touch()
    (base / "ours" / "link").symlink_to(outside)
    (base / "linked").symlink_to(outside)
    storage = Storage.from_uri(base)
    storage.delete_tree("ours", "marker")
    assert not (base / "ours").exists()
    with pytest.raises(CheckpointCorruptError, match="symbolic link"):
        storage.delete_tree("linked", ".*")
    assert (outside / "precious").exists()


def test_fifo_does_not_block_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StorageError):
        Storage.from_uri(tmp_path).read_bytes("fifo")


def retry(tries: int = 4) -> tuple[Retry, list[float]]:
    waits: list[float] = []
    return Retry(tries=tries, sleep=waits.append), waits


def test_transient_errors_are_retried_with_growing_waits() -> None:
    policy, waits = retry(tries=9)
    flaky = Flaky(OSError("AWS Error SLOW_DOWN"), TimeoutError(), *[OSError(errno.EIO, "input/output")] * 6)
    assert policy.run("write", "s3://b/x", flaky) == "done"
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_error_after_all_retries_names_operation_path_tries_and_cause() -> None:
    policy, waits = retry(tries=3)
    flaky = Flaky(*[OSError("AWS Error SLOW_DOWN")] * 9)
    with pytest.raises(StorageError, match=r"write s3://b/x \(tried 3 times\): OSError: AWS Error SLOW_DOWN") as caught:
        policy.run("write", "s3://b/x", flaky)
    assert (caught.value.operation, caught.value.path, caught.value.tries) == ("write", "s3://b/x", 3)
    assert isinstance(caught.value.__cause__, OSError)
    assert len(waits) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_permanent_errors_are_raised_at_once(number: int) -> None:
    policy, waits = retry()
    with pytest.raises(StorageError, match="tried once"):
        policy.run("write", "x", Flaky(OSError(number, os.strerror(number))))
    assert waits == []


def test_s3_errors_that_waiting_does_not_cure_are_raised_at_once() -> None:
    refused = OSError(
        "When uploading part for key 'a' in bucket 'b': AWS Error ACCESS_DENIED during UploadPart operation"
    )
    slow = OSError("When uploading part for key 'a' in bucket 'b': AWS Error SLOW_DOWN during UploadPart operation")
    assert not is_transient(refused) and is_transient(slow)


def test_messages_do_not_show_the_key_of_a_uri() -> None:
    storage = Storage.from_uri("s3://key:secret@bucket/runs?region=us-east-1")
    assert storage.path_of("a") == "s3://***@bucket/runs/a" and "secret" not in repr(storage)
    assert storage.child("a").uri == "s3://key:secret@bucket/runs/a?region=us-east-1"


def test_other_exceptions_are_not_retried() -> None:
    policy, waits = retry()
    with pytest.raises(KeyError):
        policy.run("write", "x", Flaky(KeyError("x")))
    with pytest.raises(CheckpointCorruptError):
        policy.run("read", "x", Flaky(CheckpointCorruptError("x")))
    assert waits == []


class FlakyFiles(pyarrow.fs.FSSpecHandler):
    """An object store whose first uploads fail."""

    def __init__(self, failures: int) -> None:
        super().__init__(fsspec.filesystem("memory"))
        self.failures = failures

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise OSError("connection reset")
        return super().open_output_stream(path, metadata)


def test_write_to_an_object_store_is_retried(tmp_path: Path) -> None:
    policy, waits = retry()
    storage = Storage(pyarrow.fs.PyFileSystem(FlakyFiles(2)), f"flaky-{tmp_path.name}", retry=policy)
    opened: list[int] = []

    def chunks() -> Iterator[bytes]:
        opened.append(1)
        yield b"ab"
        yield b"c"

    assert storage.write_chunks("x", chunks)[:2] == (3, zlib.crc32(b"abc"))
    assert storage.read_bytes("x") == b"abc"
    assert len(waits) == 2


def test_checksum_works_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Callable[..., None]:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    data = b"x" * (2 << 20)
    with Checksum() as checksum:
        checksum.update(data)
        assert checksum.result().crc32 == zlib.crc32(data)


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_checksums_of_blocks_do_not_depend_on_the_chunks(chunks: list[bytes]) -> None:
    data = b"".join(chunks)
    with (
        mock.patch.object(names, "BLOCK_BYTES", 8),
        mock.patch.object(names, "_MAX_BLOCKS", 4),
        mock.patch.object(files, "BLOCK_BYTES", 8),
        Checksum() as checksum,
    ):
        for chunk in chunks:
            checksum.update(chunk)
        written, size = checksum.result(), names.block_size(len(data))
        assert (size & (size - 1), size >= 8, len(data) <= 4 * size) == (0, True, True)
        assert size == 8 or len(data) > 2 * size
        ends = range(size, len(data), size)
        assert written == (len(data), zlib.crc32(data), tuple(zlib.crc32(data[:end]) for end in ends))
