"""The commands of ``doc/guides/command.md`` run, in their order, as a reader would type them."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from raysgd.cli.main import COMMANDS, main
from support import command
from support.poll import until
from support.project import ROOT
from support.runs import PATIENCE_S
from support.snippets import snippets

PAGE = ROOT / "doc" / "guides" / "command.md"
NAMED = re.compile(r"^# (?P<name>\w+\.py)\b")
LINES = [
    line.removeprefix("$ ") for block in snippets(PAGE, "console") for line in block.code.splitlines() if line.strip()
]
#: Those that start Ray, or connect to it, in a process of their own.
OWN_PROCESS = ("run", "restore")
#: What a command prints that the page says it does.
PRINTED = {
    "raysgd ls runs": "exp/run_002",
    "raysgd status runs/exp": "loss=",
    "raysgd report runs/exp/run_001 runs/exp/run_002 -o exp.html": "/exp.html",
    "raysgd logs runs/exp": "(rank 1) epoch 2",
    "raysgd compare runs/exp/run_001 runs/exp/run_002": "first difference at iteration 1, rank 0",
    "raysgd ckpt show runs/exp/run_001": "rank 0",
    "raysgd ckpt verify runs/exp/run_001": "whole",
    "raysgd ckpt merge runs/exp/run_001 merged": "merged/checkpoint_000003",
    "raysgd pause long": "long: paused; run_001 is paused",
    "raysgd stop long --shutdown": "long: ended; run_001 is cancelled",
    "raysgd doctor --storage-path runs": "one runs at ",
    "raysgd doctor --cluster --storage-path runs": "node ",
}
STATUSES = {
    "raysgd compare runs/exp/run_001 runs/exp/run_002": (1,),
    "raysgd doctor --storage-path runs": (0, 1),
    "raysgd doctor --cluster --storage-path runs": (0, 1),
}


@pytest.mark.timeout(300)
def test_commands_of_the_page_run(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", str(ray_cluster["gcs_address"]))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for block in snippets(PAGE, "python"):
        if found := NAMED.match(block.code):
            (tmp_path / found["name"]).write_text(block.code)
    background = []
    try:
        for line in LINES:
            program, *words = shlex.split(line.removesuffix(" &"))
            assert program == "raysgd"
            if line.endswith(" &"):
                background.append(command.start(ray_cluster, tmp_path, *words))
                wait_until_live(words[words.index("--name") + 1])
                continue
            status, printed = execute(ray_cluster, tmp_path, words, capsys)
            assert status in STATUSES.get(line, (0,)), f"{line}: {status}\n{printed}"
            assert PRINTED.get(line, "") in printed, f"{line}\n{printed}"
    finally:
        for process in background:
            process.kill()
            process.communicate()
        sys.modules.pop("model", None)
    assert set(PRINTED) <= set(LINES)


def execute(cluster: Any, folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command, in this process where it can be; return its exit status and all that it printed."""
    if words[0] in OWN_PROCESS:
        done = command.run(cluster, folder, *words)
        return done.returncode, done.stdout + done.stderr
    capsys.readouterr()
    status = main(words)
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def wait_until_live(name: str) -> None:
    import raysgd
    from raysgd.errors import RaySGDError

    def has_saved() -> bool:
        try:
            status = raysgd.Trainer.attach(name).status()
        except RaySGDError:
            return False
        return status.state == "running" and status.checkpoint is not None

    until(has_saved, PATIENCE_S)
    assert has_saved()


def test_page_names_all_commands() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| command |") : text.index("The examples of this page")]
    assert set(COMMANDS) <= set(re.findall(r"`([\w-]+)`", table))
