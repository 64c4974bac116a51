"""What is known of a run that is over, for the rules it is checked by. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd.checkpoint.manifest import Manifest
from raysgd.controller import frames
from raysgd.controller.frames import Frame


@dataclass(frozen=True)
class Stored:
    """The folder of a checkpoint on storage.

    Attributes:
        manifest: None where there is none, or none that is valid.
        problem: Why it cannot be loaded.
        unlisted: Names in the folder that the manifest does not have.
    """

    manifest: Manifest | None = None
    problem: str = ""
    unlisted: tuple[str, ...] = ()


@dataclass(frozen=True)
class History:
    """A run.

    Attributes:
        frames: All that its journal has, in order.
        stored: What is on storage, by the number of the checkpoint.
        max_failures: How many retries were allowed; below 0: any number; None: not known.
        within_s: The longest time it may go without a sign of progress.
    """

    frames: Sequence[Frame]
    stored: Mapping[int, Stored] = field(default_factory=dict)
    max_failures: int | None = None
    within_s: float | None = None

    @property
    def is_closed(self) -> bool:
        """Whether it came to its end; if not it was lost, and some of its journal may be."""
        return any(frame.kind == frames.RUN_CLOSED for frame in self.frames)

    @property
    def outcome(self) -> dict[str, Any]:
        """The data of its end; empty without one."""
        ends = [frame.data for frame in self.frames if frame.kind == frames.RUN_END]
        return ends[-1] if ends else {}


@dataclass
class Span:
    """An attempt, from its beginning to that of the next one; or, without ``start``, what came before the first."""

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
        """How often its own end was told; a controller that is started again may tell that of an attempt it only knows of."""
        return sum(frame.kind == frames.ATTEMPT_END and frame.attempt == self.attempt for frame in self.frames)

    @property
    def inside(self) -> list[Frame]:
        """What came before the attempt's end."""
        kinds = [frame.kind for frame in self.frames]
        return self.frames[: kinds.index(frames.ATTEMPT_END)] if frames.ATTEMPT_END in kinds else self.frames

    @property
    def is_entered(self) -> bool:
        """Whether a rank entered train_func."""
        return any(data["attempt"] == self.attempt for data in events(self.frames, "entered"))

    @property
    def next_attempt(self) -> int:
        """The number of the attempt after it; a controller that is started again gives no number a second time."""
        restarts = [data["attempt"] + 1 for data in events(self.frames, "controller_restart")]
        return max(restarts) if restarts else max(1, self.attempt + self.is_entered)


def spans(of: Iterable[Frame]) -> list[Span]:
    """The attempts of a run; the first span is what came before them."""
    found = [Span(None)]
    for frame in of:
        if frame.kind == frames.ATTEMPT:
            found.append(Span(frame))
        else:
            found[-1].frames.append(frame)
    return found


def events(of: Iterable[Frame], kind: str) -> Iterator[dict[str, Any]]:
    """The data of the events of a kind."""
    for frame in of:
        if frame.kind == frames.EVENT and frame.data["kind"] == kind:
            yield frame.data["data"]


def committed(of: Iterable[Frame]) -> dict[int, dict[str, Any]]:
    """The checkpoints that were told of, by number, as they were described last; deleted ones are left out."""
    known: dict[int, dict[str, Any]] = {}
    for frame in of:
        if frame.kind in (frames.CHECKPOINT, frames.CHECKPOINT_SCORED):
            known[frame.data["number"]] = frame.data | {"attempt": frame.attempt}
        elif frame.kind == frames.CHECKPOINT_DELETED:
            known.pop(frame.data["number"], None)
    return known
