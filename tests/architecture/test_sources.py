"""What holds for every source file."""

from __future__ import annotations

import ast
import re

from support.project import PACKAGE, ROOT, files, name_of

MAX_LINES = 620  # "some 600"
# An absolute path of one machine. Written in two parts, so that this file passes its own test.
MACHINE_PATH = re.compile(r"(?<![\w./}])/" + r"(?:work|root|home|Users|opt)/\w")
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = (".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".sh", ".ipynb", ".json", "Makefile", "run")


def test_every_module_has_a_docstring() -> None:
    without = [name_of(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert not without


def test_no_file_is_too_long() -> None:
    num_lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files(".py")}
    assert not {name: number for name, number in num_lines.items() if number > MAX_LINES}, "split these by role"


def test_no_file_names_a_path_of_a_machine() -> None:
    found = [name_of(path) for path in files(*TEXTS) if MACHINE_PATH.search(path.read_text(encoding="utf-8"))]
    assert not found


def test_every_package_of_the_distribution_has_an_init() -> None:
    folders = {path.parent for path in SOURCES}
    missing = [name_of(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing


def test_the_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert "py.typed" in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_no_assert_is_a_conditional_expression() -> None:
    """`assert a == b if c else d` is `(a == b) if c else d`, which passes for every d that is true."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in files(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.IfExp)
    ]
    assert not found, "compare with one expected value, or write an if statement"
