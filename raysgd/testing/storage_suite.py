"""A conformance suite for storage: what checkpoints rely on. Needs pytest, and no Ray.

In a test module of your own, for a file system that your cluster mounts or an object store::

    class TestMyStorage(StorageSuite):
        def make_storage(self, tmp_path: Path) -> Storage:
            return Storage.from_uri(f"s3://my-bucket/suite/{tmp_path.name}")

Each test gets a folder of its own that does not exist yet. The suite does not remove what it wrote.
"""

from __future__ import annotations

import gzip
import os
import pickle
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from raysgd.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from raysgd.checkpoint.storage.files import Chunk
from raysgd.checkpoint.storage.names import BLOCK_BYTES, FileEntry
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, part_prefix
from raysgd.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError

NUM_WRITERS = 4
#: File names that a shell, a URI or an object store may take for something else.
ODD_NAMES = [
    "größe 1.txt",
    "a b#c?d=e&f%20.bin",
    "+plus;semi,comma.bin",
    "~tilde'quote\"[x]{y}.bin",
    "-dash",
    ".hidden",
    "model.tar.gz",
    "n" * 200,
    "deep/er/x",
]


class StorageSuite:
    """Subclass it as ``Test...`` with `make_storage`; pytest runs its tests."""

    #: Whether a reader sees no part of a file while it is written, as `raysgd.checkpoint.storage.files.Files` requires. Give
    #: False only for a stand-in of an object store: a process that dies while it writes leaves a part of a file there.
    is_atomic: ClassVar[bool] = True
    #: Whether the storage can be sent to another process.
    is_picklable: ClassVar[bool] = True

    def make_storage(self, tmp_path: Path) -> Storage:
        """Return a folder that does not exist yet, another one for each ``tmp_path``."""
        raise NotImplementedError

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return self.make_storage(tmp_path)

    # -- files --------------------------------------------------------------------------------------------------------

    def test_written_file_is_read(self, storage: Storage) -> None:
        assert storage.write_bytes("a.bin", b"hello") == (5, zlib.crc32(b"hello"), ())
        assert storage.read_bytes("a.bin") == b"hello"
        assert storage.read_with("a.bin", lambda stream: stream.read(2)) == b"he"
        assert storage.size("a.bin") == 5
        assert storage.exists("a.bin") and not storage.is_folder("a.bin")
        assert not storage.exists("b.bin")

    def test_file_can_be_read_from_any_position(self, storage: Storage) -> None:
        """Ranks that load shards of another world size read parts of files."""
        storage.write_bytes("a.bin", bytes(range(200)))
        with storage.open_input("a.bin") as stream:
            for start in (150, 3, 0):
                stream.seek(start)
                assert stream.read(5) == bytes(range(start, start + 5))

    def test_chunks_of_any_kind_become_one_file(self, storage: Storage) -> None:
        chunks: list[Chunk] = [b"ab", memoryview(b"cd"), b"", bytearray(b"e")]
        assert storage.write_chunks("a.bin", lambda: chunks)[:2] == (5, zlib.crc32(b"abcde"))
        assert storage.read_bytes("a.bin") == b"abcde"

    def test_file_may_be_empty(self, storage: Storage) -> None:
        assert storage.write_chunks("a.bin", list) == (0, 0, ())
        assert storage.read_bytes("a.bin") == b"" and storage.size("a.bin") == 0

    def test_large_file_has_checksums_of_its_blocks(self, storage: Storage) -> None:
        data = memoryview(os.urandom(2 * BLOCK_BYTES + 3))
        step = BLOCK_BYTES // 3
        chunks = [data[start : start + step] for start in range(0, len(data), step)]
        written = storage.write_chunks("a.bin", lambda: chunks)
        ends = tuple(zlib.crc32(data[:end]) for end in (BLOCK_BYTES, 2 * BLOCK_BYTES))
        assert written == (len(data), zlib.crc32(data), ends)
        assert storage.read_bytes("a.bin") == data

    def test_compressed_file_is_kept_as_it_is(self, storage: Storage) -> None:
        data = gzip.compress(b"text")
        storage.write_bytes("a.gz", data)
        assert storage.read_bytes("a.gz") == data

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_users_file_may_have_an_odd_name(self, storage: Storage, name: str) -> None:
        storage.write_bytes(f"files/{name}", b"1")
        storage.write_bytes("files/other", b"2")
        assert storage.read_bytes(f"files/{name}") == b"1"
        folder, _, last = f"files/{name}".rpartition("/")
        assert last in storage.list_names(folder)
        storage.delete_tree("files", "other")
        assert not storage.exists(f"files/{name}")

    def test_written_file_replaces_the_one_before(self, storage: Storage) -> None:
        storage.write_bytes("a.bin", b"old and longer")
        storage.write_bytes("a.bin", b"new")
        assert storage.read_bytes("a.bin") == b"new" and storage.size("a.bin") == 3

    def test_reader_sees_the_old_file_until_the_new_one_is_complete(self, storage: Storage) -> None:
        if not self.is_atomic:
            pytest.skip("this storage shows files while they are written")
        storage.write_bytes("a.bin", b"old")
        seen = []

        def chunks() -> Iterator[bytes]:
            for part in (b"n", b"e", b"w"):
                seen.append((storage.read_bytes("a.bin"), storage.exists("b.bin")))
                yield part

        storage.write_chunks("a.bin", chunks)
        storage.write_chunks("b.bin", chunks)
        assert seen == [(b"old", False)] * 3 + [(b"new", False)] * 3
        assert storage.read_bytes("a.bin") == storage.read_bytes("b.bin") == b"new"
        assert storage.list_names() == ["a.bin", "b.bin"]

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_interrupted_write_leaves_no_part_of_a_file(self, storage: Storage, error: type[BaseException]) -> None:
        def chunks() -> Iterator[bytes]:
            yield b"x" * (2 << 20)
            raise error

        if self.is_atomic:
            storage.write_bytes("old.bin", b"old")
        for name in ("new.bin", "old.bin"):
            with pytest.raises((error, StorageError)):
                storage.write_chunks(name, chunks)
        assert not storage.exists("new.bin")
        assert not storage.exists("old.bin") or storage.read_bytes("old.bin") == b"old"
        assert storage.list_names() in ([], ["old.bin"])

    def test_file_of_concurrent_writers_is_that_of_one_of_them(self, storage: Storage) -> None:
        contents = [bytes([65 + writer]) * (1 << 16) for writer in range(NUM_WRITERS)]
        barrier = threading.Barrier(NUM_WRITERS)

        def write(writer: int) -> None:
            barrier.wait()
            storage.write_bytes("same.bin", contents[writer])
            storage.write_bytes(f"own-{writer}.bin", contents[writer])

        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            list(pool.map(write, range(NUM_WRITERS)))
        assert storage.read_bytes("same.bin") in contents
        assert [storage.read_bytes(f"own-{writer}.bin") for writer in range(NUM_WRITERS)] == contents
        assert len(storage.list_names()) == NUM_WRITERS + 1

    # -- folders ------------------------------------------------------------------------------------------------------

    def test_folder_lists_what_is_directly_in_it(self, storage: Storage) -> None:
        assert storage.list_names() == [] and not storage.exists()
        storage.child("one", "two").write_bytes("file", b"1")
        storage.write_bytes("b", b"")
        storage.write_bytes("a", b"")
        assert storage.list_names() == ["a", "b", "one"]
        assert storage.list_names("one") == ["two"] and storage.list_names("missing") == []
        assert storage.exists() and storage.is_folder("one") and not storage.is_folder("a")

    def test_folder_has_a_name_and_a_parent(self, storage: Storage) -> None:
        child = storage.child("run_001")
        child.write_bytes("a", b"1")
        assert child.name == "run_001"
        assert child.parent().read_bytes("run_001/a") == b"1"
        assert child.is_on(storage)

    def test_folder_can_be_made_before_it_is_written_to(self, storage: Storage) -> None:
        for _ in range(2):
            storage.make_dirs()
        assert storage.list_names() == []

    def test_folder_is_deleted_with_all_in_it(self, storage: Storage) -> None:
        folder = storage.child("one")
        for name in ("marker", "a", "deep/er/b"):
            folder.write_bytes(name, b"1")
        storage.write_bytes("one-more", b"1")
        storage.delete_tree("one", "something_else")
        assert folder.exists("deep/er/b"), "the folder has no name that matches the marker"
        storage.delete_tree("one", "marker")
        assert storage.list_names() == ["one-more"] and not folder.exists() and not folder.exists("deep/er/b")
        storage.delete_tree("one", ".*")

    def test_file_can_be_deleted_twice(self, storage: Storage) -> None:
        storage.write_bytes("a", b"1")
        storage.write_bytes("b", b"1")
        for _ in range(2):
            storage.delete_file("a")
        assert storage.list_names() == ["b"]

    def test_users_files_come_back(self, storage: Storage, tmp_path: Path) -> None:
        source = tmp_path / "source"
        (source / "deep" / "er").mkdir(parents=True)
        (source / "empty").mkdir()
        (source / "model.bin").write_bytes(b"m" * 10)
        (source / "deep" / "er" / "größe 1.txt").write_text("x")
        (source / "link.bin").symlink_to(source / "model.bin")
        entries = storage.put_path(source, "a0001-r00000")
        names = [entry.name for entry in entries]
        assert names == [f"a0001-r00000/{name}" for name in ("deep/er/größe 1.txt", "link.bin", "model.bin")]
        storage.fetch_tree(entries, str(tmp_path / "back"))
        back = tmp_path / "back" / "a0001-r00000"
        assert (back / "deep" / "er" / "größe 1.txt").read_text() == "x"
        assert (back / "link.bin").read_bytes() == b"m" * 10 and not (back / "link.bin").is_symlink()

    def test_single_file_of_a_user_keeps_its_name(self, storage: Storage, tmp_path: Path) -> None:
        (tmp_path / "model.pt").write_bytes(b"abc")
        (entry,) = storage.put_path(tmp_path / "model.pt", "files")
        assert (entry.name, entry.size, entry.crc32) == ("files/model.pt", 3, zlib.crc32(b"abc"))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def test_manifest_commits_a_checkpoint(self, storage: Storage) -> None:
        store = CheckpointStore(storage)
        for number in (1, 2):
            store.commit(_write_parts(store, number))
        left = _write_parts(store, 3)  # its manifest is not written
        assert store.numbers() == [1, 2, 3]
        assert [manifest.number for manifest in store.list()] == [1, 2]
        assert store.read(2) == store.newest().manifest == _write_parts(store, 2)
        store.sweep_uncommitted()
        assert store.numbers() == [1, 2]
        store.commit(_write_parts(store, left.number))
        store.delete(2)
        assert [manifest.number for manifest in store.list()] == [1, 3]

    def test_round_is_added_to_a_committed_checkpoint(self, storage: Storage) -> None:
        store = CheckpointStore(storage)
        manifest = Manifest(**{**vars(_write_parts(store, 1)), "awaits_round": True})
        store.commit(manifest)
        with_round = manifest.with_round({"loss": 0.5}, 7.0)
        store.write_round(with_round)
        assert store.list() == [with_round]
        store.delete(1)
        assert store.numbers() == []

    def test_damaged_checkpoint_is_skipped(self, storage: Storage) -> None:
        store = CheckpointStore(storage)
        for number in (1, 2):
            store.commit(_write_parts(store, number))
        name = f"{part_prefix(1, 0)}.safetensors"
        store.directory(2).write_bytes(name, b"X" + _part(2, 0)[1:])
        newest = store.newest()
        assert newest.manifest is not None and newest.manifest.number == 1
        assert [skipped.number for skipped in newest.skipped] == [2]

    # -- errors -------------------------------------------------------------------------------------------------------

    def test_missing_file_is_named(self, storage: Storage) -> None:
        for call in (storage.read_bytes, storage.open_input, storage.size):
            with pytest.raises(CheckpointNotFoundError, match="nothing_here"):
                call("nothing_here")
        with pytest.raises(CheckpointNotFoundError):
            CheckpointStore(storage).read(1)

    def test_larger_file_than_allowed_is_corrupt(self, storage: Storage) -> None:
        storage.write_bytes(MANIFEST_NAME, b"x" * 100)
        assert len(storage.read_bytes(MANIFEST_NAME, 100)) == 100
        with pytest.raises(CheckpointCorruptError, match="99 bytes"):
            storage.read_bytes(MANIFEST_NAME, 99)

    def test_changed_file_is_corrupt_when_it_is_fetched(self, storage: Storage, tmp_path: Path) -> None:
        (tmp_path / "model.pt").write_bytes(b"abc")
        entries = storage.put_path(tmp_path / "model.pt", "files")
        storage.write_bytes("files/model.pt", b"abd")
        with pytest.raises(CheckpointCorruptError, match=r"files/model\.pt"):
            storage.fetch_tree(entries, str(tmp_path / "back"))

    def test_storage_can_be_sent_to_another_process(self, storage: Storage) -> None:
        if not self.is_picklable:
            pytest.skip("this storage is in the memory of one process")
        storage.write_bytes("a", b"1")
        assert pickle.loads(pickle.dumps(storage)).read_bytes("a") == b"1"
        assert Storage.from_uri(storage.child("b").uri).parent().read_bytes("a") == b"1"


def _part(number: int, rank: int) -> bytes:
    return f"the part of rank {rank} in checkpoint {number}".encode()


def _write_parts(store: CheckpointStore, number: int, num_ranks: int = 2) -> Manifest:
    """Write the parts of a checkpoint as its ranks do, at the same time; return its manifest."""
    folder = store.directory(number)

    def write(rank: int) -> FileEntry:
        name = f"{part_prefix(1, rank)}.safetensors"
        return FileEntry(name, *folder.write_bytes(name, _part(number, rank)))

    with ThreadPoolExecutor(num_ranks) as pool:
        entries = list(pool.map(write, range(num_ranks)))
    return Manifest(
        number=number,
        attempt=1,
        iteration=10 * number,
        time_total_s=1.0,
        world_size=num_ranks,
        created_s=1.0,
        metrics={"loss": 1.0},
        parts={rank: [entry] for rank, entry in enumerate(entries)},
        all_ranks=True,
    )
