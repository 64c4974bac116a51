"""Snapshots: payload, files, and the use of staging buffers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
import torch

from raysgd.checkpoint import snapshot
from raysgd.checkpoint.format.parts import write_payload
from raysgd.checkpoint.snapshot import Snapshot, StagingPool, take_snapshot
from raysgd.checkpoint.storage.storage import Retry, Storage
from raysgd.errors import CheckpointCorruptError, CheckpointError, StorageError, UnsafeStateError
from support.payloads import load_payload, read_part

STATE = {"model": {"w": torch.arange(5.0), "b": torch.ones(2, dtype=torch.bfloat16)}, "epoch": 3, "raw": b"x" * 2000}


def take(state: Any = STATE, *, num_buffers: int = 1) -> Snapshot:
    return take_snapshot(state, StagingPool(num_buffers))


def check(loaded: Any) -> None:
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])
    assert torch.equal(loaded["model"]["b"], STATE["model"]["b"])
    assert (loaded["epoch"], loaded["raw"]) == (3, STATE["raw"])


@pytest.mark.parametrize("remote", [False, True])
def test_files_are_written_and_read(remote: bool, tmp_path: Path) -> None:
    storage = Storage(pyarrow.fs._MockFileSystem(), "b") if remote else Storage.from_uri(tmp_path)
    entries = take().write(storage, "a0001-r00000")
    assert [entry.name for entry in entries] == ["a0001-r00000.safetensors", "a0001-r00000.json"]
    assert [entry.size for entry in entries] == [storage.size(entry.name) for entry in entries]
    check(read_part(storage, entries))
    check(read_part(storage, entries[::-1]))


def test_state_without_tensors_is_one_file(tmp_path: Path) -> None:
    storage = Storage.from_uri(tmp_path)
    entries = take({"epoch": 3}).write(storage, "p")
    assert [entry.name for entry in entries] == ["p.json"]
    assert read_part(storage, entries) == {"epoch": 3}


LAYOUTS = {
    "plain": torch.arange(6.0),
    "parameter": torch.nn.Parameter(torch.ones(2, 3)),
    "transposed": torch.arange(6).reshape(2, 3).T,
    "strided": torch.arange(12.0)[::2],
    "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "one of a stride": torch.tensor([1 + 2j]).real,
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
    "bool": torch.tensor([True, False]),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "eighth": torch.ones(3, dtype=torch.float8_e4m3fn),
    "single": torch.tensor(7),
    "nothing": torch.empty(0, 3),
    "array": np.arange(6).reshape(2, 3).T,
}


@pytest.mark.parametrize("parallel_bytes", [snapshot.PARALLEL_BYTES, 0], ids=["one thread", "several threads"])
def test_tensors_of_every_memory_layout_are_copied(parallel_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "PARALLEL_BYTES", parallel_bytes)
    loaded = load_payload(take(LAYOUTS).payload())
    for name, value in LAYOUTS.items():
        assert np.array_equal(_bytes_of(loaded[name]), _bytes_of(value)), name


def _bytes_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach()).reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def test_error_of_a_copy_thread_is_raised_and_releases_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "PARALLEL_BYTES", 0)
    pool = StagingPool(1)
    broken = np.zeros(3)
    state = {"a": np.ones(1000), "b": broken, "c": np.ones(1000)}
    copyto = np.copyto

    def fails(target: Any, source: Any, **how: Any) -> None:
        if source is broken:
            raise MemoryError("no")
        copyto(target, source, **how)

    monkeypatch.setattr(np, "copyto", fails)
    with pytest.raises(MemoryError):
        take_snapshot(state, pool)
    monkeypatch.undo()
    take_snapshot(state, pool).release()  # the buffer is free again


@pytest.mark.parametrize("state", [None, 3, [], torch.ones(2), {}, "text"], ids=str)
def test_state_may_be_any_value(state: Any, tmp_path: Path) -> None:
    storage = Storage.from_uri(tmp_path)
    snapshot = take(state)
    for loaded in (
        load_payload(snapshot.payload()),
        read_part(storage, snapshot.write(storage, "p")),
    ):
        is_equal = torch.equal(loaded, state) if isinstance(state, torch.Tensor) else loaded == state
        assert is_equal


def test_payload_alone_can_be_loaded_and_written(tmp_path: Path) -> None:
    snapshot = take()
    payload = snapshot.payload().copy()
    assert payload.dtype == np.uint8 and payload.ndim == 1 and payload.size == snapshot.num_bytes
    snapshot.release()
    check(load_payload(payload))
    storage = Storage.from_uri(tmp_path)
    check(read_part(storage, write_payload(payload, storage, "p")))


def test_loaded_tensors_are_copies_of_the_payload() -> None:
    payload = take().payload().copy()
    loaded = load_payload(payload)
    payload[:] = 0
    check(loaded)


def test_release_returns_the_buffer_to_the_pool() -> None:
    pool = StagingPool(1)
    snapshot = take_snapshot(STATE, pool)
    snapshot.release()
    snapshot.release()
    again = take_snapshot({"other": 1}, pool)
    snapshot.release()
    assert load_payload(again.payload()) == {"other": 1}
    with pytest.raises(CheckpointError, match="released"):
        snapshot.payload()
    with pytest.raises(CheckpointError, match="released"):
        snapshot.write(Storage(None, os.devnull), "p")


def interrupt(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def test_failed_snapshot_returns_the_buffer_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = StagingPool(1)
    with pytest.raises(UnsafeStateError):
        take_snapshot({"fn": len}, pool)
    with monkeypatch.context() as patch:
        patch.setattr("raysgd.checkpoint.codecs.numpy.np.copyto", interrupt)
        with pytest.raises(KeyboardInterrupt):
            take_snapshot({"a": np.ones(3)}, pool)
    take_snapshot(STATE, pool)


def test_failed_write_raises_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    snapshot = take()
    with pytest.raises(StorageError):
        snapshot.write(Storage(None, str(tmp_path / "file"), retry=Retry(tries=1)), "p")
    assert os.listdir(tmp_path) == ["file"]
    check(load_payload(snapshot.payload()))


def test_writing_prefaults_the_other_buffers(tmp_path: Path) -> None:
    pool = StagingPool(2)
    snapshot = take_snapshot(torch.zeros(5 << 20), pool)
    snapshot.write(Storage.from_uri(tmp_path), "p")
    other = pool.acquire(1)
    assert other.capacity >= 20 << 20


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p[:-1],
        lambda p: p[1:],
        lambda p: p[:10],
        lambda p: p[:0],
        lambda p: np.concatenate([p, p]),
        lambda p: p.reshape(1, -1),
        lambda p: p.view(np.int8),
    ],
)
def test_damaged_payload_is_corrupt(damage: Any) -> None:
    with pytest.raises(CheckpointCorruptError):
        load_payload(damage(take().payload().copy()))
