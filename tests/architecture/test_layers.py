"""The contracts on imports, which stand in pyproject.toml, hold."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.project import PACKAGE, ROOT, modules


def test_contracts_hold() -> None:
    lint_imports = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _imported(path: Path, known: set[str]) -> Iterator[str]:
    """Yield the package's modules that a file names: by imports, also for type checkers, and by `import_module`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(module)):
                names = [f"{module}.{alias.name}" for alias in node.names]
                yield from (name if name in known else module for name in names)
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module))]):
                yield module


def test_page_of_the_architecture_has_the_layers_of_the_contract() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python has it from 3.11 on
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [re.findall(r"\w+", line) for line in contract["contracts"][0]["layers"]]
    page = (ROOT / "doc" / "architecture.md").read_text(encoding="utf-8").partition("\n## Layers\n")[2]
    drawn = page.partition("```text\n")[2].partition("```")[0]
    assert [re.findall(r"\w+", line) for line in drawn.splitlines()] == layers
    exist = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert [name for line in layers for name in line if name not in exist] == []


def test_modules_have_no_circles_even_for_type_checkers() -> None:
    known = set(modules())
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = {module for module in _imported(path, known) if module in known and module != name}
    assert len(graph) == len(known) and any(graph.values())
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names a circle
