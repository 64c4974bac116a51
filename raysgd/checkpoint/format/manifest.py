"""The manifest of a checkpoint: its metadata, and the files that belong to it with their sizes and checksums.

Only the control plane writes it, once, and last: a folder without a manifest is not a checkpoint. In a loop that saves before
it reports, the round of the checkpoint is known later, and is written to ``round.json``: the manifest with that round, without
parts and rank states. That file may be missing, because the journal of the run is the record of its reports.

The control plane, workers and drivers read manifests, possibly from a place where others can write, so `Manifest.from_json`
checks everything. No NumPy.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from raysgd.checkpoint.codecs.tree import decode_small, encode_small
from raysgd.checkpoint.format.json import parse_json
from raysgd.checkpoint.storage.files import Checksum, Written, chunks_of
from raysgd.checkpoint.storage.names import FileEntry, check_name, check_relative_path, num_blocks
from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, ConfigError, ReshardError

MANIFEST_NAME = "manifest.json"
ROUND_NAME = "round.json"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 256 << 20  # larger files are not read
_FORMAT = "raysgd-checkpoint"
_MAX_JSON_DEPTH = 500  # a state of 200 levels takes two of these each, at most
_MAX_INT = 1 << 63
_SEAL = b',\n "crc32": %d\n}'


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A committed checkpoint.

    Attributes:
        number: The checkpoint's number in its run.
        attempt: The attempt that saved it.
        iteration: ``training_iteration`` when it was saved.
        time_total_s: Seconds of training when it was saved.
        world_size: Number of ranks that saved it.
        created_s: Unix time.
        metrics: Metrics that score it, which may be NaN or infinite.
        all_ranks: Each rank has a part of its own; otherwise one part serves all ranks.
        is_files: The parts are the user's own files, not states.
        allow_pickle: It was saved with ``allow_pickle=True``.
        is_reshardable: The parts have array shards and are equal in everything else: any number of ranks can load them.
        awaits_round: It was saved before the report that it belongs to, and that round is not known here.
        parts: The files of each rank's part.
        rank_states: Each rank's data position and generator states, as JSON that this module does not interpret.
        format_version: Version of this layout.
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
    allow_pickle: bool = False
    is_reshardable: bool = False
    awaits_round: bool = False
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

    def with_round(self, metrics: Mapping[str, Any], time_total_s: float) -> Manifest:
        """Return the checkpoint with the round that it belongs to: a run resumes after it. What it has already stays."""
        if not self.awaits_round:
            return self
        return dataclasses.replace(
            self,
            iteration=self.iteration + 1,
            metrics=self.metrics or dict(metrics),
            time_total_s=max(self.time_total_s, time_total_s),
            awaits_round=False,
        )

    def to_json(self) -> bytes:
        """Make the content of ``manifest.json``.

        Raises:
            CheckpointError: JSON cannot hold the metrics or the rank states.
        """
        document = {"format": _FORMAT, **{key: getattr(self, name) for name, key in _KEYS.items()}}
        document["metrics"] = encode_small(self.metrics, what="metrics")
        document["parts"] = {str(rank): [_describe(entry) for entry in part] for rank, part in self.parts.items()}
        document["rank_states"] = {str(rank): state for rank, state in self.rank_states.items()}
        try:
            data = seal(document)
            same = json.loads(data)["rank_states"] == document["rank_states"]
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the rank states of checkpoint {self.number} are not JSON: {error}") from error
        if not same:  # tuples or int keys, which JSON changes silently
            raise CheckpointError(
                f"the rank states of checkpoint {self.number} are not plain JSON; pass them through encode_small"
            )
        return data

    @classmethod
    def from_json(cls, data: bytes, where: str = MANIFEST_NAME) -> Manifest:
        """Parse the content of ``manifest.json``.

        Raises:
            CheckpointCorruptError: Anything in it is wrong; the message begins with ``where``.
        """
        document = parse_json(data, where, max_depth=_MAX_JSON_DEPTH)
        if isinstance(document, dict):
            document = {**_ADDED, **document}
        _check_document(document, data, where)
        try:
            fields = {name: document[key] for name, key in _KEYS.items()}
            fields["metrics"] = decode_small(document["metrics"], what="metrics", where=where)
            fields["parts"] = {_rank(rank): _entries(part) for rank, part in document["parts"].items()}
            fields["rank_states"] = {_rank(rank): state for rank, state in document["rank_states"].items()}
            return cls(**fields)
        except CheckpointCorruptError:
            raise
        except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointCorruptError(f"{where} is not a valid manifest: {error}") from error


def seal(document: dict[str, Any]) -> bytes:
    """Format a manifest's JSON, one field per line. The last field is a checksum of all others: no other file lists one."""
    lines = [f' "{name}": {json.dumps(value, allow_nan=False)}' for name, value in document.items()]
    head = ("{\n" + ",\n".join(lines)).encode()
    return head + _SEAL % zlib.crc32(head)


def _check_document(document: Any, data: bytes, where: str) -> None:
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise CheckpointCorruptError(f"{where} is not the manifest of a raysgd checkpoint")
    if document.get("format_version") != FORMAT_VERSION:
        version = document.get("format_version")
        raise CheckpointCorruptError(f"{where} has format_version {version!r:.50}; this raysgd reads {FORMAT_VERSION}")
    head = data[: data.rfind(_SEAL[:8])]
    if data != head + _SEAL % zlib.crc32(head):
        raise CheckpointCorruptError(f"{where} does not match its own checksum")
    known = {"format", "crc32", *_KEYS.values()}
    if set(document) != known:
        odd = sorted(set(document) ^ known)
        raise CheckpointCorruptError(f"{where} is not a valid manifest: missing or unknown {', '.join(odd):.200}")


def _check_entry(entry: Any, is_files: bool) -> str:
    if (
        not isinstance(entry, FileEntry)
        or not _is_count(entry.size)
        or not _is_crc32(entry.crc32)
        or not _are_blocks(entry)
    ):
        raise CheckpointError(f"a manifest cannot list the file {entry!r:.200}")
    try:
        return check_relative_path(entry.name, "file") if is_files else check_name(entry.name, "file")
    except ConfigError as error:
        raise CheckpointError(f"a manifest cannot list this file: {error}") from error


def _entries(part: Any) -> list[FileEntry]:
    if not isinstance(part, list):
        raise TypeError(f"a part is a list of files, not {part!r:.50}")
    return [FileEntry(**{**entry, "blocks": tuple(entry.get("blocks", ()))}) for entry in part]


def _describe(entry: FileEntry) -> dict[str, Any]:
    return {name: value for name, value in entry._asdict().items() if name != "blocks" or value}


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or str(int(text)) != text:
        raise ValueError(f"{text!r:.50} is not a rank")
    return int(text)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_INT


def _is_crc32(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _are_blocks(entry: FileEntry) -> bool:
    blocks = entry.blocks
    return blocks == () or (
        type(blocks) is tuple and len(blocks) == num_blocks(entry.size) - 1 and all(map(_is_crc32, blocks))
    )


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
    **dict.fromkeys(("all_ranks", "is_files", "allow_pickle", "is_reshardable", "awaits_round"), _is_bool),
    "metrics": _is_metrics,
    "parts": _is_by_rank(list),
    "rank_states": _is_by_rank(dict),
}
#: Defaults of fields that older manifests lack.
_ADDED: Mapping[str, Any] = {"is_reshardable": False, "awaits_round": False}
#: The key of each field in the file. Version 1 of the format calls ``allow_pickle`` ``trusted``.
_KEYS = {spec.name: "trusted" if spec.name == "allow_pickle" else spec.name for spec in dataclasses.fields(Manifest)}

# -- comparing files with the manifest -------------------------------------------------------------------


def verify_files(directory: Storage, manifest: Manifest, *, checksums: bool) -> None:
    """Check all files of a checkpoint.

    Args:
        directory: The checkpoint's folder.
        manifest: Its manifest.
        checksums: Read the files and compare checksums; otherwise compare sizes only.

    Raises:
        CheckpointCorruptError: Names the first file that is missing or does not match.
    """
    for entries in manifest.parts.values():
        verify_entries(directory, entries, checksums=checksums)


def verify_entries(directory: Storage, entries: Iterable[FileEntry], *, checksums: bool) -> None:
    """Check some files of a checkpoint; see `verify_files`."""
    for entry in entries:
        check_size(directory, entry)
        if checksums and directory.read_with(entry.name, _checksum).crc32 != entry.crc32:
            raise mismatch(directory, entry)


def check_size(directory: Storage, entry: FileEntry) -> None:
    """Raise CheckpointCorruptError unless the file exists and has the size that the manifest lists."""
    path = directory.path_of(entry.name)
    try:
        size = directory.size(entry.name)
    except CheckpointNotFoundError as error:
        raise CheckpointCorruptError(f"{path} is missing, though the manifest lists it") from error
    if size != entry.size:
        raise CheckpointCorruptError(f"{path} has {size:,} bytes; the manifest says {entry.size:,}")


def mismatch(directory: Storage, entry: FileEntry) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{directory.path_of(entry.name)} does not match its checksum in the manifest")


def _checksum(stream: BinaryIO) -> Written:
    with Checksum() as checksum:
        for chunk in chunks_of(stream):
            checksum.update(chunk)
        return checksum.result()


def missing_part_error(
    where: str, manifest: Manifest, ranks: Iterable[int], rank: int, world_size: int | None
) -> ReshardError:
    """Make the error for a rank whose part is missing.

    Args:
        where: The checkpoint.
        manifest: Its manifest.
        ranks: Ranks that have parts in it.
        rank: The rank that loads.
        world_size: Number of ranks that load. None: one process that asked for this rank's part.
    """
    saved_by = manifest.world_size
    if world_size in (None, saved_by):
        return ReshardError(f"{where} has no part of rank {rank}; it has those of ranks {sorted(ranks)}.")
    return ReshardError(
        f"{where} was saved with all_ranks=True by {saved_by} ranks and cannot be split over {world_size}; "
        f"run with num_workers={saved_by}, or save the whole state from rank 0."
    )
