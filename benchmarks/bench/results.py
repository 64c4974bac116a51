"""The results as one JSON document: every sample, what is made of them, and on what machine. Pure but for `load`, `save`.

::

    {"machine": {...},
     "measures": {name: {"title", "units", "measured", "quick",
                         "systems": {name: {"params", "series": {name: {"n", "median", ..., "samples"}}, "errors"}}}},
     "scale": {...},
     "rows": [...]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.stats import summarize

Document = dict[str, Any]
_NUMBERS = re.compile(r"\[[-+.\deE,\s]+\]")  # a list of numbers, which shall not take a line each


def new_document(machine: Mapping[str, Any]) -> Document:
    return {"machine": dict(machine), "measures": {}, "scale": {}, "rows": []}


def begin_measure(
    document: Document, name: str, title: str, units: Mapping[str, str], *, quick: bool, measured: str = ""
) -> None:
    """Make room for a measure; what the document had of it before is gone. ``measured``: the day."""
    document["measures"][name] = {
        "title": title,
        "units": dict(units),
        "measured": measured,
        "quick": quick,
        "systems": {},
    }


def add_samples(document: Document, measure: str, system: str, params: Mapping[str, Any], line: Any) -> None:
    """Add what one repetition gave: ``{"series": {name: samples}}`` or ``{"error": text}``.

    Beside its series, ``"errors"`` has a text for each try in it that failed.
    """
    systems = document["measures"][measure]["systems"]
    entry = systems.setdefault(system, {"params": dict(params), "series": {}, "errors": []})
    if "error" in line:
        entry["errors"].append(line["error"])
        return
    entry["errors"] += line.get("errors", [])
    for name, samples in line["series"].items():
        before = entry["series"].get(name, {}).get("samples", [])
        if samples:
            entry["series"][name] = summarize([*before, *samples])


def load(path: Path, machine: Mapping[str, Any]) -> Document:
    """The document at ``path`` if it is of this machine, else a new one."""
    if path.exists():
        document: Document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("machine") == dict(machine):
            return document
    return new_document(machine)


def save(document: Document, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_NUMBERS.sub(_on_one_line, json.dumps(document, indent=1)) + "\n", encoding="utf-8")


def _on_one_line(numbers: re.Match[str]) -> str:
    return re.sub(r"\s+", " ", numbers[0]).replace("[ ", "[").replace(" ]", "]")
