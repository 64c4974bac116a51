"""The table in doc/protocol.md that names the tests of each promise; of the tests with processes, `make test` runs these."""

from __future__ import annotations

import re
from collections.abc import Iterator

from support.project import ROOT

_HEADING = "## Which test shows it"
_ROW = re.compile(r"^\| (?P<promise>[^|]+) \| (?P<tests>[^|]+) \|$", re.MULTILINE)
_TEST = re.compile(r"`(?P<test>\w+/test_\w+\.py[^`]*)`")


def promises() -> dict[str, list[str]]:
    """Return the node ids of the tests by promise, with paths relative to the project's root."""
    page = (ROOT / "doc" / "protocol.md").read_text(encoding="utf-8")
    table = page.partition(_HEADING)[2].partition("\n## ")[0]
    rows = list(_ROW.finditer(table))[2:]
    return {row["promise"]: [f"tests/{test['test']}" for test in _TEST.finditer(row["tests"])] for row in rows}


def named_tests() -> Iterator[str]:
    """Yield every file, class or test that the table names."""
    for tests in promises().values():
        yield from tests


def is_below(node_id: str, name: str) -> bool:
    """Return whether the table names a test itself, its file or class, or the test without its parameters."""
    return node_id == name or (node_id.startswith(name) and node_id[len(name)] in ":[")
