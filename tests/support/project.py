"""The files and modules of the project."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "raysgd"
FOLDERS = ("raysgd", "tests", "examples", "benchmarks", "tools", "doc", ".github", ".ci")


def modules() -> list[str]:
    """Return the dotted names of all modules of the package, without importing any."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def files(*suffixes: str) -> Iterator[Path]:
    """Yield the project's own files that end in one of `suffixes`, in its root and its folders."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += sorted((ROOT / folder).rglob("*"))
    for path in sorted(found):
        if path.is_file() and path.name.endswith(suffixes) and "__pycache__" not in path.parts:
            yield path


def name_of(path: Path) -> str:
    """Return a path as the tests show it, relative to the root of the project."""
    return path.relative_to(ROOT).as_posix()
