"""Every promise of doc/protocol.md has a test that exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from raysgd.testing.faults import PROCESSES
from support.project import ROOT
from support.promises import process_tests, promises


def _names(path: Path) -> set[str]:
    """Return the tests in a file, and its classes, as pytest writes them after the path."""
    found = {""}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"::{node.name}", *(f"::{node.name}::{one.name}" for one in node.body if _is_function(one))}
        elif _is_function(node):
            found.add(f"::{node.name}")
    return found


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


@pytest.mark.parametrize("promise", promises())
def test_promise_has_tests_that_exist(promise: str) -> None:
    check_tests(promises()[promise])


@pytest.mark.parametrize(("process", "fault"), process_tests())
def test_process_has_tests_that_kill_and_stop_it(process: str, fault: str) -> None:
    check_tests(process_tests()[process, fault])


def check_tests(tests: list[str]) -> None:
    assert tests, "name a test in backticks"
    for test in tests:
        file, separator, name = test.partition("::")
        assert (ROOT / file).is_file(), f"there is no file {file}"
        known = _names(ROOT / file)
        plain = separator + name.partition("[")[0]
        is_inherited = plain.rpartition("::")[0] in known and "conformance" in file
        assert plain in known or is_inherited, f"{file} has no test {name}"


def test_every_process_that_a_plan_can_stop_is_watched_by_a_process_that_is_watched() -> None:
    section = (ROOT / "doc" / "protocol.md").read_text(encoding="utf-8").partition("## Who watches whom")[2]
    rows = [line.split("|")[1:3] for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")][2:]
    by_process = {plain_name(process): by for process, by in rows}
    assert {"worker", "driver", *PROCESSES} <= by_process.keys()
    for process, by in by_process.items():
        assert any(name in by for name in (*by_process, "Ray") if name != process), f"nobody watches {process}"
    assert {plain_name(process) for process, _ in process_tests()} == by_process.keys()


def plain_name(process: str) -> str:
    return process.strip().partition(" (")[0].removesuffix(" of a lazy dataset")
