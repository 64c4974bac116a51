"""The tensors file: exchange with the safetensors library, alignment, and refusal of damaged files."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pyarrow.fs
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import strategies as st

from raysgd.checkpoint.format.parts import copy_leaves, read_leaves
from raysgd.checkpoint.format.safetensors import MAX_HEADER_BYTES, decode_header, encode_header
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import CheckpointCorruptError, CheckpointError


def write(state: Any, tmp_path: Path) -> tuple[Storage, FileEntry]:
    snapshot = take_snapshot(state, StagingPool())
    storage = Storage.from_uri(tmp_path)
    tensors, _ = snapshot.write(storage, "part")
    assert tensors.name == "part.safetensors"
    return storage, tensors


def entry_of(path: Path) -> FileEntry:
    data = path.read_bytes()
    return FileEntry(path.name, len(data), zlib.crc32(data))


def make_file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype: str = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def test_safetensors_reads_our_files(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.float16]
    model = {str(dtype)[6:]: torch.arange(7).to(dtype) for dtype in dtypes}
    storage, entry = write({"model": model, "step": torch.tensor(3), "empty": torch.zeros(0, 4)}, tmp_path)
    loaded = safetensors.torch.load_file(storage.path_of(entry.name))
    assert set(loaded) == {*(f"model.{name}" for name in model), "step", "empty"}
    for name, value in model.items():
        assert loaded[f"model.{name}"].dtype == value.dtype
        assert torch.equal(loaded[f"model.{name}"].view(torch.uint8), value.view(torch.uint8))
    assert loaded["step"].item() == 3 and loaded["empty"].shape == (0, 4)
    with safetensors.safe_open(storage.path_of(entry.name), "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_safetensors_reads_complex_numbers_as_pairs(tmp_path: Path) -> None:
    storage, entry = write({"c": torch.tensor([1 + 2j], dtype=torch.complex128)}, tmp_path)
    assert safetensors.torch.load_file(storage.path_of(entry.name))["c"].tolist() == [[1.0, 2.0]]


def test_safetensors_reads_arrays(tmp_path: Path) -> None:
    storage, entry = write({"a": np.arange(4.0), "b": np.array([True, False]), "s": np.array(["x"])}, tmp_path)
    loaded = safetensors.numpy.load_file(storage.path_of(entry.name))
    assert loaded["a"].tolist() == [0, 1, 2, 3] and loaded["b"].tolist() == [True, False]


def test_files_of_safetensors_are_read(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1, 2], np.int64), "c": np.array(True)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", metadata={"by": "the library"})
    entry = entry_of(tmp_path / "x.safetensors")
    stored = read_leaves(Storage.from_uri(tmp_path), entry)
    copied = copy_leaves(np.fromfile(tmp_path / "x.safetensors", np.uint8), "x")
    for leaves in (stored, copied):
        for name, array in arrays.items():
            leaf = leaves[name]
            assert leaf.shape == array.shape and leaf.data.tobytes() == array.tobytes()


@hypothesis.settings(max_examples=30)
@hypothesis.given(sizes=st.lists(st.sampled_from([0, 1, 7, 1000, 300_000]), max_size=12))
def test_tensors_of_all_sizes_are_aligned(sizes: list[int]) -> None:
    dtypes = [torch.float64, torch.uint8, torch.float32, torch.bfloat16]
    state = {str(i): torch.full((n,), i % 7).to(dtypes[i % 4]) for i, n in enumerate(sizes)}
    pool = StagingPool()
    snapshot = take_snapshot([state, b"x" * 2000], pool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raysgd.checkpoint.format.parts.CHUNK_BYTES", 400_000)
        patch.setattr("raysgd.checkpoint.format.parts._SMALL_BYTES", 350_000)
        storage = Storage(pyarrow.fs._MockFileSystem(), "base")
        leaves = read_leaves(storage, snapshot.write(storage, "part")[0])
    for i, (name, value) in enumerate(state.items()):
        leaf = leaves[f"0.{name}"]
        assert leaf.data.tobytes() == value.view(torch.uint8).numpy().tobytes(), i
        assert not leaf.data.size or leaf.data.ctypes.data % 64 == 0


def test_each_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    storage, entry = write({"a": torch.zeros(10), "b": torch.zeros(10)}, tmp_path)
    leaves = read_leaves(storage, entry)
    assert not np.shares_memory(leaves["a"].data.base, leaves["b"].data.base)


TWO = {"a": tensor(), "b": tensor(begin=8, end=16)}


def test_valid_header_is_read() -> None:
    file = make_file(TWO, bytes(16))
    specs = decode_header(file[:-16], len(file), "x")
    assert [(spec.name, spec.end - spec.begin) for spec in specs] == [("a", 8), ("b", 8)]
    header = encode_header([("a", "F32", (2,), 8)], {"k": "v"})
    assert len(header) % 64 == 0
    assert decode_header(header, len(header) + 8, "x")[0].shape == (2,)


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"\x01\x02",
        make_file({}, length=MAX_HEADER_BYTES + 1),
        make_file({}, length=1 << 63),
        make_file({}, length=100),
        make_file(b"not json"),
        make_file(b"\xff\xfe{}"),
        make_file([1]),
        make_file(b"[" * 100_000),
        make_file(b'{"a":' * 50_000),
        make_file(b'{"a": NaN}'),
        make_file({"a": 1}),
        make_file({"a": None}),
        make_file({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        make_file({"a": tensor("F31")}, bytes(8)),
        make_file({"a": tensor(dtype=["F32"])}, bytes(8)),
        make_file({"a": tensor(shape={"0": 2})}, bytes(8)),
        make_file({"a": tensor(shape=(2.0,))}, bytes(8)),
        make_file({"a": tensor(shape=(True, 2))}, bytes(8)),
        make_file({"a": tensor(shape=(-2, -1))}, bytes(8)),
        make_file({"a": tensor(shape=(3,))}, bytes(8)),
        make_file({"a": tensor(shape=(1,) * 65, dtype="U8", end=1)}, bytes(1)),
        make_file({"a": tensor(shape=(1 << 33, 1 << 31), end=0)}),
        make_file({"a": tensor(shape=(1 << 61, 8), end=8)}, bytes(8)),
        make_file({"a": tensor(begin=8, end=16)}, bytes(8)),
        make_file({"a": tensor(begin=8, end=0)}, bytes(8)),
        make_file({"a": tensor(begin=-8, end=0)}, bytes(8)),
        make_file({"a": tensor(end=1 << 63)}, bytes(8)),
        make_file({"a": tensor(), "b": tensor(begin=4, end=12)}, bytes(12)),
        make_file({"a": tensor(), "b": tensor()}, bytes(8)),
        make_file({"a": tensor(), "b": tensor(begin=9, end=17)}, bytes(17)),
        make_file({"a": tensor()}, bytes(9)),
        make_file(b'{"a":%b,"a":%b}' % ((json.dumps(tensor()).encode(),) * 2), bytes(8)),
    ],
    ids=lambda file: repr(file[8:60]),
)
def test_damaged_and_hostile_files_are_corrupt(file: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(file)
    with pytest.raises(CheckpointCorruptError, match=r"x\.safetensors"):
        read_leaves(Storage.from_uri(tmp_path), entry_of(tmp_path / "x.safetensors"))
    with pytest.raises(CheckpointCorruptError):
        copy_leaves(np.frombuffer(file, np.uint8), "x")


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d + b"x", lambda d: d[:-1] + bytes([d[-1] ^ 1]), lambda d: b""]
)
def test_damage_after_writing_is_corrupt_and_names_the_file(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    storage, entry = write({"a": torch.ones(300)}, tmp_path)
    path = tmp_path / entry.name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointCorruptError, match=r"part\.safetensors"):
        read_leaves(storage, entry)


@hypothesis.settings(max_examples=100)
@hypothesis.given(data=st.data())
def test_changed_header_is_corrupt_or_still_valid(data: st.DataObject) -> None:
    file = bytearray(make_file(TWO, bytes(16)))
    for _ in range(data.draw(st.integers(1, 3))):
        file[data.draw(st.integers(0, len(file) - 17))] = data.draw(st.integers(0, 255))
    data_start = 8 + int.from_bytes(file[:8], "little")
    try:
        leaves = copy_leaves(np.frombuffer(bytes(file), np.uint8), "x")
    except CheckpointCorruptError:
        return
    for spec in decode_header(bytes(file[:data_start]), len(file), "x"):
        assert leaves[spec.name].data.size == spec.end - spec.begin


def test_too_large_header_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysgd.checkpoint.format.safetensors.MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match="too many tensors"):
        take_snapshot({str(i): torch.ones(1) for i in range(10)}, StagingPool())
