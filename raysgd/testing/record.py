"""The history of a run, as the checks take it. Only `read_stored` reads files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd.checkpoint.checkpoint import load_state
from raysgd.checkpoint.format.manifest import MANIFEST_NAME, ROUND_NAME, Manifest, verify_files
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.errors import CheckpointError, CheckpointNotFoundError, UnsafeStateError


@dataclass(frozen=True)
class Stored:
    """The folder of a checkpoint on storage.

    Attributes:
        manifest: The manifest; None if it is missing or invalid.
        problem: Why the checkpoint cannot be loaded; empty if it can.
        unlisted: The names in the folder that the manifest does not list.
    """

    manifest: Manifest | None = None
    problem: str = ""
    unlisted: tuple[str, ...] = ()


@dataclass(frozen=True)
class History:
    """The files that a run has left behind.

    Attributes:
        frames: The frames of its journal, in order.
        stored: The checkpoints on storage, by number.
        max_failures: The number of allowed retries; below 0: any number; None: unknown.
        within_s: The longest time that the run may go without progress.
    """

    frames: Sequence[Frame]
    stored: Mapping[int, Stored] = field(default_factory=dict)
    max_failures: int | None = None
    within_s: float | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the run has ended; otherwise it was lost, perhaps with the end of its journal."""
        return any(frame.kind == frames.RUN_CLOSED for frame in self.frames)

    @property
    def outcome(self) -> dict[str, Any]:
        """The data of the run's end; empty if it has none."""
        ends = [frame.data for frame in self.frames if frame.kind == frames.RUN_END]
        return ends[-1] if ends else {}


@dataclass
class Span:
    """The frames from the start of an attempt to the start of the next one; without ``start``, those before the first."""

    start: Frame | None
    frames: list[Frame] = field(default_factory=list)

    @property
    def attempt(self) -> int:
        return 0 if self.start is None else self.start.attempt

    @property
    def world_size(self) -> int:
        return 0 if self.start is None else int(self.start.data["world_size"])

    @property
    def num_ends(self) -> int:
        """The number of frames with this attempt's end; a restarted controller may also write the end of an earlier one."""
        return sum(frame.kind == frames.ATTEMPT_END and frame.attempt == self.attempt for frame in self.frames)

    @property
    def is_ended(self) -> bool:
        """Whether this attempt has ended, or a later one that is in no file: its TrainerActor died before it wrote that."""
        return any(frame.kind == frames.ATTEMPT_END and frame.attempt >= self.attempt for frame in self.frames)

    @property
    def inside(self) -> list[Frame]:
        """The frames before the attempt's end."""
        kinds = [frame.kind for frame in self.frames]
        return self.frames[: kinds.index(frames.ATTEMPT_END)] if frames.ATTEMPT_END in kinds else self.frames

    @property
    def is_entered(self) -> bool:
        """Whether a rank has entered train_func."""
        return any(data["attempt"] == self.attempt for data in events(self.frames, "entered"))

    @property
    def next_attempt(self) -> int:
        """The number of the next attempt; a restarted controller does not use a number again."""
        restarts = [data["attempt"] + 1 for data in events(self.frames, "controller_restart")]
        return max(restarts) if restarts else max(1, self.attempt + self.is_entered)


def spans(of: Iterable[Frame]) -> list[Span]:
    """Split the frames into attempts; the first span has the frames before the first attempt."""
    found = [Span(None)]
    for frame in of:
        if frame.kind == frames.ATTEMPT:
            found.append(Span(frame))
        else:
            found[-1].frames.append(frame)
    return found


def events(of: Iterable[Frame], kind: str) -> Iterator[dict[str, Any]]:
    """Yield the data of the events of a kind."""
    for frame in of:
        if frame.kind == frames.EVENT and frame.data["kind"] == kind:
            yield frame.data["data"]


def committed(of: Iterable[Frame]) -> dict[int, dict[str, Any]]:
    """Return the latest data of each committed checkpoint that was not deleted, by number."""
    known: dict[int, dict[str, Any]] = {}
    for frame in of:
        if frame.kind in (frames.CHECKPOINT, frames.CHECKPOINT_SCORED):
            known[frame.data["number"]] = frame.data | {"attempt": frame.attempt}
        elif frame.kind == frames.CHECKPOINT_DELETED:
            known.pop(frame.data["number"], None)
    return known


def read_stored(store: CheckpointStore) -> dict[int, Stored]:
    """Read all files of each checkpoint, and check whether it can be loaded."""
    return {number: _read_one(store, number) for number in store.numbers()} if store.storage.exists() else {}


def _read_one(store: CheckpointStore, number: int) -> Stored:
    folder = store.directory(number)
    try:
        manifest = store.read(number)
    except CheckpointNotFoundError:
        return Stored(unlisted=tuple(folder.list_names()))
    except CheckpointError as error:
        return Stored(problem=str(error))
    listed = {entry.name.partition("/")[0] for entries in manifest.parts.values() for entry in entries}
    unlisted = tuple(name for name in folder.list_names() if name not in listed | {MANIFEST_NAME, ROUND_NAME})
    return Stored(manifest, _problem_of(folder, manifest), unlisted)


def _problem_of(folder: Storage, manifest: Manifest) -> str:
    try:
        verify_files(folder, manifest, checksums=True)
        for rank in manifest.parts if not manifest.is_files else ():
            load_state(folder, manifest, rank, allow_pickle=False)
    except UnsafeStateError:  # saved with allow_pickle: a check must not run its code
        return ""
    except CheckpointError as error:
        return str(error)
    return ""
