"""How runs are found: `raysgd ls` and the page of `raysgd ui` have the same runs, whatever else is in the storage path."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.fs import FSSpecHandler, PyFileSystem

from raysgd.checkpoint.storage.storage import Storage
from raysgd.cli.main import main
from raysgd.cli.runs.finding import find_run
from raysgd.controller.journal.journal import parse_line
from raysgd.errors import ConfigError
from raysgd.runs.finding import find_runs
from raysgd.runs.state import StateReader
from raysgd.viewer.catalog import Catalog
from support.run_folders import RunFolder, two_ranks

#: A trial of Ray Tune has the values of its config in the name of its folder.
TRIAL = "train_func_a1b2_00000_0_lr=0.1,momentum=0.9_2026-01-01_00-00-00"
NAMES = ("exp", "run_001", "run_002", TRIAL, "my runs", "é ü", "a#b?c%20d", "checkpoints", "last", "-x")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")


def make_run(path: Path) -> Path:
    two_ranks(RunFolder(path), 3.0, 2.0)
    return path


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Return what ``raysgd ls`` says of the runs in a folder, by their folders, and its error output."""
    assert main(["ls", str(folder), "--json"]) == 0
    shown = capsys.readouterr()
    return {run["run_dir"]: run for run in json.loads(shown.out)}, shown.err


def on_page(folder: Path) -> list[dict[str, Any]]:
    return Catalog(Storage.from_uri(folder)).list_runs()


@settings(max_examples=60)
@given(
    st.sets(st.lists(st.sampled_from(NAMES), max_size=5).map(tuple), max_size=5),
    st.lists(
        st.tuples(st.sampled_from(["link", "loop", "broken link", "file", "hidden"]), st.integers(0, 9)), max_size=4
    ),
)
def test_runs_are_found_at_any_level_among_anything(
    tmp_path_factory: pytest.TempPathFactory, places: set[tuple[str, ...]], others: list[tuple[str, int]]
) -> None:
    root = tmp_path_factory.mktemp("runs")
    runs = {place for place in places if not any(place[:n] in places for n in range(len(place)))}  # none in another one
    for place in runs:
        root.joinpath(*place).mkdir(parents=True, exist_ok=True)
        root.joinpath(*place, "events.jsonl").touch()
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    for kind, number in others:
        place = folders[number % len(folders)] / f"{kind}-{number}"
        if kind == "file":
            place.touch()
        elif kind == "hidden" and not place.exists():
            (place.parent / f".{place.name}").mkdir(exist_ok=True)
            (place.parent / f".{place.name}" / "run.json").touch()
        elif not place.is_symlink():
            place.symlink_to({"link": folders[-1], "loop": root, "broken link": root / "nowhere"}[kind])
    expected = {os.path.join(root, *place) for place in runs if len(place) <= 3}
    found = [run.path_of("") for run in find_runs(Storage.from_uri(root))]
    assert sorted(found) == sorted(expected)
    if not any("link" in kind or kind == "loop" for kind, _ in others):  # which other file systems follow
        remote = Storage(PyFileSystem(FSSpecHandler(DirFileSystem(str(root), LocalFileSystem()))), "", uri="dir://x")
        assert len(list(find_runs(remote))) == len(expected)


def test_command_and_page_show_the_same_of_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tmp_path / "exp" / "run_001", tmp_path / "my runs" / "run_001", tmp_path / "search" / TRIAL / "run_001"]
    for run in map(make_run, runs):
        (run.parent / "last").symlink_to("run_001/checkpoints/checkpoint_000001")
    live = RunFolder(tmp_path / "exp" / "run_002")
    live.attempt()
    live.event("attempt_start", attempt=1, world_size=2)
    live.event("paused", attempt=1)
    (tmp_path / "best").symlink_to("exp")
    (tmp_path / "notes").mkdir()
    by_command, err = listed(tmp_path, capsys)
    assert set(by_command) == {str(path) for path in [*runs, live.path]} and err == ""
    keys = ("name", "state", "iteration", "started_s", "ended_s")
    page = [
        tuple(run[key] for key in ("name", "state", "iteration", "started", "updated")) for run in on_page(tmp_path)
    ]
    assert sorted(page) == sorted(tuple(run[key] for key in keys) for run in by_command.values())
    assert {run["name"] for run in by_command.values()} >= {f"{TRIAL}/run_001", "my runs/run_001"}


def test_one_bad_folder_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = make_run(tmp_path / "exp" / "run_001")
    damaged = make_run(tmp_path / "damaged" / "run_001")
    (damaged / "events.jsonl").write_text("garbage\n")
    linked = make_run(tmp_path / "linked" / "run_001")
    (linked / "run.json").symlink_to("nowhere")
    closed = make_run(tmp_path / "closed" / "run_001").parent
    closed.chmod(0o000)
    try:
        by_command, err = listed(tmp_path, capsys)
        page = {run["name"]: run["state"] for run in on_page(tmp_path)}
    finally:
        closed.chmod(0o755)
    may_enter = os.geteuid() == 0
    assert set(by_command) == {str(good)} | ({str(closed / "run_001")} if may_enter else set())
    for path in (damaged, linked, *([] if may_enter else [closed])):
        assert f"{path} cannot be read: " in err
    page.pop("closed/run_001", None)
    assert page == {"exp/run_001": "done", "damaged/run_001": "unreadable", "linked/run_001": "unreadable"}


def test_damaged_run_is_listed_again_when_its_files_are_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "exp" / "run_001")
    text = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(f"{text}garbage\n")
    monkeypatch.setattr("raysgd.viewer.catalog._AGAIN_S", {})
    catalog = Catalog(Storage.from_uri(tmp_path))
    assert [each["state"] for each in catalog.list_runs()] == ["unreadable"]
    (run / "events.jsonl").write_text(text)
    assert [(each["state"], each["iteration"]) for each in catalog.list_runs()] == [("done", 2)]


def test_paused_run_has_no_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path / "exp" / "run_001")
    run.attempt()
    run.event("attempt_start", attempt=1, world_size=2)
    for rank in (0, 1):
        run.reports(rank, 0, {"loss": 1.5})
    run.event("paused", attempt=1)
    assert main(["ls", str(tmp_path)]) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:5] == ["exp/run_001", "paused", "1", "loss=1.5", "-"]
    assert main(["ls", str(tmp_path), "--live"]) == 0
    assert "there are no live runs" in capsys.readouterr().err, "no cluster was asked"
    run.event("resumed")
    run.event("attempt_start", attempt=2, world_size=4, iterations_before=1)
    assert main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:5] == ["exp/run_001", "silent", "1", "loss=1.5", "4"]


@pytest.mark.parametrize(
    "given", [f"{TRIAL}/run_001", TRIAL, f"search/{TRIAL}", "my runs", "my runs/run_001", "my runs/"]
)
def test_run_is_found_by_the_name_that_is_listed(tmp_path: Path, given: str) -> None:
    trial = make_run(tmp_path / "search" / TRIAL / "run_001")
    spaced = make_run(tmp_path / "my runs" / "run_001")
    assert find_run(given, str(tmp_path)).uri == str(spaced if given.startswith("my") else trial)
    for wrong in ("my", "../x", "0/run_001", TRIAL[:-1]):
        with pytest.raises(ConfigError, match="there is no run"):
            find_run(wrong, str(tmp_path))


def test_samples_are_not_decoded_for_a_state_but_for_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker sends one every two seconds: a day of four workers has more than all other events of a thousand runs."""
    run = RunFolder(tmp_path / "exp" / "run_001")
    decoded: list[bytes] = []
    monkeypatch.setattr("raysgd.runs.tail.parse_line", lambda *given: decoded.append(given[0]) or parse_line(*given))
    reader = StateReader(Storage.from_uri(run.path))
    for _ in range(3):
        run.event("failure", error="boom", nonfinite=None)
        for number in range(50):
            run.event("sample", rank=number % 2, cpu_percent=1.0)
        run.event("paused", attempt=1)
        run.event("sample", rank=0)
        state = reader.read()
        assert state.ended_s == json.loads((run.path / "events.jsonl").read_text().splitlines()[-1])["timestamp"]
    assert (state.state, state.num_failures, [event.kind for event in state.events[-2:]]) == (
        "paused",
        3,
        ["failure", "paused"],
    )
    assert len(decoded) == 9, "a failure, a pause and a sample of each read"
