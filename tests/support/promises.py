"""The table in doc/protocol.md that names the tests of each promise; of the tests with processes, `make test` runs these."""

from __future__ import annotations

import re
from collections.abc import Iterator

from support.project import ROOT

_HEADING = "## Which test shows it"
_ROW = re.compile(r"^\| (?P<promise>[^|]+) \| (?P<tests>[^|]+) \|$", re.MULTILINE)
_OF_PROCESS = re.compile(r"^\| (?P<process>[^|]+) \| (?P<killed>[^|]+) \| (?P<stopped>[^|]+) \|$", re.MULTILINE)
_TEST = re.compile(r"`(?P<test>\w+/test_\w+\.py[^`]*)`")


def promises() -> dict[str, list[str]]:
    """Return the node ids of the tests by promise, with paths relative to the project's root."""
    return {row["promise"]: _tests_in(row["tests"]) for row in list(_ROW.finditer(_section()))[2:]}


def process_tests() -> dict[tuple[str, str], list[str]]:
    """Return the node ids of the tests in which a process is killed or stopped, by process and what happens to it."""
    rows = list(_OF_PROCESS.finditer(_section()))[2:]
    return {(row["process"], fault): _tests_in(row[fault]) for row in rows for fault in ("killed", "stopped")}


def _section() -> str:
    page = (ROOT / "doc" / "protocol.md").read_text(encoding="utf-8")
    return page.partition(_HEADING)[2].partition("\n## ")[0]


def _tests_in(cell: str) -> list[str]:
    return [f"tests/{test['test']}" for test in _TEST.finditer(cell)]


def named_tests() -> Iterator[str]:
    """Yield every file, class or test that the table names."""
    for tests in promises().values():
        yield from tests


def is_below(node_id: str, name: str) -> bool:
    """Return whether the table names a test itself, its file or class, or the test without its parameters."""
    return node_id == name or (node_id.startswith(name) and node_id[len(name)] in ":[")
