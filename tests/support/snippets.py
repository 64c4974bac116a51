"""The code in the project's documents: fenced blocks of Markdown, and the test headers of the examples."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from support.project import ROOT

_NO_RUN = re.compile(r"<!-- no-run: (?P<reason>.+?) -->")
_HEADER = re.compile(r"^# test:(?P<arguments>.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """A fenced block: its language, its code, its file and line, and whether it is only compiled."""

    path: Path
    line: int
    language: str
    code: str
    runs: bool

    def compiled(self) -> CodeType:
        """Compile the code with the line numbers of the document, so that a traceback shows its lines."""
        return compile("\n" * self.line + self.code, str(self.path), "exec")


def documents() -> list[Path]:
    """Return the README and all pages of the documentation."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "doc").rglob("*.md"))]


def snippets(path: Path, *languages: str) -> list[Snippet]:
    """Return the fenced blocks of a document in order, including indented blocks, as in a list."""
    found: list[Snippet] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = re.match(r"^(?P<indent> *)```(?P<language>\w*)", lines[number])
        if fence is None:
            number += 1
            continue
        end = _closing(path, lines, number, fence["indent"])
        if fence["language"] in languages:
            code = "\n".join(line.removeprefix(fence["indent"]) for line in lines[number + 1 : end]) + "\n"
            found.append(Snippet(path, number + 1, fence["language"], code, runs=not _is_not_run(lines, number)))
        number = end + 1
    return found


def _closing(path: Path, lines: list[str], start: int, indent: str) -> int:
    for number in range(start + 1, len(lines)):
        if lines[number].rstrip() == f"{indent}```":
            return number
    raise ValueError(f"{path}:{start + 1}: this block has no end")


def _is_not_run(lines: list[str], start: int) -> bool:
    above = next((line for line in reversed(lines[:start]) if line.strip()), "")
    return _NO_RUN.search(above) is not None


def run_snippets(found: list[Snippet]) -> dict[str, Any]:
    """Run snippets in order in one namespace, as a reader who types them one after the other."""
    namespace: dict[str, Any] = {"__name__": "__main__"}  # so that functions are pickled by value, as in a notebook
    for snippet in found:
        code = snippet.compiled()
        if snippet.runs:
            exec(code, namespace)
    return namespace


def arguments_of(example: Path) -> list[str] | None:
    """Return the test arguments of an example from its header ``# test: --epochs 1``, or None without a header."""
    header = _HEADER.search(example.read_text(encoding="utf-8"))
    return None if header is None else shlex.split(header["arguments"])


def make_targets() -> set[str]:
    """Return the public targets of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):(?!=)", makefile, re.MULTILINE))
