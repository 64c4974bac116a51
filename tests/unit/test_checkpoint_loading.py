"""`Checkpoint` and `load_state`, by which users and workers load checkpoints."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import torch

from raysgd.checkpoint.checkpoint import Checkpoint, load_state
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, part_prefix
from raysgd.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    ReshardError,
    UnsafeStateError,
)


def save(storage: Storage, states: dict[int, Any], *, allow_pickle: bool = False, **changes: Any) -> Manifest:
    store = CheckpointStore(storage)
    parts = {}
    for rank, state in states.items():
        snapshot = take_snapshot(state, StagingPool(1), allow_pickle=allow_pickle)
        parts[rank] = snapshot.write(store.directory(7), part_prefix(1, rank))
    return commit(store, changes.pop("parts", parts), allow_pickle=allow_pickle, **changes)


def save_files(storage: Storage, sources: dict[int, Path], **changes: Any) -> Manifest:
    store = CheckpointStore(storage)
    parts = {rank: store.directory(7).put_path(path, part_prefix(1, rank)) for rank, path in sources.items()}
    return commit(store, changes.pop("parts", parts), is_files=True, **changes)


def commit(store: CheckpointStore, parts: dict[int, Any], **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "number": 7,
        "attempt": 1,
        "iteration": 40,
        "time_total_s": 2.5,
        "world_size": 2,
        "created_s": 1.0,
        "metrics": {"loss": 0.5},
        "parts": parts,
    }
    manifest = Manifest(**(fields | changes))
    store.commit(manifest)
    return manifest


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage.from_uri(tmp_path / "run" / "checkpoints")


@pytest.fixture
def path(run: Storage) -> Path:
    return Path(run.uri) / "checkpoint_000007"


def test_checkpoint_is_opened_by_its_path(run: Storage, path: Path) -> None:
    save(run, {0: {"w": torch.ones(3), "epoch": 2}})
    for given in (path, str(path), f"{path}/"):
        checkpoint = Checkpoint.from_path(given)
        assert checkpoint.path == str(path)
        assert (checkpoint.metrics, checkpoint.iteration, checkpoint.time_total_s) == ({"loss": 0.5}, 40, 2.5)
        state = checkpoint.load()
        assert state["epoch"] == 2 and state["w"].tolist() == [1, 1, 1]


def test_checkpoint_is_small_and_can_be_pickled(run: Storage, path: Path) -> None:
    save(run, {0: {"w": torch.ones(100_000)}})
    checkpoint = Checkpoint.from_path(path)
    data = pickle.dumps(checkpoint)
    assert len(data) < 1000
    loaded = pickle.loads(data)
    assert loaded == checkpoint and hash(loaded) == hash(checkpoint) and loaded.iteration == 40
    assert loaded.load()["w"].sum() == 100_000
    assert copy.copy(checkpoint) == checkpoint


def test_checkpoints_are_equal_by_path() -> None:
    assert Checkpoint("a", {"x": 1}, 3) == Checkpoint("a")
    assert Checkpoint("a") != Checkpoint("b") and Checkpoint("a") != "a"
    assert Checkpoint(None) != Checkpoint(None)
    memory = Checkpoint(None)
    assert memory == memory and len({memory, Checkpoint("a"), Checkpoint("a")}) == 2
    assert "iteration=3" in repr(Checkpoint("a", {}, 3))


def test_checkpoint_in_memory_is_not_loaded_outside_train_func() -> None:
    with pytest.raises(CheckpointError, match="in memory only"):
        Checkpoint(None, {"a": 1}, 5).load()


def test_missing_checkpoint_is_not_found(tmp_path: Path) -> None:
    for given in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointNotFoundError, match=str(given)):
            Checkpoint.from_path(given)
    with pytest.raises(FileNotFoundError):
        Checkpoint("/nowhere/checkpoint_000001").load()
    with pytest.raises(ConfigError):
        Checkpoint.from_path("nosuch://x")


def test_folder_of_a_run_is_refused_with_a_suggestion(run: Storage, path: Path) -> None:
    save(run, {0: 1})
    for given in (path.parent, path.parent.parent):
        with pytest.raises(CheckpointNotFoundError, match=f"did you mean {path}"):
            Checkpoint.from_path(given)


def test_uncommitted_checkpoint_is_not_found(run: Storage, path: Path) -> None:
    save(run, {0: 1})
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"no manifest\.json"):
        Checkpoint.from_path(path)


@pytest.mark.parametrize("name", ["manifest.json", "a0001-r00000.json", "a0001-r00000.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "link", "folder"])
def test_damaged_checkpoint_given_by_path_raises(run: Storage, path: Path, name: str, damage: str) -> None:
    save(run, {0: {"w": torch.ones(300)}})
    file = path / name
    data = file.read_bytes()
    file.unlink()
    if damage == "truncated":
        file.write_bytes(data[:-7])
    elif damage == "flipped":
        file.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    elif damage == "link":
        (path.parent / "elsewhere").write_bytes(data)
        file.symlink_to(path.parent / "elsewhere")
    elif damage == "folder":
        file.mkdir()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.from_path(path).load()
    if (name, damage) not in {("manifest.json", "missing"), ("manifest.json", "folder")}:
        assert isinstance(caught.value, CheckpointCorruptError) and name in str(caught.value)


def test_sizes_are_checked_before_loading(run: Storage, path: Path) -> None:
    save(run, {0: {"w": torch.ones(300)}})
    os.truncate(path / "a0001-r00000.safetensors", 100)
    with pytest.raises(CheckpointCorruptError, match=r"safetensors has 100 bytes; the manifest says"):
        Checkpoint.from_path(path)


def test_pickled_values_need_allow_pickle(run: Storage, path: Path) -> None:
    save(run, {0: {"fn": len}}, allow_pickle=True)
    checkpoint = Checkpoint.from_path(path)
    with pytest.raises(UnsafeStateError, match=r"state\['fn'\]"):
        checkpoint.load()
    assert checkpoint.load(allow_pickle=True) == {"fn": len}


def test_all_ranks_load_the_same_part_by_default(run: Storage) -> None:
    manifest = save(run, {0: {"rank": 0}})
    for rank, world_size in ((0, 2), (1, 2), (5, 8), (3, None)):
        assert load_state(
            run.child("checkpoint_000007"), manifest, rank, allow_pickle=False, world_size=world_size
        ) == {"rank": 0}


def test_each_rank_loads_its_part(run: Storage, path: Path) -> None:
    manifest = save(run, {0: {"rank": 0}, 1: {"rank": 1}}, all_ranks=True)
    directory = run.child("checkpoint_000007")
    for rank in (0, 1):
        assert load_state(directory, manifest, rank, allow_pickle=False, world_size=2) == {"rank": rank}
    assert Checkpoint.from_path(path).load() == {"rank": 0}
    assert Checkpoint.from_path(path).load(rank=1) == {"rank": 1}


def test_parts_of_another_number_of_ranks_are_refused(run: Storage, path: Path) -> None:
    manifest = save(run, {0: {"rank": 0}, 1: {"rank": 1}}, all_ranks=True)
    with pytest.raises(ReshardError, match="by 2 ranks and cannot be split over 3"):
        load_state(run.child("checkpoint_000007"), manifest, 0, allow_pickle=False, world_size=3)
    with pytest.raises(ReshardError, match=r"no part of rank 5.*\[0, 1\]"):
        Checkpoint.from_path(path).load(rank=5)


def test_manifest_without_parts_is_corrupt(run: Storage) -> None:
    manifest = save(run, {})
    with pytest.raises(CheckpointCorruptError, match="no parts"):
        load_state(run.child("checkpoint_000007"), manifest, 0, allow_pickle=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "model.bin").write_bytes(b"model")
    (source / "deep" / "größe.txt").write_text("text")
    return source


def test_user_files_on_local_disk_are_used_in_place(run: Storage, path: Path, source: Path) -> None:
    save_files(run, {0: source})
    folder = Path(Checkpoint.from_path(path).load())
    assert folder == path / "a0001-r00000"
    assert (folder / "model.bin").read_bytes() == b"model" and (folder / "deep" / "größe.txt").read_text() == "text"


def test_user_files_on_object_storage_are_downloaded(source: Path) -> None:
    run = Storage(pyarrow.fs._MockFileSystem(), "run")
    manifest = save_files(run, {0: source, 1: source / "model.bin"}, all_ranks=True)
    directory = run.child("checkpoint_000007")
    folder = Path(load_state(directory, manifest, 0, allow_pickle=False))
    assert (folder / "model.bin").read_bytes() == b"model" and (folder / "deep" / "größe.txt").read_text() == "text"
    assert os.listdir(load_state(directory, manifest, 1, allow_pickle=False)) == ["model.bin"]
    directory.write_bytes("a0001-r00001/model.bin", b"mudel")
    with pytest.raises(CheckpointCorruptError, match=r"r00001/model\.bin"):
        load_state(directory, manifest, 1, allow_pickle=False)


def test_empty_folder_is_loaded_as_an_empty_folder(run: Storage, path: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save_files(run, {0: tmp_path / "empty"})
    assert os.listdir(Checkpoint.from_path(path).load()) == []


def test_rank_without_files_loads_an_empty_folder(run: Storage, path: Path, source: Path) -> None:
    manifest = save_files(run, {1: source}, all_ranks=True)
    directory = Storage.from_uri(path)
    assert os.listdir(load_state(directory, manifest, 0, allow_pickle=False, world_size=2)) == []
    assert set(os.listdir(load_state(directory, manifest, 1, allow_pickle=False, world_size=2))) == {
        "deep",
        "model.bin",
    }
    with pytest.raises(ReshardError, match=r"no part of rank 2; it has those of ranks \[0, 1\]"):
        load_state(directory, manifest, 2, allow_pickle=False)
    with pytest.raises(ReshardError, match="cannot be split over 3"):
        load_state(directory, manifest, 0, allow_pickle=False, world_size=3)


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "link", "linked folder"])
def test_damaged_user_files_are_corrupt(run: Storage, path: Path, source: Path, tmp_path: Path, damage: str) -> None:
    save_files(run, {0: source})
    file = path / "a0001-r00000" / "deep" / "größe.txt"
    file.unlink()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "größe.txt").write_text("text")
    if damage == "truncated":
        file.write_text("tex")
    elif damage == "flipped":
        file.write_text("tExt")
    elif damage == "link":
        file.symlink_to(tmp_path / "outside" / "größe.txt")
    elif damage == "linked folder":
        file.parent.rmdir()
        file.parent.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointCorruptError, match="deep"):
        Checkpoint.from_path(path).load()


def test_user_files_must_be_in_one_folder(run: Storage, source: Path) -> None:
    manifest = save_files(run, {0: source})
    twice = save_files(run, {0: source}, parts={0: [*manifest.parts[0], *save(run, {1: 1}).parts[1]]})
    with pytest.raises(CheckpointCorruptError, match="not in one folder"):
        load_state(run.child("checkpoint_000007"), twice, 0, allow_pickle=False)


def test_files_that_do_not_form_a_part_are_corrupt(run: Storage) -> None:
    manifest = save(run, {0: {"w": torch.ones(1)}, 1: 2})
    for files in (manifest.parts[0][:1], [*manifest.parts[0], *manifest.parts[1]]):
        odd = save(run, {0: {"w": torch.ones(1)}, 1: 2}, parts={0: files})
        with pytest.raises(CheckpointCorruptError, match="do not form a part"):
            load_state(run.child("checkpoint_000007"), odd, 0, allow_pickle=False)
