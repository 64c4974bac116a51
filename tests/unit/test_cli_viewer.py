"""`raysgd report` writes a file; `raysgd ui` serves until Ctrl-C. Wrong arguments are refused with what to do."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from raysgd.cli.main import main
from support import command
from support.journals import WrittenRun
from support.poll import until


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = WrittenRun(tmp_path / "runs" / "run_001", config={"lr": 0.1})
    run.begin_attempt([11, 12])
    for rank in (0, 1):
        run.report({"loss": 1.0, "</script><script>alert(1)</script>": 2.0}, rank=rank)
    return run.end(message="<b>&</b>").path


def test_report_is_one_file_without_addresses(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "page.html"
    assert main(["report", str(run_dir), str(run_dir), "-o", str(output), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"file": str(output), "bytes": output.stat().st_size, "runs": [str(run_dir)] * 2}
    text = output.read_text(encoding="utf-8")
    assert "alert(1)</script>" not in text and "\\u003cscript>alert(1)" in text
    addresses = set(re.findall(r"""(?:src|href|url\()\s*=?\s*["'(]?(\w+:[^"')\s>]*)""", text))
    assert not [address for address in addresses if not address.startswith("data:")]
    assert text.count("<html") == 1 and "default-src &#x27;none&#x27;" in text
    assert main(["report", str(run_dir), "-o", str(output)]) == 0, "an existing file is replaced"
    assert capsys.readouterr().out == f"{output}\n"
    assert main(["report", "runs", "--storage-path", str(tmp_path), "-o", str(output)]) == 0, "the newest of a Trainer"
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "page.html"}


def test_report_is_opened_with_the_program_of_the_system(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, programs = tmp_path / "page.html", tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    words = ["report", str(run_dir), "-o", str(output), "--open"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{output}\n"
    assert printed.err == f"no program was found that opens {output.as_uri()}; open it yourself.\n"
    opened = tmp_path / "opened"
    (programs / "xdg-open").write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    (programs / "xdg-open").chmod(0o755)
    assert main(words) == 0
    assert until(lambda: opened.exists() and opened.read_text() == f"{output}\n", 20)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["report"], "Missing argument 'RUN...'"),
        (["report", "{folder}/missing"], "there is no run {folder}/missing"),
        (["report", "{folder}/run_001", "-o", "{folder}/no/page.html"], "give a file in a folder that exists"),
        (["report", "{folder}/run_001", "-o", "{folder}"], "give a file in a folder that exists"),
        (["report", "{folder}/run_001", "--outptu", "x"], "No such option"),
        (["ui", "{folder}/missing"], "does not exist: give the folder that holds runs"),
        (["ui", "--storage-path", "{folder}/missing"], "does not exist: give the folder that holds runs"),
        (["ui", "{folder}/run_001/run.json"], "run.json is a file; give a folder"),
        (["ui", "{folder}", "--port", "70000"], "not in the range"),
        (["ui", "{folder}", "--port", "x"], "'x' is not a valid integer;"),
        (["ui", "{folder}", "{folder}"], "unexpected extra argument"),
    ],
)
def test_wrong_arguments_are_refused(
    run_dir: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(run_dir.parent)
    assert main([word.format(folder=folder) for word in words]) == 2
    assert text.format(folder=folder) in capsys.readouterr().err
    assert not list(run_dir.parent.glob("*.html"))


def test_address_that_is_taken_is_an_error(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", str(run_dir.parent), "--host", "203.0.113.7"]) == 1
    assert "cannot listen at 203.0.113.7" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--storage-path"]], ids=["folder", "storage path"])
def test_ui_serves_until_ctrl_c(run_dir: Path, tmp_path: Path, flags: list[str]) -> None:
    process = command.start(None, tmp_path, "ui", *flags, str(run_dir.parent))
    assert process.stdout is not None
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", process.stdout.readline())
        assert found and found.string.startswith(f"{run_dir.parent}: ")
        assert urllib.request.urlopen(found[0], timeout=20).status == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err.strip()) == (130, "", "")
