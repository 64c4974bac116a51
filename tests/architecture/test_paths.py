"""The two paths of doc/architecture.md name functions that exist and lead to each other."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from support.project import PACKAGE, ROOT

_PAGE = (ROOT / "doc" / "architecture.md").read_text(encoding="utf-8")
_SECTION = _PAGE.partition("\n## Two paths\n")[2].partition("\n## ")[0]
_PATHS = re.findall(r"^### ([^\n]+): (\d+) functions\n(.*?)(?=^### |\Z)", _SECTION, re.MULTILINE | re.DOTALL)
_IN_FILE = re.compile(r"((?:`[\w.]+`(?:, )?)+) \(`([\w/]+\.py)`\)")
#: Functions that something else than the path calls: the user, Ray, or the run when its attempt begins.
_BEGINNINGS = {"Trainer.run", "report", "Run._follow", "ResultStream.__next__"}


@functools.cache
def functions_of(file: str) -> dict[str, str]:
    """Return the source of each function and method of a file, by its qualified name."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for each in inside:
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[prefix + each.name] = ast.get_source_segment(text, each) or ""
    return found


def functions_on(path: str) -> list[tuple[str, str]]:
    """Return the functions that a path names, each with its file."""
    return [(name, file) for names, file in _IN_FILE.findall(path) for name in re.findall(r"[\w.]+", names)]


def test_page_has_both_paths() -> None:
    assert len(_PATHS) == 2 and all(functions_on(steps) for _, _, steps in _PATHS)


@pytest.mark.parametrize(("number", "steps"), [path[1:] for path in _PATHS], ids=["train_func", "metric"])
def test_path_names_functions_that_lead_to_each_other(number: str, steps: str) -> None:
    functions = functions_on(steps)
    assert len(functions) == len(set(functions)) == int(number)
    assert [(name, file) for name, file in functions if name not in functions_of(file)] == []
    sources = {name: functions_of(file)[name] for name, file in functions}
    for name, file in functions:  # a constructor may hand a method to a thread or a listener
        init = f"{name.rpartition('.')[0]}.__init__"
        sources[init] = functions_of(file).get(init, "")
    for name, _ in functions:
        last = name.rpartition(".")[2]
        callers = [other for other, text in sources.items() if other != name and re.search(rf"\b{last}\b", text)]
        assert callers or name in _BEGINNINGS, f"nothing on the path names {name}"
