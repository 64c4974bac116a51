"""Which faults have happened: a file each, so that a fault happens once over all processes and attempts.

A mark appears whole or not at all, and for one process only: it is written aside and linked to its name.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mark:
    """That a fault happened.

    Attributes:
        index: Its place in the plan.
        attempt: The run's attempt, in which it happened.
        timestamp: When, seconds since the epoch.
        pid: In which process.
    """

    index: int
    attempt: int
    timestamp: float
    pid: int


def claim(folder: str, index: int, attempt: int) -> bool:
    """Say that a fault happens now, in this process; False where it has happened already."""
    target = Path(folder, f"fault-{index:05d}.json")
    if target.exists():
        return False
    aside = Path(folder, f".{secrets.token_hex(8)}")
    aside.write_text(json.dumps({"index": index, "attempt": attempt, "timestamp": time.time(), "pid": os.getpid()}))
    try:
        os.link(aside, target)
    except FileExistsError:
        return False
    finally:
        aside.unlink()
    return True


def read_marks(folder: str) -> list[Mark]:
    """What has happened, in the order of time."""
    marks = [Mark(**json.loads(path.read_text())) for path in Path(folder).glob("fault-*.json")]
    return sorted(marks, key=lambda mark: (mark.timestamp, mark.index))
