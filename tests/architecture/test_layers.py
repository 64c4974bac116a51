"""The contracts on imports, which stand in pyproject.toml, hold."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


def test_modules_have_no_circles_even_for_type_checkers() -> None:
    known = set(modules())
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = {module for module in _imported(path, known) if module in known and module != name}
    assert len(graph) == len(known) and any(graph.values())
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names a circle
