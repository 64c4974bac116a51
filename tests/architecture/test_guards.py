"""The guards of the tests see what they are there to see."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support import leftovers
from support.leftovers import ProcessState
from support.poll import until


def test_nothing_changed_is_nothing_found() -> None:
    assert ProcessState.now().restore() == []


def test_environment_is_compared_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    state = ProcessState.now()
    os.environ["KEPT"] = "after"
    os.environ["ADDED"] = "1"
    assert state.restore() == ["environment variable ADDED was changed", "environment variable KEPT was changed"]
    assert os.environ["KEPT"] == "before"
    assert "ADDED" not in os.environ


def test_working_directory_is_compared_and_put_back(tmp_path: Path) -> None:
    state = ProcessState.now()
    os.chdir(tmp_path)
    assert state.restore() == [f"the working directory was changed to {tmp_path}"]
    assert os.getcwd() == state.folder


def test_thread_that_keeps_the_process_alive_is_found() -> None:
    state = ProcessState.now()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="waiting")
    thread.start()
    try:
        assert state.restore(timeout_s=0.1) == ["thread waiting still runs"]
    finally:
        release.set()
        thread.join()
    assert state.restore() == []


def test_file_in_the_root_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "ROOT", tmp_path)
    state = ProcessState.now()
    (tmp_path / "stray").touch()
    assert state.restore() == ["stray was left in the project's root"]


def test_process_whose_parent_is_gone_is_found_and_ended() -> None:
    before = leftovers.marked_processes()
    sleeper = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    subprocess.run([sys.executable, "-c", sleeper], check=True, start_new_session=True)
    assert until(lambda: bool(leftovers.marked_processes() - before), 10)  # it may have no environment to look at yet
    (found,) = leftovers.end_processes(before, timeout_s=0.3)
    assert "time.sleep(60)" in found
    assert leftovers.end_processes(before) == []
