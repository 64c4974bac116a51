"""``raysgd doctor``: what it finds on this machine, and what it makes of a node's answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd.cli import doctor
from raysgd.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(["doctor", *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


def states(found: list[dict[str, Any]], check: str) -> list[str]:
    return [one["state"] for one in found if one["check"] == check]


def test_doctor_finds_nothing_wrong_here(run: Run, tmp_path: Path) -> None:
    _, out, _ = run("--storage-path", "runs", "--json")
    found = json.loads(out)
    for check in ("versions", "ports", "cluster", "GPUs"):
        assert "wrong" not in states(found, check)
    assert states(found, "storage")[0] == "ok"
    assert list((tmp_path / "runs").iterdir()) == [], "the doctor left a file"
    assert "none runs here" in out
    table = run("--storage-path", "runs")[1]
    assert table.split()[:2] == ["check", "found"] and "can be written" in table


def test_storage_that_cannot_be_written_is_wrong(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, out, _ = run("--storage-path", "file/runs")
    assert status == 1
    (line,) = [line for line in out.splitlines() if line.startswith("storage")]
    assert "wrong" in line and "cannot be written" in line and "give --storage-path a folder" in line


def test_cluster_that_does_not_answer_is_wrong(run: Run) -> None:
    status, out, _ = run("--storage-path", "runs", "--address", "127.0.0.1:1", "--json")
    assert status == 1 and states(json.loads(out), "cluster") == ["wrong"]


def test_little_disk_and_a_folder_in_memory_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = doctor.shutil.disk_usage(tmp_path).free
    monkeypatch.setattr(doctor, "_MIN_FREE_BYTES", free + (1 << 40))
    assert [one.state for one in doctor.check_storage(str(tmp_path))] == ["ok", "wrong"]
    if doctor.file_system("/dev/shm") == "tmpfs":
        assert "is in memory (tmpfs)" in [one.what for one in doctor.check_storage("/dev/shm")][1]


def test_port_that_nobody_listens_at_is_found() -> None:
    with doctor.Listener("127.0.0.1") as listener:
        assert doctor.try_port("127.0.0.1", listener.port) is None
    assert doctor.try_port("127.0.0.1", listener.port) is not None


NOW = 1_700_000_000.0


def answer(**changes: Any) -> dict[str, Any]:
    right = {
        "time": NOW,
        "hostname": socket.gethostname(),
        "versions": doctor.installed_versions(),
        "limits": [],
        "gpus": 0,
        "sees_file": True,
        "port": None,
    }
    return {**right, **changes}


def judge(given: dict[str, Any], gpus: int = 0) -> list[tuple[str, str]]:
    return [(one.state, one.what) for one in doctor.judge_node(given, (NOW - 0.1, NOW + 0.1), "/runs", gpus)]


def test_node_that_is_right_has_no_findings() -> None:
    assert judge(answer()) == []
    assert judge(answer(gpus=8), gpus=8) == []


@pytest.mark.parametrize(
    ("changes", "state", "text"),
    [
        ({"time": NOW + 3600}, "warning", "its clock differs by 3"),
        ({"time": NOW - 3600}, "warning", "its clock differs by 3"),
        ({"sees_file": False}, "wrong", "it does not see the files in /runs"),
        ({"port": "timed out"}, "wrong", "it cannot reach a port of this machine: timed out"),
        ({"versions": {**doctor.installed_versions(), "ray": "2.9.0"}}, "wrong", "ray is 2.9.0 there and "),
        ({"versions": {**doctor.installed_versions(), "numpy": "1.0"}}, "warning", "numpy is 1.0 there and "),
        ({"limits": [doctor.Finding("open files", "warning", "12 files")]}, "warning", "12 files"),
    ],
)
def test_node_that_differs_is_found(changes: dict[str, Any], state: str, text: str) -> None:
    ((found, what),) = judge(answer(**changes))
    assert found == state and what.startswith(text)


def test_gpus_that_ray_counts_and_the_node_has_not_are_found() -> None:
    assert judge(answer(gpus=1), gpus=8) == [("wrong", "Ray counts 8 GPUs, and nvidia-smi 1")]
