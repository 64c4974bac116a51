"""Files from untrusted sources: loading runs no code of theirs and checks all their content."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.codecs.leaves import StoredLeaf
from raysgd.checkpoint.codecs.tree import Decoder
from raysgd.checkpoint.format.manifest import Manifest, seal
from raysgd.checkpoint.format.parts import parse_tree
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, part_prefix
from raysgd.errors import CheckpointCorruptError, UnsafeStateError

STATE = {"model": {"w": torch.arange(6.0)}, "epoch": 3, "raw": b"x" * 2000}
TREE = "a0001-r00000.json"
TENSORS = "a0001-r00000.safetensors"


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def save(tmp_path: Path, state: Any = STATE, *, allow_pickle: bool = False) -> Path:
    store = CheckpointStore(Storage.from_uri(tmp_path))
    snapshot = take_snapshot(state, StagingPool(1), allow_pickle=allow_pickle)
    parts = {0: snapshot.write(store.directory(1), part_prefix(1, 0))}
    common = {"attempt": 1, "iteration": 1, "time_total_s": 1.0, "world_size": 1, "created_s": 1.0}
    return Path(store.commit(Manifest(number=1, parts=parts, allow_pickle=allow_pickle, **common)))  # type: ignore[arg-type]


def rewrite(checkpoint: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file and its manifest entry, as an attacker with write access could."""
    data = change((checkpoint / name).read_bytes())
    (checkpoint / name).write_bytes(data)
    manifest = read_manifest(checkpoint)
    for entry in manifest["parts"]["0"]:
        if entry["name"] == name:
            entry.update(size=len(data), crc32=zlib.crc32(data))
    (checkpoint / "manifest.json").write_bytes(seal(manifest))


def read_manifest(checkpoint: Path) -> Any:
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    del manifest["crc32"]
    return manifest


def change_tree(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    def rewritten(data: bytes) -> bytes:
        document = json.loads(data)
        document["state"] = change(document["state"])
        return json.dumps(document).encode()

    rewrite(checkpoint, TREE, rewritten)


def test_rewritten_checkpoint_without_changes_loads(tmp_path: Path) -> None:
    checkpoint = save(tmp_path)
    change_tree(checkpoint, lambda state: state | {"epoch": 4})
    assert Checkpoint.from_path(checkpoint).load()["epoch"] == 4


def test_pickle_in_place_of_a_leaf_does_not_run(tmp_path: Path) -> None:
    checkpoint, sign = save(tmp_path), tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(sign)).ljust(2000, b" ")
    rewrite(checkpoint, TENSORS, lambda data: data.replace(b"x" * 2000, bomb))
    assert Checkpoint.from_path(checkpoint).load()["raw"] == bomb, "the leaf must stay bytes"
    change_tree(checkpoint, lambda state: state | {"raw": ["pickle", state["raw"][1]]})
    with pytest.raises(UnsafeStateError, match=r"state\['raw'\]"):
        Checkpoint.from_path(checkpoint).load()
    assert not sign.exists()
    Checkpoint.from_path(checkpoint).load(allow_pickle=True)
    assert sign.exists(), "unpickling the bomb has no effect, so the test shows nothing"


@pytest.mark.parametrize("name", ["manifest.json", TREE, TENSORS])
def test_pickle_or_torch_file_in_place_of_a_file_does_not_run(tmp_path: Path, name: str) -> None:
    checkpoint, sign = save(tmp_path), tmp_path / "exploded"
    torch.save(Bomb(sign), tmp_path / "bomb.pt")
    for bomb in (pickle.dumps(Bomb(sign)), (tmp_path / "bomb.pt").read_bytes()):
        if name == "manifest.json":
            (checkpoint / name).write_bytes(bomb)
        else:
            rewrite(checkpoint, name, lambda data, bomb=bomb: bomb)  # type: ignore[misc]
        for allow_pickle in (False, True):
            with pytest.raises(CheckpointCorruptError, match=name):
                Checkpoint.from_path(checkpoint).load(allow_pickle=allow_pickle)
    assert not sign.exists()


def test_allow_pickle_in_the_manifest_does_not_allow_pickle(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, {"b": Bomb(tmp_path / "exploded")}, allow_pickle=True)
    assert json.loads((checkpoint / "manifest.json").read_bytes())["trusted"] is True
    with pytest.raises(UnsafeStateError):
        Checkpoint.from_path(checkpoint).load()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "node",
    [
        ["os.system", "true"],
        ["builtins.eval", "1"],
        ["np.load", "x"],
        ["torch.load", "x"],
        ["torch.ops", "x"],
        ["defaultdict", "eval", {}],
        ["torch.dtype", "_C"],
        ["__class__"],
        {"__reduce__": ["os.system", "true"]}["__reduce__"],
    ],
    ids=str,
)
def test_names_in_a_file_select_from_closed_tables_only(tmp_path: Path, node: Any) -> None:
    checkpoint = save(tmp_path)
    change_tree(checkpoint, lambda state: state | {"epoch": node})
    for allow_pickle in (False, True):
        with pytest.raises(CheckpointCorruptError, match=r"state\['epoch'\]"):
            Checkpoint.from_path(checkpoint).load(allow_pickle=allow_pickle)


@pytest.mark.parametrize("depth", [250, 5_000, 100_000])
@pytest.mark.parametrize("bracket", ["[", '{"a":', '["list",', '["tuple",'])
def test_deeply_nested_json_is_corrupt(tmp_path: Path, bracket: str, depth: int) -> None:
    checkpoint = save(tmp_path)
    close = "}" if bracket.startswith("{") else "]"
    text = '{"format":"raysgd-state","version":1,"state":' + bracket * depth + "1" + close * depth + "}"
    rewrite(checkpoint, TREE, lambda data: text.encode())
    with pytest.raises(CheckpointCorruptError):
        Checkpoint.from_path(checkpoint).load()
    (checkpoint / "manifest.json").write_text(bracket * depth + "1" + close * depth)
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.json"):
        Checkpoint.from_path(checkpoint)


def test_files_outside_the_checkpoint_are_not_read(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run")
    secret = tmp_path / "secret.json"
    secret.write_bytes((checkpoint / TREE).read_bytes())
    manifest = read_manifest(checkpoint)
    for name in (str(secret), "../../secret.json", "x/../../../secret.json"):
        for is_files in (False, True):
            manifest["is_files"] = is_files
            manifest["parts"]["0"] = [{"name": name, "size": secret.stat().st_size, "crc32": 0}]
            (checkpoint / "manifest.json").write_bytes(seal(manifest))
            with pytest.raises(CheckpointCorruptError, match=r"manifest\.json"):
                Checkpoint.from_path(checkpoint)


def test_huge_size_in_the_manifest_allocates_no_memory(tmp_path: Path) -> None:
    checkpoint = save(tmp_path)
    manifest = read_manifest(checkpoint)
    manifest["parts"]["0"][0]["size"] = 1 << 60
    (checkpoint / "manifest.json").write_bytes(seal(manifest))
    with pytest.raises(CheckpointCorruptError, match="the manifest says"):
        Checkpoint.from_path(checkpoint)


@pytest.mark.parametrize("header_bytes", [100_000_001, 1 << 40, (1 << 64) - 1])
def test_oversized_header_is_refused(tmp_path: Path, header_bytes: int) -> None:
    checkpoint = save(tmp_path)
    rewrite(checkpoint, TENSORS, lambda data: header_bytes.to_bytes(8, "little") + data[8:])
    with pytest.raises(CheckpointCorruptError, match="header"):
        Checkpoint.from_path(checkpoint).load()


@pytest.mark.parametrize("name", [TREE, TENSORS, "manifest.json"])
def test_any_bit_flip_is_found_and_names_the_file(tmp_path: Path, name: str) -> None:
    checkpoint = save(tmp_path)
    data = (checkpoint / name).read_bytes()
    for position in range(0, len(data), max(1, len(data) // 40)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        (checkpoint / name).write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError, match=name):
            Checkpoint.from_path(checkpoint).load()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.builds(
            lambda tag, values: [tag, *values],
            st.sampled_from(
                "same list tuple dict set deque odict state_dict counter defaultdict bytes bytes.leaf bytearray int "
                "float complex str slice range datetime date timedelta path random pickle np.array np.scalar np.str "
                "np.dtype np.bits np.random_state np.generator torch.tensor torch.parameter torch.sparse torch.size "
                "torch.dtype torch.device torch.generator inline".split()
            ),
            st.lists(inner | st.sampled_from(["model.w", "raw", "float32", "cpu", "PCG64", "sparse_coo"]), max_size=5),
        )
    ),
    max_leaves=12,
)


@hypothesis.settings(max_examples=300)
@hypothesis.given(node=JSON)
def test_any_damaged_tree_raises_checkpoint_corrupt_error(node: Any) -> None:
    text = json.dumps({"format": "raysgd-state", "version": 1, "state": {"model": {"w": ["list"]}, "x": node}})
    leaves = {"model.w": StoredLeaf("F32", (2,), np.zeros(8, np.uint8))}
    with contextlib.suppress(CheckpointCorruptError, UnsafeStateError):
        Decoder(leaves.__getitem__, "x.json").decode_state(parse_tree(text.encode(), "x.json")["state"])
