"""Writes down which tests have begun and how each ended, while they run: tools/run_tests.py reads it.

One JSON object a line: a test that begins, or the report of its set-up, its call or its tear-down.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


def add_option(parser: pytest.Parser) -> None:
    """Add the option that asks for the file."""
    parser.addoption("--record", type=Path, metavar="FILE", help="write which tests begin and end: tools/run_tests.py")


def record_if_asked(config: pytest.Config) -> None:
    if (path := config.getoption("--record")) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


class Recorder:
    """A plugin of pytest's main process, which receives the events of all its workers."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, is_start=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        text = _text_of(report) if report.failed else ""
        self._write(test=report.nodeid, when=report.when, outcome=report.outcome, duration_s=report.duration, text=text)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(test=nodeid, is_end=True)

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")


def _text_of(report: Any) -> str:
    """Return the failure and all that the test printed."""
    captured = (f"--- {title} ---\n{text}" for title, text in report.sections)
    return "\n".join([str(report.longrepr), *captured])


@dataclass
class Records:
    """What a run of pytest has recorded so far."""

    #: Tests that have begun and not ended, in the order in which they began.
    running: dict[str, None] = field(default_factory=dict)
    #: The first failure of each test that failed.
    failures: dict[str, str] = field(default_factory=dict)
    #: Seconds of each test, with its set-up and tear-down.
    durations_s: dict[str, float] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)

    @property
    def num_passed(self) -> int:
        return len(self.durations_s) - len(self.skipped) - len(self.failures)


def read_records(lines: Iterable[str]) -> Records:
    """Read what a `Recorder` wrote; a last line that is cut off is left out."""
    records = Records()
    for event in _events(lines):
        test = event["test"]
        if event.get("is_start"):
            records.running[test] = None
        elif event.get("is_end"):
            records.running.pop(test, None)
        else:
            records.durations_s[test] = records.durations_s.get(test, 0.0) + event["duration_s"]
            if event["outcome"] == "failed":
                records.failures.setdefault(test, event["text"])
            elif event["outcome"] == "skipped":
                records.skipped.add(test)
    records.skipped -= records.failures.keys()
    return records


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.endswith("\n"):
            yield json.loads(line)
