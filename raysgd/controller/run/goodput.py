"""How much of a run's time made progress that was kept, from the events of the run. Pure; used in the TrainerActor."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

#: So many marks are kept at most; beyond that every second one is dropped.
_MAX_MARKS = 4096


class Goodput:
    """Counts the seconds in which all ranks were in train_func, without those that a failure undid.

    An attempt that starts at an earlier round than the last one had reached loses the time from that round on. Pauses are not
    part of the run's time. Starts, the formation of groups and the time until a failure is noticed are.

    Args:
        now: When the run began, in seconds.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._paused_s = 0.0
        self._paused_at: float | None = None
        self._world_size = 0
        self._entered: set[int] = set()
        self._inside_since: float | None = None  # all ranks have entered train_func
        self._kept_s = 0.0  # up to then
        self._marks: list[tuple[int, float]] = [(0, 0.0)]  # rounds, and seconds of progress when they were complete
        self._saved_round = 0

    def fraction(self, now: float) -> float:
        """Return the seconds of progress per second of the run; 0 at its begin."""
        end = now if self._paused_at is None else self._paused_at
        elapsed = end - self._began - self._paused_s
        return self._progress_s(now) / elapsed if elapsed > 0 else 0.0

    def observe(self, kind: str, data: Mapping[str, Any], last_round: int, now: float) -> None:  # noqa: C901  (a dispatch)
        """Take an event of the run, and its last complete round at that time."""
        if self._inside_since is not None:
            self._mark(last_round, now)
        match kind:
            case "attempt_start":
                self._resume(now)
                self._stop(now)
                self._return_to(data["iterations_before"])
                self._world_size, self._entered = data["world_size"], set()
            case "entered":
                self._entered.add(data["rank"])
                if len(self._entered) == self._world_size and self._inside_since is None:
                    self._inside_since = now
            case "checkpoint":
                self._saved_round = max(self._saved_round, data["iteration"])
            case "failure" | "regroup":
                self._stop(now)
            case "paused":
                self._stop(now)
                self._paused_at = now
            case "resumed":
                self._resume(now)
            case "run_end":
                self._stop(now)
                if data["kind"] not in ("done", "stopped"):
                    self._return_to(self._saved_round)

    def _progress_s(self, now: float) -> float:
        return self._kept_s + (0.0 if self._inside_since is None else now - self._inside_since)

    def _mark(self, last_round: int, now: float) -> None:
        if last_round > self._marks[-1][0]:
            self._marks.append((last_round, self._progress_s(now)))
            if len(self._marks) > _MAX_MARKS:
                del self._marks[1:-1:2]

    def _stop(self, now: float) -> None:
        self._kept_s, self._inside_since = self._progress_s(now), None

    def _resume(self, now: float) -> None:
        if self._paused_at is not None:
            self._paused_s += now - self._paused_at
            self._paused_at = None

    def _return_to(self, number: int) -> None:
        """Drop the progress after a round. Between two marks, rounds are taken to be equally long."""
        place = bisect_left(self._marks, (number, 0.0))
        if place == len(self._marks):  # a run that begins with the rounds of its checkpoint
            self._kept_s = self._marks[-1][1]
        elif place == 0:
            self._kept_s = self._marks[0][1]
        else:
            (low, before), (high, after) = self._marks[place - 1], self._marks[place]
            self._kept_s = before + (after - before) * (number - low) / (high - low)
        self._marks = [*self._marks[:place], (number, self._kept_s)]
