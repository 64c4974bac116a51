"""Read the file of an offline W&B run: the records that W&B would receive."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from support.poll import until

BLOCK_BYTES, HEADER_BYTES = 32768, 7


def records(data: bytes) -> list[Any]:
    """Return the records of an offline run's file: LevelDB's log format after seven bytes of identification."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, parts, position = [], b"", HEADER_BYTES
    while position + HEADER_BYTES <= len(data):
        if BLOCK_BYTES - position % BLOCK_BYTES < HEADER_BYTES:  # too little for a header: the block is padded
            position += BLOCK_BYTES - position % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER_BYTES])
        parts += data[position + HEADER_BYTES : position + HEADER_BYTES + length]
        position += HEADER_BYTES + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def read(run_dir: Path) -> list[Any]:
    """Return the records of a finished run. The service writes the last ones after `finish` returned."""
    (file,) = run_dir.rglob("run-*.wandb")
    until(lambda: exit_codes(records(file.read_bytes())), timeout_s=20)
    return records(file.read_bytes())


def rows(found: list[Any]) -> list[dict[str, Any]]:
    history = [record.history for record in found if record.WhichOneof("record_type") == "history"]
    return [{_key(item): json.loads(item.value_json) for item in row.item} for row in history]


def updates(found: list[Any], kind: str) -> dict[str, Any]:
    """Return the last value of each item of the run's ``config`` or ``summary``."""
    items = [item for record in found for item in getattr(getattr(record, kind), "update", ())]
    if kind == "config":
        items += [item for record in found for item in record.run.config.update]
    return {_key(item): json.loads(item.value_json) for item in items}


def exit_codes(found: list[Any]) -> list[int]:
    return [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"]


def _key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)
