"""What holds for every source file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from support.project import PACKAGE, ROOT, files, name_of

MAX_LINES = 400
MAX_LINES_OF_TESTS = 600
# A path that begins at the root of somebody's machine. Written in two parts, so that this file passes its own test.
MACHINE_PATH = re.compile(r"(?<![\w./}])/" + r"(?:work|root|home|Users|opt)/\w")
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = list(files(".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".sh", ".ipynb", ".json", "Makefile", "run"))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_module_opens_with_a_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{name_of(path)} does not say what it is for"


@pytest.mark.parametrize("path", list(files(".py")), ids=name_of)
def test_file_is_not_too_long(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    limit = MAX_LINES_OF_TESTS if path.name.startswith("test_") else MAX_LINES
    assert num_lines <= limit, f"{name_of(path)} has {num_lines} lines: split it by role"


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_file_names_no_path_of_a_machine(path: Path) -> None:
    found = [line for line in path.read_text(encoding="utf-8").splitlines() if MACHINE_PATH.search(line)]
    assert not found


def test_every_package_of_the_distribution_has_an_init() -> None:
    folders = {path.parent for path in SOURCES}
    missing = [name_of(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing


def test_the_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert "py.typed" in (ROOT / "setup.py").read_text(encoding="utf-8")
