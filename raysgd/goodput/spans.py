"""The steps of a rank in detail, as a file holds them: when each use of its time began. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

#: The folder of these files in a run's folder.
FOLDER = "trace"
#: What a step has in place of uses that are too many.
MANY = "many short uses"
#: zlib's number for the format of gzip.
_GZIP = 31


def file_name(attempt: int, rank: int) -> str:
    """Return the name of a rank's file in `FOLDER`."""
    return f"attempt_{attempt:04d}_rank_{rank:05d}.json.gz"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return the attempt and the rank whose file has this name; None for other names."""
    words = name.removesuffix(".json.gz").split("_")
    is_file = len(words) == 4 and words[::2] == ["attempt", "rank"] and words[1].isdigit() and words[3].isdigit()
    return (int(words[1]), int(words[3])) if is_file else None


@dataclass(frozen=True)
class Step:
    """A step of a rank. Times are in microseconds of its node's monotonic clock.

    Attributes:
        number: Its number in the attempt, from 1; 0: the time before the first one.
        reports: The reports that the rank had made in the attempt when it began.
        uses: When each use began, and its name; the first one begins with the step.
        end: When the next step began, or the newest moment that is known.
    """

    number: int
    reports: int
    uses: tuple[tuple[int, str], ...]
    end: int

    @classmethod
    def of(cls, numbers: Sequence[float], now: float, names: Sequence[str], max_changes: int) -> Step:
        """Return the step that a worker has recorded.

        Args:
            numbers: As `raysgd.session.progress.SpanRecorder.copy` has them, in seconds.
            now: When the step ends, if it runs.
            names: The uses by their indices.
            max_changes: Of so many changes, the last one stands for all that came after it, too.
        """
        number, reports, *flat = numbers
        changes = [(round(at * 1e6), int(use)) for at, use in zip(flat[::2], flat[1::2], strict=False)]
        uses = [(at, names[use]) for at, use in changes if use >= 0]
        if len(uses) == max_changes:
            uses[-1] = uses[-1][0], MANY
        end = next((at for at, use in changes if use < 0), round(now * 1e6))
        return cls(int(number), int(reports), tuple(uses), max(end, uses[-1][0]))

    @property
    def start(self) -> int:
        return self.uses[0][0]

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Return the uses with their begins and ends, which leave nothing of the step out."""
        for (start, use), end in zip(self.uses, [*[start for start, _ in self.uses[1:]], self.end], strict=True):
            if end > start:
                yield use, start, end


@dataclass(frozen=True)
class RankSteps:
    """The kept steps of a rank in an attempt.

    Attributes:
        node: Its node.
        iterations_before: The rounds of the run before the attempt.
        clock_s: What is added to the monotonic clock of its node to get seconds since the epoch.
        error_s: How wrong that may be, compared with the controller's clock; None: it is by the clock of the node itself.
        is_over: The rank has left train_func.
    """

    attempt: int
    rank: int
    node: str
    iterations_before: int
    clock_s: float
    error_s: float | None
    is_over: bool
    steps: tuple[Step, ...] = field(repr=False)

    def encode(self) -> bytes:
        """Return the content of the file."""
        names: dict[str, int] = {}
        rows = []
        for step in self.steps:
            row, before = [step.number, step.reports, step.start, step.end - step.start], step.start
            for at, use in step.uses:
                row += (at - before, names.setdefault(use, len(names)))
                before = at
            rows.append(row)
        content = {**vars(self), "uses": list(names), "steps": rows}
        return zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 3, _GZIP)

    @classmethod
    def decode(cls, data: bytes) -> RankSteps:
        """Return the content of a file that `encode` has made."""
        content: dict[str, Any] = json.loads(zlib.decompress(data, _GZIP))
        names = content.pop("uses")
        return cls(**{**content, "steps": tuple(_decode_step(row, names) for row in content["steps"])})


def _decode_step(row: list[int], names: list[str]) -> Step:
    number, reports, start, length, *changes = row
    uses, at = [], start
    for after, use in zip(changes[::2], changes[1::2], strict=True):
        at += after
        uses.append((at, names[use]))
    return Step(number, reports, tuple(uses), start + length)
