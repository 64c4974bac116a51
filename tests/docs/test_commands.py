"""The commands that README and doc/ name are real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.project import ROOT, name_of
from support.snippets import documents, make_targets, snippets

COMMAND = re.compile(r"^\$ (?P<command>.+)$", re.MULTILINE)
FILE = re.compile(r"(?<![\w/.-])(?:examples|benchmarks|tools|tests)/[\w./-]*\w")


def _commands(path: Path) -> list[str]:
    blocks = snippets(path, "console", "bash", "sh", "shell")
    return [match["command"] for block in blocks for match in COMMAND.finditer(block.code)]


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_commands_stand_behind_a_prompt(path: Path) -> None:
    assert not snippets(path, "bash", "sh", "shell"), "write ```console, with `$ ` before each command"
    assert all(COMMAND.search(block.code) for block in snippets(path, "console"))


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_make_targets_exist(path: Path) -> None:
    asked = {target for command in _commands(path) for target in re.findall(r"\bmake ([a-z-]+)", command)}
    assert asked <= make_targets()


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_files_in_commands_exist(path: Path) -> None:
    named = {name for command in _commands(path) for name in FILE.findall(command)}
    assert not {name for name in named if not (ROOT / name).exists()}


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_modules_named_in_text_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"`(raysgd/[\w/.]+)`", text))
    named |= {dotted.replace(".", "/") for dotted in re.findall(r"`(raysgd(?:\.[a-z_]+){2,})\.[A-Z]\w+`", text)}
    assert not {name for name in named if not any((ROOT / f"{name}{end}").exists() for end in ("", ".py"))}


def test_the_makefile_lists_all_its_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    described = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert described == make_targets()
