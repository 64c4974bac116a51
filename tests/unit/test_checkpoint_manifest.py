"""The manifest: all fields survive JSON, and invalid content is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from raysgd.checkpoint.codecs.tree import encode_small
from raysgd.checkpoint.format.manifest import Manifest, seal
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.errors import CheckpointCorruptError, CheckpointError


def make(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "number": 3,
        "attempt": 2,
        "iteration": 40,
        "time_total_s": 1.5,
        "world_size": 2,
        "created_s": 1e9,
        "metrics": {"loss": 0.5, "eval": {"acc": 0.9}},
        "all_ranks": True,
        "parts": {0: [FileEntry("a.json", 10, 7)], 1: [FileEntry("b.json", 10, 8)]},
        "rank_states": {0: {"data": [1, 2]}, 1: {}},
    }
    return Manifest(**(fields | changes))


def changed(**changes: Any) -> bytes:
    return sealed(json.loads(make().to_json()) | changes)


def sealed(document: dict[str, Any]) -> bytes:
    """Return a manifest file that another program wrote."""
    document.pop("crc32", None)
    return seal(document)


def test_manifest_survives_json() -> None:
    manifest = make()
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_manifest_is_readable_json() -> None:
    document = json.loads(make().to_json())
    assert document["format"] == "raysgd-checkpoint" and document["format_version"] == 1
    assert document["metrics"] == {"loss": 0.5, "eval": {"acc": 0.9}}
    assert document["parts"]["0"] == [{"name": "a.json", "size": 10, "crc32": 7}]


def test_keys_of_format_version_1_are_unchanged() -> None:
    document = json.loads(make(allow_pickle=True).to_json())
    assert " ".join(document) == (
        "format number attempt iteration time_total_s world_size created_s metrics all_ranks is_files trusted "
        "is_reshardable awaits_round parts rank_states format_version crc32"
    )
    assert document["trusted"] is True and Manifest.from_json(changed(trusted=True)).allow_pickle


def test_metrics_of_every_kind_survive_json() -> None:
    metrics = {
        "nan": math.nan,
        "inf": math.inf,
        "ninf": -math.inf,
        "big": 10**40,
        "list": [1, (2,)],
        "none": None,
        "t": "ä",
    }
    loaded = Manifest.from_json(make(metrics=metrics).to_json()).metrics
    assert repr(loaded) == repr(metrics)


def test_rank_states_are_kept_unchanged() -> None:
    states = {0: {"rng": encode_small((1, b"x", math.nan))}, 5: {"deep": {"a": [None, 1.5, "x"]}}}
    assert Manifest.from_json(make(rank_states=states).to_json()).rank_states == states


@pytest.mark.parametrize("state", [{"a": math.nan}, {"a": (1, 2)}, {1: 2}, {"a": b"x"}, {"a": {1, 2}}, {"a": object()}])
def test_rank_states_that_json_would_change_are_refused(state: dict[Any, Any]) -> None:
    with pytest.raises(CheckpointError, match="rank states of checkpoint 3"):
        make(rank_states={0: state}).to_json()


def test_metrics_that_only_pickle_could_hold_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"metrics\['fn'\]"):
        make(metrics={"fn": len}).to_json()


def test_user_files_may_be_in_folders() -> None:
    part = {0: [FileEntry("a0001-r00000/deep/größe 1.txt", 1, 2)]}
    manifest = make(parts=part, is_files=True)
    assert Manifest.from_json(manifest.to_json()) == manifest
    with pytest.raises(CheckpointError):
        make(parts=part, is_files=False)


BAD_NAMES = ["../x", "/etc/passwd", "a/../b", "..", ".", "", "a//b", "a\\b", "a\x00b", "a\n", "x/", "manifest.json"]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("is_files", [False, True])
def test_names_outside_the_checkpoint_are_corrupt(name: str, is_files: bool) -> None:
    parts = {"0": [{"name": name, "size": 1, "crc32": 1}]}
    with pytest.raises(CheckpointCorruptError, match=r"here/manifest\.json"):
        Manifest.from_json(changed(parts=parts, is_files=is_files), "here/manifest.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"format_version": 2},
        {"format_version": None},
        {"number": -1},
        {"number": "3"},
        {"number": 3.0},
        {"number": True},
        {"number": 1 << 63},
        {"attempt": None},
        {"iteration": []},
        {"time_total_s": "1"},
        {"time_total_s": -1.0},
        {"created_s": True},
        {"created_s": 10**400},
        {"world_size": {}},
        {"all_ranks": 1},
        {"is_files": None},
        {"trusted": "yes"},
        {"metrics": []},
        {"metrics": ["dict", [1, 2]]},
        {"metrics": ["pickle", "x"]},
        {"metrics": {"a": ["nosuch"]}},
        {"metrics": {"a": ["bytes.leaf", "x"]}},
        {"parts": []},
        {"parts": {"a": []}},
        {"parts": {"-1": []}},
        {"parts": {"01": []}},
        {"parts": {"²": []}},
        {"parts": {"0": {}}},
        {"parts": {"0": ["a.json"]}},
        {"parts": {"0": [{"name": "a", "size": 1}]}},
        {"parts": {"0": [{"name": "a", "size": 1, "crc32": 1, "mode": 7}]}},
        {"parts": {"0": [{"name": "a", "size": -1, "crc32": 1}]}},
        {"parts": {"0": [{"name": "a", "size": 1.5, "crc32": 1}]}},
        {"parts": {"0": [{"name": "a", "size": 1, "crc32": 1 << 32}]}},
        {"parts": {"0": [{"name": 3, "size": 1, "crc32": 1}]}},
        {"parts": {"0": [{"name": "a", "size": 1, "crc32": 1, "blocks": [1]}]}},
        {"parts": {"0": [{"name": "a", "size": 20 << 20, "crc32": 1, "blocks": [1]}]}},
        {"parts": {"0": [{"name": "a", "size": 20 << 20, "crc32": 1, "blocks": [1, -1]}]}},
        {"parts": {"0": [{"name": "a", "size": 20 << 20, "crc32": 1, "blocks": 7}]}},
        {"parts": {"0": [{"name": "a", "size": 1, "crc32": 1}], "1": [{"name": "a", "size": 1, "crc32": 1}]}},
        {"rank_states": []},
        {"rank_states": {"0": []}},
        {"rank_states": {"x": {}}},
        {"surprise": 1},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_wrong_fields_are_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointCorruptError, match="here"):
        Manifest.from_json(changed(**changes), "here")


@pytest.mark.parametrize("name", ["number", "metrics", "parts", "rank_states", "format"])
def test_missing_fields_are_corrupt(name: str) -> None:
    document = json.loads(make().to_json())
    del document[name]
    with pytest.raises(CheckpointCorruptError):
        Manifest.from_json(sealed(document))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        bytes(range(128, 192)),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 600 + b"]" * 600,
        make().to_json()[:-10],
        make().to_json() + b" ",
        make().to_json().replace(b'"number": 3', b'"number": 3, "number": 4'),
        make().to_json().replace(b"0.5", b"NaN"),
        make().to_json().replace(b"0.5", b"1" * 5000),
        make().to_json().replace(b"0.5", b"0.6"),
        json.dumps(json.loads(make().to_json())).encode(),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_invalid_json_is_corrupt(data: bytes) -> None:
    with pytest.raises(CheckpointCorruptError):
        Manifest.from_json(data)


def test_any_bit_flip_is_found() -> None:
    data = make().to_json()
    for position in range(len(data)):
        for bit in (0, 1, 5):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CheckpointCorruptError):
                Manifest.from_json(bytes(damaged))


@pytest.mark.parametrize(
    "changes", [{"number": -1}, {"metrics": {1: 2}}, {"parts": {"0": []}}, {"created_s": math.nan}]
)
def test_invalid_manifest_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        make(**changes)


def test_manifest_without_is_reshardable_is_read() -> None:
    document = json.loads(make().to_json())
    del document["is_reshardable"]
    assert Manifest.from_json(sealed(document)) == make()
