"""The command ``raysgd``: its help, the completion of words, exit statuses, and what it does not import."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from raysgd.cli.main import COMMANDS, main
from support import command
from support.project import ROOT
from support.run_folders import RunFolder

HEAVY = ("ray", "torch", "numpy", "pandas", "pyarrow", "rich", "tensorflow", "jax", "horovod")


def loaded_by(words: list[str], **variables: str) -> tuple[int, list[str], str]:
    """Run the command in a fresh process; return its exit status, the heavy modules that it loaded, and its output."""
    code = f"""
import json, sys
from raysgd.cli.main import main
try:
    status = main({words!r})
except SystemExit as error:
    status = error.code
print(json.dumps([status, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    *lines, last = done.stdout.splitlines()
    status, loaded = json.loads(last)
    return status, loaded, "\n".join(lines) + done.stderr


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ([], 0, "Run a script on workers"),
        (["--version"], 0, "raysgd "),
        (["run", "--help"], 0, "--engine.precision"),
        (["run", "--engine.zero-stage", "8", __file__], 2, "zero_stage=8"),
        (["rnu"], 2, "did you mean 'run'?"),
    ],
)
def test_command_explains_itself_without_ray_and_frameworks(words: list[str], status: int, text: str) -> None:
    found = loaded_by(words)
    assert found[:2] == (status, [])
    assert text in found[2]


@pytest.mark.parametrize(
    ("words", "completed"), [("raysgd r", "plain,run"), ("raysgd run --num-w", "plain,--num-workers")]
)
def test_shell_completes_words_without_ray_and_frameworks(words: str, completed: str) -> None:
    variables = {"_RAYSGD_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    _, loaded, out = loaded_by([], **variables)
    assert completed in out.split() and loaded == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completes_names_of_runs_and_of_detached_trainers(tmp_path: Path, shell: str) -> None:
    for name, is_detached in (("exp", False), ("long", True), ("over", True)):
        run = RunFolder(tmp_path / "raysgd_runs" / name / "run_001")
        run.describe(run_config={"name": name, "detached": is_detached})
        run.line("events.jsonl", attempt=1, kind="run_start", timestamp=time.time(), data={})
        if name == "over":
            run.frame("run_end", {"kind": "done"})

    def complete(words: str, last: str) -> set[str]:
        number = last if shell == "fish" else str(words.count(" "))
        variables = {"_RAYSGD_COMPLETE": f"{shell}_complete", "COMP_WORDS": words + last, "COMP_CWORD": number}
        status, loaded, out = loaded_by([], HOME=str(tmp_path), **variables)
        assert loaded == [], status
        return set(re.split(r"[\n,]", out)) - {"plain", "dir", "_", ""}

    runs = {"exp/run_001", "long/run_001", "over/run_001"}
    assert complete("raysgd status ", "") == {"exp", "long", "over"} | runs
    assert complete("raysgd ckpt show ", "over/") == {"over/run_001"}
    assert complete("raysgd rm exp/run_001 ", "long/") == {"long/run_001"}
    assert complete("raysgd attach ", "") == {"long"}
    assert complete("raysgd status ", "./") == {"./"}, "the shell completes folders"


def test_every_command_has_a_module_with_that_command() -> None:
    for name, (place, text) in COMMANDS.items():
        module, _, attribute = place.partition(":")
        found = getattr(importlib.import_module(module), attribute or "command")
        assert isinstance(found, click.Command)
        assert found.name == name and found.help and text.endswith(".")


def test_error_of_usage_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--num-worker", "2", "train.py"]) == 2
    assert main(["rnu"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("raysgd run: --num-worker is not known (did you mean '--num-workers'?)")
    assert lines[1] == "raysgd: rnu is not a command (did you mean 'run'?); `raysgd --help` lists them."


def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in [([], "Run a script"), (["--help"], "Run a script"), (["run", "--help"], "--engine.precision")]:
        assert main(words) == 0
        assert text in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("raysgd ")


def test_closed_pipe_ends_the_command_quietly(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*command.COMMAND, "run", "--help"],
        env=command.environment(None),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(), err) == (1, b"")
    process.stderr.close()


def test_tables_have_colours_on_a_terminal_alone(tmp_path: Path) -> None:
    """A program that reads the output gets one line for each row, however wide."""
    name = "a_name_that_does_not_fit_" * 5
    (tmp_path / name / "run_001").mkdir(parents=True)
    (tmp_path / name / "run_001" / "run.json").write_text("{}")
    words = [*command.COMMAND, "ls", str(tmp_path)]
    environment = {**command.environment(None), "TERM": "xterm"}
    piped = subprocess.run(words, env=environment, capture_output=True, check=True).stdout.decode()
    assert "\x1b" not in piped and f"{name}/run_001" in piped
    assert all(line == line.rstrip() for line in piped.splitlines())
    reader, writer = os.openpty()
    with subprocess.Popen(words, env=environment, stdout=writer) as process:
        os.close(writer)
        shown = b""
        with contextlib.suppress(OSError):  # the process has closed the terminal
            while part := os.read(reader, 4096):
                shown += part
        assert process.wait() == 0
    os.close(reader)
    assert b"\x1b[33msilent" in shown
