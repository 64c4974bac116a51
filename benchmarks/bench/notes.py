"""What train functions leave for the driver: a small file per rank, in the same way for every system."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_WORKERS = 2
#: Checkpoints that stay.
NUM_KEPT = 2


def note(config: Mapping[str, Any], name: str, rank: int, value: Any) -> None:
    """Leave ``value``; called in a worker."""
    (Path(config["out"]) / f"{name}-{rank}.json").write_text(json.dumps(value), encoding="utf-8")


def gather(folder: Path, name: str) -> list[Any]:
    """What the ranks left, by rank; the notes are gone afterwards."""
    values = []
    for rank in range(NUM_WORKERS):
        path = folder / f"{name}-{rank}.json"
        values.append(json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
    return values
