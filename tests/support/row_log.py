"""What train functions of tests log of the rows that they read, and which of them made the final weights.

Each attempt has a file for each rank, named ``attempt-first-rank`` with the steps before it, of lines ``step epoch row``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

#: No step of a test is this late.
NEVER = 10**9


def attempt_starts(folder: Path) -> dict[int, int]:
    """Return the steps before each attempt."""
    return {attempt: first for attempt, first, _ in (map(int, path.name.split("-")) for path in folder.glob("*-*-*"))}


def ends_of_attempts(folder: Path) -> dict[int, int]:
    """Return the last step of each attempt that no later attempt repeated."""
    starts = attempt_starts(folder)
    return {
        attempt: min((first for other, first in starts.items() if other > attempt), default=NEVER) for attempt in starts
    }


def rows_that_count(folder: Path) -> Counter[tuple[int, int]]:
    """Return how often each epoch's rows were trained on, without what was lost because a later attempt began before it."""
    ends = ends_of_attempts(folder)
    seen: Counter[tuple[int, int]] = Counter()
    for path in folder.glob("*-*-*"):
        until = ends[int(path.name.split("-")[0])]
        for line in path.read_text().splitlines():
            step, epoch, row = map(int, line.split())
            if step <= until:
                seen[epoch, row] += 1
    return seen
