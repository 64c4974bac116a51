"""Sharded arrays: parts that one number of ranks saved are loaded by another, without Ray and JAX."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pyarrow.fs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.checkpoint.checkpoint import load_state
from raysgd.checkpoint.codecs import numpy as numpy_codec
from raysgd.checkpoint.codecs.shards import ShardIndex, ShardWriter, full_index
from raysgd.checkpoint.codecs.tree import ENCODERS
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.format.parts import MemoryPart
from raysgd.checkpoint.resharding import SavedArray, load_parts
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, part_prefix
from raysgd.errors import CheckpointCorruptError, CheckpointError, ReshardError

SHAPE = (6, 4)
ROWS = [ShardIndex((0, 0), (2, 4)), ShardIndex((2, 0), (4, 4)), ShardIndex((4, 0), (6, 4))]
VALUES = np.arange(24, dtype=np.float32).reshape(SHAPE)


@dataclass
class Sharded:
    """Stands in for a framework's array of which a rank holds some shards."""

    values: Any
    indices: Sequence[ShardIndex]


@pytest.fixture(autouse=True)
def _register_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(encoder: Any, value: Sharded) -> Any:
        whole_array = value.values
        names = {
            index: encoder.add_leaf(numpy_codec.leaf_of([*encoder.path, "shard"], whole_array[index.slices()]))
            for index in value.indices
        }
        return encoder.shards.add(encoder.path, numpy_codec.dtype_to_json(whole_array.dtype), whole_array.shape, names)

    monkeypatch.setitem(ENCODERS, Sharded, encode)


@dataclass
class Saved:
    """A checkpoint in parts."""

    folder: Storage
    manifest: Manifest
    failures: list[str] = field(default_factory=list)

    def load(self, rank: int = 0, world_size: int | None = None) -> Any:
        return load_state(
            self.folder,
            self.manifest,
            rank,
            allow_pickle=False,
            world_size=world_size,
            on_unusable=lambda error: self.failures.append(str(error)),
        )


class Moments(NamedTuple):
    """A named tuple, as in an optimizer's state."""

    mu: Any


def make_manifest(world_size: int, **fields: Any) -> Manifest:
    common: dict[str, Any] = {"number": 1, "attempt": 1, "iteration": 1, "time_total_s": 1.0, "created_s": 1.0}
    return Manifest(world_size=world_size, all_ranks=True, **common, **fields)


def save(root: Any, states: Sequence[Any], *, allow_pickle: bool = False) -> Saved:
    store = CheckpointStore(root if isinstance(root, Storage) else Storage.from_uri(root))
    parts, digests = {}, set()
    for rank, state in enumerate(states):
        snapshot = take_snapshot(state, StagingPool(1), shards=ShardWriter(len(states)), allow_pickle=allow_pickle)
        parts[rank] = snapshot.write(store.directory(1), part_prefix(1, rank))
        digests.add(snapshot.unsharded_digest())
    manifest = make_manifest(len(states), parts=parts, is_reshardable=len(digests) == 1 and None not in digests)
    store.commit(manifest)
    return Saved(store.directory(1), manifest)


def by_rows(values: Any = VALUES, **unsharded: Any) -> list[dict[str, Any]]:
    """The states of three ranks with two rows each."""
    return [{"w": Sharded(values, [index]), **unsharded} for index in ROWS]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_any_number_of_ranks_reads_any_slice(tmp_path: Path, remote: bool, world_size: int) -> None:
    saved = save(Storage(pyarrow.fs._MockFileSystem(), "b") if remote else tmp_path, by_rows(step=3))
    for rank in range(world_size):
        state = saved.load(rank, world_size)
        array = state["w"]
        assert isinstance(array, SavedArray)
        assert (state["step"], array.shape, array.dtype, array.ndim, array.nbytes) == (3, SHAPE, np.float32, 2, 96)
        for key in np.s_[1:3], np.s_[:, 1:3], np.s_[1:5, 3:], np.s_[2:2], np.s_[-1:]:
            assert np.array_equal(array[key], VALUES[key])
        assert np.array_equal(np.asarray(array), VALUES)
        assert np.array_equal(np.asarray(array, np.float64), VALUES)


@settings(max_examples=40)
@given(st.data())
def test_parts_in_memory_are_read_like_stored_ones(data: st.DataObject) -> None:
    cut, rows = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 6))
    indices = [ShardIndex((0, 0), (6, cut)), ShardIndex((0, cut), (rows, 4)), ShardIndex((rows, cut), (6, 4))]
    owners = [data.draw(st.integers(0, 1)) for _ in indices]
    payloads = []
    for rank in range(2):
        state = {"w": Sharded(VALUES, [index for index, owner in zip(indices, owners, strict=True) if owner == rank])}
        snapshot = take_snapshot(state, StagingPool(1), shards=ShardWriter(2))
        payloads.append(snapshot.payload().copy())
    parts = {rank: MemoryPart(lambda payload=payload: payload) for rank, payload in enumerate(payloads)}  # type: ignore[misc]
    manifest = make_manifest(2, is_reshardable=True)
    state = load_parts(
        manifest, parts, 0, world_size=3, where="here", allow_pickle=False, on_unusable=lambda error: None
    )
    begin, end = sorted((data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))))
    left, right = sorted((data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))))
    assert np.array_equal(state["w"][begin:end, left:right], VALUES[begin:end, left:right])


ML_DTYPES = sorted(numpy_codec.ML_DTYPES)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_arrays_in_named_tuples_are_sharded_even_if_pickle_is_allowed(tmp_path: Path, allow_pickle: bool) -> None:
    saved = save(
        tmp_path, [{"moments": Moments(Sharded(VALUES, [index]))} for index in ROWS], allow_pickle=allow_pickle
    )
    assert saved.manifest.is_reshardable
    found = saved.load(world_size=2)["moments"].mu
    assert isinstance(found, SavedArray) and (np.asarray(found) == VALUES).all()


@pytest.mark.parametrize("name", [*ML_DTYPES, "bool", "int64", "float16", "complex64", "complex128"])
def test_every_dtype_is_restored_bit_for_bit(tmp_path: Path, name: str) -> None:
    values = VALUES.astype(np.dtype(getattr(ml_dtypes, name, name)))
    saved = save(tmp_path, by_rows(values, plain=values))
    for state in (saved.load(), saved.load(1, 2)):
        for loaded in (np.asarray(state["w"]), state["plain"]):
            assert (loaded.dtype, loaded.tobytes()) == (values.dtype, values.tobytes())


def test_scalars_and_empty_arrays_are_restored(tmp_path: Path) -> None:
    scalar, empty = np.float32(2.5).reshape(()), np.zeros((0, 3))
    states = [
        {"s": Sharded(scalar, [full_index(())] if rank == 1 else []), "e": Sharded(empty, [])} for rank in range(2)
    ]
    state = save(tmp_path, states).load(0, 3)
    assert type(state["s"]) is np.ndarray and float(state["s"]) == 2.5  # scalars are read at once
    assert state["e"][:].shape == (0, 3)


def test_driver_gets_whole_arrays_and_the_values_of_each_rank(tmp_path: Path) -> None:
    states = [{**state, "mine": rank} for rank, state in enumerate(by_rows())]
    saved = save(tmp_path, states)
    for rank in range(3):
        state = saved.load(rank)
        assert type(state["w"]) is np.ndarray and state["w"].flags.writeable
        assert np.array_equal(state["w"], VALUES) and state["mine"] == rank
        assert saved.load(rank, 3)["mine"] == rank
    with pytest.raises(ReshardError, match=r"no part of rank 3"):
        saved.load(3)


def test_array_at_two_places_is_stored_once_and_restored_as_one(tmp_path: Path) -> None:
    states = []
    for index in ROWS:
        array = Sharded(VALUES, [index])
        states.append({"a": array, "b": [array]})
    saved = save(tmp_path, states)
    state = saved.load(0, 2)
    assert state["a"] is state["b"][0]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) < 3 * 300


@pytest.mark.parametrize(
    ("private", "place"),
    [
        ([{"n": 1}, {"n": 1}, {"n": 2}], r"state\['n'\]"),
        ([{"n": [1, {"x": 0.5}]}, {"n": [1, {"x": 0.25}]}, {"n": [1, {"x": 0.5}]}], r"state\['n'\]\[1\]\['x'\]"),
        ([{"n": np.arange(3)}, {"n": np.arange(3)}, {"n": np.arange(3) + 1}], "n differs between ranks 0 and 2"),
        ([{"n": np.arange(3)}, {"n": np.arange(4)}, {"n": np.arange(3)}], r"state\['n'\]"),
        ([{}, {"n": 1}, {}], "state differs between ranks 0 and 1"),
    ],
)
def test_values_that_differ_between_ranks_need_the_same_number_of_ranks(
    tmp_path: Path, private: list[dict[str, Any]], place: str
) -> None:
    saved = save(tmp_path, [{**state, **own} for state, own in zip(by_rows(), private, strict=True)])
    for rank in range(3):
        assert np.array_equal(saved.load(rank, 3)["w"], VALUES)
    with pytest.raises(ReshardError, match=place):
        saved.load(0, 2)


def test_parts_without_shards_need_the_same_number_of_ranks(tmp_path: Path) -> None:
    saved = save(tmp_path, [{"n": 1}, {"n": 1}])
    assert saved.load(1, 2) == {"n": 1}
    with pytest.raises(ReshardError, match="saved with all_ranks=True by 2 ranks and cannot be split over 3"):
        saved.load(0, 3)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([[ROWS[0]], [ROWS[1]], []], r"16 of 24 elements are there, in the parts of ranks \[0, 1, 2\]"),
        ([[ShardIndex((0, 0), (3, 4))], [ROWS[1]], [ROWS[2]]], r"\[0:3, 0:4\] and \[2:4, 0:4\] overlap"),
    ],
)
def test_missing_or_overlapping_shards_are_corrupt(
    tmp_path: Path, indices: list[list[ShardIndex]], message: str
) -> None:
    saved = save(tmp_path, [{"w": Sharded(VALUES, own)} for own in indices])
    with pytest.raises(CheckpointCorruptError, match=r"state\['w'\], of shape \(6, 4\).*" + message):
        saved.load(0, 3)


def test_shard_that_two_ranks_saved_is_read_once(tmp_path: Path) -> None:
    saved = save(tmp_path, [{"w": Sharded(VALUES, own)} for own in ([ROWS[0]], [ROWS[0], ROWS[1]], [ROWS[2]])])
    assert np.array_equal(saved.load(0, 2)["w"], VALUES)


def test_missing_part_is_corrupt(tmp_path: Path) -> None:
    saved = save(tmp_path, by_rows())
    del saved.manifest.parts[1]
    with pytest.raises(CheckpointCorruptError, match=r"16 of 24 elements are there, in the parts of ranks \[0, 2\]"):
        saved.load(0, 3)


def test_different_shapes_on_ranks_are_corrupt(tmp_path: Path) -> None:
    other = np.zeros((6, 5), np.float32)
    saved = save(tmp_path, [{"w": Sharded(VALUES, ROWS)}, {"w": Sharded(other, [])}])
    with pytest.raises(CheckpointCorruptError, match=r"state\['w'\] is .*\(6, 4\).*\(6, 5\)"):
        saved.load(0, 2)


def test_only_needed_files_are_read_and_checked(tmp_path: Path) -> None:
    saved = save(tmp_path, by_rows())
    damaged = Path(saved.folder.path_of(f"{part_prefix(1, 2)}.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    array = saved.load(0, 2)["w"]
    assert np.array_equal(array[:4], VALUES[:4]) and saved.failures == []
    with pytest.raises(CheckpointCorruptError, match="does not match its checksum"):
        array[3:5]
    assert len(saved.failures) == 1
    damaged.unlink()
    with pytest.raises(CheckpointCorruptError, match="is missing"):
        np.asarray(saved.load(0, 2)["w"])


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.update({"['w']": 5}),
        lambda table: table["['w']"].__setitem__(0, "no dtype"),
        lambda table: table["['w']"].__setitem__(1, [6, -4]),
        lambda table: table["['w']"].__setitem__(1, [1 << 61, 1 << 61]),
        lambda table: table["['w']"][2][0].__setitem__(2, "nowhere"),
        lambda table: table["['w']"][2][0].__setitem__(1, [7, 4]),
        lambda table: table["['w']"].__setitem__(0, "float64"),
        lambda table: table.clear(),
    ],
)
def test_damaged_table_of_shards_is_corrupt(tmp_path: Path, change: Any) -> None:
    saved = save(tmp_path, [{"w": Sharded(VALUES, ROWS)}, {"w": Sharded(VALUES, [])}])
    name = f"{part_prefix(1, 0)}.json"
    path = Path(saved.folder.path_of(name))
    document = json.loads(path.read_text())
    change(document["shards"])
    data = json.dumps(document).encode()
    path.write_bytes(data)
    entries = saved.manifest.parts[0]
    entries[:] = [type(entry)(name, len(data), zlib.crc32(data)) if entry.name == name else entry for entry in entries]
    with pytest.raises(CheckpointCorruptError):
        np.asarray(saved.load(0, 2)["w"])


def rows_of_blocks() -> list[dict[str, Any]]:
    """The states of two ranks whose files have three blocks each; a row of 1 MB is in one or two blocks."""
    values = np.arange(40 * (1 << 17), dtype=np.float64).reshape(40, 1 << 17)
    halves = [ShardIndex((0, 0), (20, 1 << 17)), ShardIndex((20, 0), (40, 1 << 17))]
    return [{"w": Sharded(values, [index])} for index in halves]


@pytest.mark.parametrize("has_blocks", [True, False], ids=["blocks", "older"])
def test_what_is_read_is_compared_with_checksums_of_its_blocks(tmp_path: Path, has_blocks: bool) -> None:
    states = rows_of_blocks()
    saved = save(tmp_path, states)
    saved.manifest = Manifest.from_json(saved.manifest.to_json())
    path = saved.folder.path_of(f"{part_prefix(1, 0)}.safetensors")
    if not has_blocks:
        for entries in saved.manifest.parts.values():
            entries[:] = [entry._replace(blocks=()) for entry in entries]
    with open(path, "r+b") as file:  # in row 12, which is in the second block
        file.seek((12 << 20) + 5000)
        file.write(b"?")
    array = saved.load(0, 4)["w"]
    for rows in (slice(20, 40), slice(0, 7), slice(3, 5), slice(16, 22)):
        if has_blocks or rows.start == 20:
            np.testing.assert_array_equal(array[rows], states[0]["w"].values[rows])
    assert not saved.failures
    for rows in (slice(12, 13), slice(9, 10), slice(0, 40), slice(7, 9)):
        with pytest.raises(CheckpointCorruptError, match="does not match its checksum"):
            array[rows]
    assert len(saved.failures) == 4


def test_saved_array_is_read_by_slices(tmp_path: Path) -> None:
    array = save(tmp_path, by_rows()).load(0, 2)["w"]
    assert repr(array) == "SavedArray(state['w'], shape=(6, 4), dtype=float32)"
    with pytest.raises(TypeError, match="is read by slices"):
        array[0]
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(array, copy=False)


def test_saving_a_saved_array_is_refused(tmp_path: Path) -> None:
    loaded = save(tmp_path, by_rows()).load(0, 2)
    with pytest.raises(CheckpointError, match=r"SavedArray\(state\['w'\].* was loaded but not restored"):
        take_snapshot(loaded, StagingPool(1), shards=ShardWriter(2))
