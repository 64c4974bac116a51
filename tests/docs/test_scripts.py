"""The commands of ``doc/guides/scripts.md`` run the scripts of that page, as a reader would type them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from support import command
from support.project import ROOT
from support.snippets import snippets

PAGE = ROOT / "doc" / "guides" / "scripts.md"
NAMED = re.compile(r"^# (?P<name>\w+\.(py|yaml))\b")
COMMANDS = [
    line.removeprefix("$ ") for block in snippets(PAGE, "console") for line in block.code.splitlines() if line.strip()
]


def write_files(folder: Path) -> set[str]:
    """Write the files that the page shows, whose first lines have their names; return the names."""
    names = set()
    for block in snippets(PAGE, "python", "yaml"):
        if found := NAMED.match(block.code):
            (folder / found["name"]).write_text(block.code)
            names.add(found["name"])
    return names


@pytest.mark.timeout(300)
def test_commands_of_the_page_run(ray_cluster: Any, tmp_path: Path) -> None:
    assert write_files(tmp_path) == {"train.py", "large.py", "ddp.py", "engine.yaml"}
    printed = []
    for line in COMMANDS:
        program, *words = shlex.split(line)
        assert program == "raysgd"
        done = command.run(ray_cluster, tmp_path, *words)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        printed.append(done.stdout)
    assert len(printed) == 5
    assert re.search(r"\(rank 1 pid=\d+\) trained 5 epochs", printed[0])
    assert "trained 4 epochs" in printed[2] and "epoch=0" not in printed[2], "the second run did not resume"
    assert re.search(r"\(rank 0 pid=\d+\) of 2 ranks", printed[3])
    assert re.search(r"\(rank 0 pid=\d+\) loss 0\.", printed[4]) and "had no effect" not in printed[4]


def test_file_of_the_page_is_a_config_of_the_engine(tmp_path: Path) -> None:
    from raysgd.cli.engine_flags import FILE_FLAG, make_engine_config
    from raysgd.engine.config import EngineConfig

    write_files(tmp_path)
    config = make_engine_config({FILE_FLAG: str(tmp_path / "engine.yaml")})
    assert config == EngineConfig(precision="bf16", zero_stage=3, cpu_offload=True)
