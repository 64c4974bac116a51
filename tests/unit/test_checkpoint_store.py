"""The folder of a run's checkpoints: commit, list, newest, delete, sweep."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.checkpoint.storage.storage import Retry, Storage
from raysgd.checkpoint.store import CheckpointStore, part_prefix, read_manifest
from raysgd.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError


@pytest.fixture(params=["local", "mock"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "local":
        return CheckpointStore(Storage.from_uri(tmp_path / "checkpoints"))
    return CheckpointStore(Storage(pyarrow.fs._MockFileSystem(), "run/checkpoints"))


@pytest.fixture
def local(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(Storage.from_uri(tmp_path / "checkpoints"))


def write_part(store: CheckpointStore, number: int, attempt: int = 1, rank: int = 0) -> list[FileEntry]:
    snapshot = take_snapshot({"n": number, "data": b"x" * 3000}, StagingPool(1))
    return snapshot.write(store.directory(number), part_prefix(attempt, rank))


def commit(store: CheckpointStore, number: int, attempt: int = 1, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "number": number,
        "attempt": attempt,
        "iteration": number * 10,
        "time_total_s": 1.0,
        "world_size": 1,
        "created_s": 1.0,
        "metrics": {"loss": 1.0 / (number + 1)},
        "parts": {0: write_part(store, number, attempt)},
    }
    manifest = Manifest(**(fields | changes))
    assert store.commit(manifest) == store.path(number)
    return manifest


def numbers(manifests: list[Manifest]) -> list[int]:
    return [manifest.number for manifest in manifests]


def test_file_names_sort_and_contain_attempt_and_rank() -> None:
    assert part_prefix(2, 1) == "a0002-r00001"
    assert part_prefix(12345, 123456) == "a12345-r123456"


def test_empty_store_has_no_checkpoints(store: CheckpointStore) -> None:
    assert store.list() == [] and store.newest().manifest is None
    store.sweep_uncommitted()
    store.delete(3)


def test_checkpoint_is_listed_once_committed(store: CheckpointStore) -> None:
    parts = {0: write_part(store, 3)}
    assert store.numbers() == [3] and store.list() == [] and store.newest() == (None, [])
    manifest = commit(store, 3, parts=parts)
    assert store.list() == [manifest] == [read_manifest(store.directory(3))]
    assert store.path(3).endswith("checkpoints/checkpoint_000003")


def test_round_of_a_checkpoint_is_read_with_it_and_its_manifest_stays(store: CheckpointStore) -> None:
    whole = commit(store, 1, rank_states={0: {"n": 1}}, metrics={}, awaits_round=True)
    before = store.directory(1).read_bytes("manifest.json")
    known = replace(whole, parts={}, rank_states={}).with_round({"loss": math.nan}, 5000.0)
    store.write_round(known)
    assert store.directory(1).read_bytes("manifest.json") == before
    read = store.read(1)
    assert math.isnan(read.metrics["loss"])
    expected = {"iteration": whole.iteration + 1, "metrics": {}, "time_total_s": 5000.0, "awaits_round": False}
    assert replace(read, metrics={}) == replace(whole, **expected)


@pytest.mark.parametrize("damage", ["cut", "changed", "not JSON", "of another attempt", "of another iteration"])
def test_checkpoint_is_whole_without_its_round(store: CheckpointStore, damage: str) -> None:
    whole = commit(store, 1, metrics={}, awaits_round=True)
    known = whole.with_round({"loss": 2.0}, 5000.0)
    other = {"of another attempt": {"attempt": 9}, "of another iteration": {"iteration": 9}}.get(damage, {})
    data = replace(known, parts={}, **other).to_json()
    made = {"cut": data[:-3], "changed": data.replace(b"2.0", b"3.0"), "not JSON": b"{"}.get(damage, data)
    store.directory(1).write_bytes("round.json", made)
    assert store.list() == [whole] and store.newest().manifest == whole


def test_round_that_was_half_written_leaves_no_file(local: CheckpointStore) -> None:
    known = commit(local, 1, metrics={}, awaits_round=True).with_round({}, 0.0)
    before = os.listdir(local.path(1))
    (Path(local.path(1)) / ".tmp-123-abc").write_bytes(b"{")
    local.write_round(known)
    assert sorted(os.listdir(local.path(1))) == sorted([*before, "round.json"])


def test_round_is_not_written_for_a_deleted_checkpoint(store: CheckpointStore) -> None:
    known = commit(store, 1, metrics={}, awaits_round=True).with_round({}, 0.0)
    store.delete(1)
    with pytest.raises(CheckpointNotFoundError, match="checkpoint 1 was deleted"):
        store.write_round(known)
    assert store.numbers() == []


def test_checkpoints_are_listed_in_order(store: CheckpointStore) -> None:
    for number in (10, 2, 1_000_000, 9):
        commit(store, number)
    store.storage.write_bytes("checkpoint_000005", b"a file")
    store.storage.child("other").write_bytes("manifest.json", b"{}")
    assert numbers(store.list()) == [2, 9, 10, 1_000_000]


def test_missing_manifest_is_not_found(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointNotFoundError, match="checkpoint_000001"):
        store.read(1)
    with pytest.raises(CheckpointNotFoundError):
        read_manifest(store.directory(1))


def damage_manifest(store: CheckpointStore, number: int) -> None:
    store.directory(number).write_bytes("manifest.json", b"{}")


def damage_bytes(store: CheckpointStore, number: int) -> None:
    name = part_prefix(1, 0) + ".safetensors"
    data = bytearray(store.directory(number).read_bytes(name))
    data[-1] ^= 1
    store.directory(number).write_bytes(name, bytes(data))


def truncate(store: CheckpointStore, number: int) -> None:
    store.directory(number).write_bytes(part_prefix(1, 0) + ".json", b"")


def remove_file(store: CheckpointStore, number: int) -> None:
    store.directory(number).delete_file(part_prefix(1, 0) + ".json")


def swap_manifests(store: CheckpointStore, number: int) -> None:
    store.directory(number).write_bytes("manifest.json", store.directory(1).read_bytes("manifest.json"))


DAMAGES = [damage_manifest, damage_bytes, truncate, remove_file, swap_manifests]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_skipped_for_the_one_before(
    store: CheckpointStore, damage: Callable[[CheckpointStore, int], None]
) -> None:
    for number in (1, 2, 3):
        commit(store, number)
    write_part(store, 4)
    damage(store, 3)
    newest = store.newest()
    assert newest.manifest is not None and newest.manifest.number == 2
    (passed,) = newest.skipped
    assert passed.number == 3 and isinstance(passed.error, CheckpointCorruptError)
    assert "checkpoint_000003/" in str(passed.error)


def test_checkpoints_with_damaged_manifests_are_not_listed(store: CheckpointStore) -> None:
    commit(store, 1)
    commit(store, 2)
    damage_manifest(store, 1)
    assert numbers(store.list()) == [2]


def test_size_of_manifest_is_bounded(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(store, 1)
    monkeypatch.setattr("raysgd.checkpoint.store.MAX_MANIFEST_BYTES", 100)
    for read in (lambda: store.read(1), lambda: read_manifest(store.directory(1))):
        with pytest.raises(CheckpointCorruptError, match="allowed 100 bytes"):
            read()


def test_unreadable_storage_raises_instead_of_starting_over(local: CheckpointStore) -> None:
    commit(local, 1)
    path = Path(local.path(1)) / "manifest.json"
    path.unlink()
    path.mkdir()  # reading it fails, as on a broken disk
    for read in (local.newest, lambda: local.list(needs_newest=True)):
        with pytest.raises(StorageError):
            read()
    assert local.list() == []
    commit(local, 2)
    assert numbers(local.list(needs_newest=True)) == [2]


def test_committing_again_replaces_the_manifest(store: CheckpointStore) -> None:
    manifest = commit(store, 1)
    commit(store, 1, parts=manifest.parts, metrics={"loss": 0.25})
    assert store.read(1).metrics == {"loss": 0.25}
    assert store.newest().manifest == store.read(1)


def test_commit_removes_files_of_other_attempts(local: CheckpointStore) -> None:
    write_part(local, 1, attempt=1)
    folder = Path(local.path(1))
    (folder / ".tmp-123-abc").touch()
    (folder / "a0001-r00001").mkdir()
    (folder / "a0001-r00001" / "user.bin").touch()
    (folder / "notes.txt").touch()
    commit(local, 1, attempt=2)
    assert sorted(os.listdir(folder)) == ["a0002-r00000.json", "a0002-r00000.safetensors", "manifest.json", "notes.txt"]


def test_attempts_write_different_files(store: CheckpointStore) -> None:
    manifest = commit(store, 1, attempt=2)
    write_part(store, 1, attempt=1)
    assert store.newest().manifest == manifest


def test_delete_removes_a_checkpoint(store: CheckpointStore) -> None:
    commit(store, 1)
    commit(store, 2)
    store.delete(1)
    assert numbers(store.list()) == [2] and store.numbers() == [2]


def test_half_deleted_checkpoint_is_not_listed(local: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(local, 1)

    def broken(*args: Any) -> None:
        raise PermissionError("no")

    with monkeypatch.context() as patch:
        patch.setattr("raysgd.checkpoint.storage.files.shutil.rmtree", broken)
        with pytest.raises(StorageError):
            local.delete(1)
    assert local.list() == [] and local.newest().manifest is None
    local.sweep_uncommitted()
    assert local.numbers() == []


def test_user_files_are_deleted_with_their_checkpoint(store: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"1")
    parts = {0: store.directory(1).put_path(tmp_path / "m.bin", part_prefix(1, 0))}
    commit(store, 1, parts=parts, is_files=True)
    assert store.newest().manifest is not None
    store.delete(1)
    assert store.numbers() == []


def test_uncommitted_folders_are_swept(store: CheckpointStore) -> None:
    commit(store, 1)
    for number in (2, 3, 4):
        write_part(store, number)
    store.storage.child("checkpoint_000005").write_bytes("thesis.docx", b"not ours")
    store.sweep_uncommitted()
    assert store.numbers() == [1, 5]


def test_link_in_place_of_a_checkpoint_is_not_followed(local: CheckpointStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_bytes(b"{}")
    commit(local, 1)
    os.symlink(outside, Path(local.storage.uri) / "checkpoint_000002")
    assert numbers(local.list()) == [1]
    newest = local.newest()
    assert newest.manifest is not None and newest.manifest.number == 1
    assert "symbolic link" in str(newest.skipped[0].error)
    local.sweep_uncommitted()
    with pytest.raises(CheckpointCorruptError, match="symbolic link"):
        local.delete(2)
    assert (outside / "manifest.json").exists()


def test_checkpoint_without_manifest_is_not_committed(local: CheckpointStore, tmp_path: Path) -> None:
    parts = {0: write_part(local, 1)}
    manifest = commit(local, 2, parts=parts)
    (tmp_path / "blocked").touch()
    blocked = CheckpointStore(Storage(None, str(tmp_path / "blocked"), retry=Retry(tries=1)))
    with pytest.raises(StorageError, match=r"manifest\.json"):
        blocked.commit(manifest)
