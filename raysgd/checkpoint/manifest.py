"""The manifest of a checkpoint: what it is and which files, of which size and checksum, belong to it.

It is written last, by the control plane alone; a folder without one is no checkpoint. Read by the control plane, by
workers and by drivers, possibly from a place where others can write: `Manifest.from_json` believes nothing it did not
check.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd.checkpoint.inline import decode_small, encode_small
from raysgd.checkpoint.names import FileEntry, check_name, check_relative_path
from raysgd.checkpoint.strict_json import parse_json
from raysgd.errors import CheckpointCorruptError, CheckpointError, ConfigError

__all__ = ["FORMAT_VERSION", "MANIFEST_NAME", "FileEntry", "Manifest"]

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 256 << 20
_FORMAT = "raysgd-checkpoint"
_MAX_JSON_DEPTH = 500  # a state of 200 levels takes two of these each, at most
_MAX_INT = 1 << 63
_SEAL = b',\n "crc32": %d\n}'


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A committed checkpoint.

    Attributes:
        number: Of the checkpoint in its run.
        attempt: The attempt that made it.
        iteration: ``training_iteration`` when it was made.
        time_total_s: Of training, likewise.
        world_size: How many ranks made it.
        metrics: By which it is scored; NaN and infinities included.
        all_ranks: Each rank has a part of its own; otherwise one part serves all.
        is_files: The parts are the user's own files, not states.
        trusted: It was saved with ``trusted=True``.
        is_reshardable: The parts have pieces of arrays, and are alike in all else: any number of ranks can load them.
        created_s: Unix time.
        parts: The files of each rank's part.
        rank_states: Each rank's data position and generator states, as JSON that this module does not look into.
        format_version: Of this layout.
    """

    number: int
    attempt: int
    iteration: int
    time_total_s: float
    world_size: int
    created_s: float
    metrics: dict[str, Any] = field(default_factory=dict)
    all_ranks: bool = False
    is_files: bool = False
    trusted: bool = False
    is_reshardable: bool = False
    parts: dict[int, list[FileEntry]] = field(default_factory=dict)
    rank_states: dict[int, dict[str, Any]] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name, is_right in _FIELD_CHECKS.items():
            if not is_right(getattr(self, name)):
                raise CheckpointError(f"a manifest cannot have {name}={getattr(self, name)!r:.200}")
        names = [_check_entry(entry, self.is_files) for entries in self.parts.values() for entry in entries]
        if len(set(names)) != len(names) or MANIFEST_NAME in names:
            raise CheckpointError("a manifest lists a file twice, or itself")

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        return sum(entry.size for entries in self.parts.values() for entry in entries)

    def to_json(self) -> bytes:
        """The content of ``manifest.json``.

        Raises:
            CheckpointError: Metrics or rank states are not what JSON can hold.
        """
        document = {"format": _FORMAT, **{name: getattr(self, name) for name in _FIELDS}}
        document["metrics"] = encode_small(self.metrics, what="metrics")
        document["parts"] = {
            str(rank): [dataclasses.asdict(entry) for entry in part] for rank, part in self.parts.items()
        }
        document["rank_states"] = {str(rank): state for rank, state in self.rank_states.items()}
        try:
            data = seal(document)
            same = json.loads(data)["rank_states"] == document["rank_states"]
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the rank states of checkpoint {self.number} are no JSON: {error}") from error
        if not same:  # tuples or int keys, which JSON changes silently
            raise CheckpointError(
                f"the rank states of checkpoint {self.number} are no plain JSON; pass them through encode_small"
            )
        return data

    @classmethod
    def from_json(cls, data: bytes, where: str = MANIFEST_NAME) -> Manifest:
        """The manifest in a file's bytes.

        Raises:
            CheckpointCorruptError: Anything about it is not right; the message begins with ``where``.
        """
        document = parse_json(data, where, max_bytes=MAX_MANIFEST_BYTES, max_depth=_MAX_JSON_DEPTH)
        if isinstance(document, dict):
            document = {**_ADDED, **document}
        _check_document(document, data, where)
        try:
            fields = {name: document[name] for name in _FIELDS}
            fields["metrics"] = decode_small(document["metrics"], what="metrics", where=where)
            fields["parts"] = {_rank(rank): _entries(part) for rank, part in document["parts"].items()}
            fields["rank_states"] = {_rank(rank): state for rank, state in document["rank_states"].items()}
            return cls(**fields)
        except CheckpointCorruptError:
            raise
        except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointCorruptError(f"{where} is no valid manifest: {error}") from error


def seal(document: dict[str, Any]) -> bytes:
    """A manifest's JSON, one field a line, closed by a checksum of all before it: no other file tells of this one."""
    lines = [f' "{name}": {json.dumps(value, allow_nan=False)}' for name, value in document.items()]
    head = ("{\n" + ",\n".join(lines)).encode()
    return head + _SEAL % zlib.crc32(head)


def _check_document(document: Any, data: bytes, where: str) -> None:
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise CheckpointCorruptError(f"{where} is no manifest of a raysgd checkpoint")
    if document.get("format_version") != FORMAT_VERSION:
        version = document.get("format_version")
        raise CheckpointCorruptError(f"{where} has format_version {version!r:.50}; this raysgd reads {FORMAT_VERSION}")
    head = data[: data.rfind(_SEAL[:8])]
    if data != head + _SEAL % zlib.crc32(head):
        raise CheckpointCorruptError(f"{where} does not match its own checksum")
    if set(document) != {"format", "crc32", *_FIELDS}:
        odd = sorted(set(document) ^ {"format", "crc32", *_FIELDS})
        raise CheckpointCorruptError(f"{where} is no valid manifest: missing or unknown {', '.join(odd):.200}")


def _check_entry(entry: Any, is_files: bool) -> str:
    if not isinstance(entry, FileEntry) or not _is_count(entry.size) or not _is_crc32(entry.crc32):
        raise CheckpointError(f"a manifest cannot list the file {entry!r:.200}")
    try:
        return check_relative_path(entry.name, "file") if is_files else check_name(entry.name, "file")
    except ConfigError as error:
        raise CheckpointError(f"a manifest cannot list it: {error}") from error


def _entries(part: Any) -> list[FileEntry]:
    if not isinstance(part, list):
        raise TypeError(f"a part is a list of files, not {part!r:.50}")
    return [FileEntry(**entry) for entry in part]


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or str(int(text)) != text:
        raise ValueError(f"{text!r:.50} is no rank")
    return int(text)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_INT


def _is_crc32(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MAX_INT  # false for NaN


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_by_rank(kind: type) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return isinstance(value, dict) and all(
            _is_count(rank) and isinstance(held, kind) for rank, held in value.items()
        )

    return check


_FIELD_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("number", "attempt", "iteration", "world_size", "format_version"), _is_count),
    **dict.fromkeys(("time_total_s", "created_s"), _is_seconds),
    **dict.fromkeys(("all_ranks", "is_files", "trusted", "is_reshardable"), _is_bool),
    "metrics": _is_metrics,
    "parts": _is_by_rank(list),
    "rank_states": _is_by_rank(dict),
}
#: Fields that older manifests lack.
_ADDED: Mapping[str, Any] = {"is_reshardable": False}
_FIELDS = tuple(spec.name for spec in dataclasses.fields(Manifest))
