"""What people do with runs they keep: titles, tags and notes, and deleting those they do not keep."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.cli.main import main
from raysgd.errors import CheckpointCorruptError, UsageError
from raysgd.runs.annotations import Annotations, annotate, read_annotations
from raysgd.runs.deleting import delete_run
from raysgd.viewer.catalog import Catalog
from support.run_folders import RunFolder, two_ranks

TEXTS = st.text(max_size=20)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")


def make_run(path: Path) -> Storage:
    two_ranks(RunFolder(path), 3.0, 2.0)
    return Storage.from_uri(path)


def make_live_run(path: Path) -> Storage:
    run = RunFolder(path)
    run.line("events.jsonl", attempt=1, kind="run_start", timestamp=time.time(), data={})
    return Storage.from_uri(path)


def save_checkpoint(run: Path, number: int, loss: float) -> str:
    """Commit a checkpoint with metrics, as the controller does; return where ``last`` leads then."""
    fields = {"attempt": 1, "iteration": 1, "time_total_s": 1.0, "world_size": 1, "created_s": 0.0}
    store = CheckpointStore(Storage.from_uri(run / "checkpoints"))
    store.commit(Manifest(number=number, metrics={"loss": loss}, **fields))  # type: ignore[arg-type]
    return f"{run.name}/checkpoints/checkpoint_{number:06d}"


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["ls", *words, "--json"]) == 0
    return [run["name"] for run in json.loads(capsys.readouterr().out)]


@given(TEXTS, st.lists(TEXTS, max_size=4), TEXTS)
def test_annotations_are_kept_as_given_but_for_blanks(
    tmp_path_factory: pytest.TempPathFactory, title: str, tags: list[str], notes: str
) -> None:
    run = Storage.from_uri(tmp_path_factory.mktemp("run"))
    annotate(run, title="old", tags=["old"], notes="old")
    changed = annotate(run, title=title, tags=tags, notes=notes)
    assert changed == read_annotations(run)
    assert changed.title == title.strip() and changed.notes == notes
    assert set(changed.tags) == {tag.strip() for tag in tags} - {""} and len(set(changed.tags)) == len(changed.tags)
    assert annotate(run) == changed, "what is not given stays"


def test_command_and_page_show_what_people_say_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    catalog = Catalog(Storage.from_uri(tmp_path))
    one = make_run(tmp_path / "exp" / "run_001")
    make_run(tmp_path / "exp" / "run_002")
    assert {run["title"] for run in catalog.list_runs()} == {""}
    path = one.path_of("")
    assert main(["annotate", path, "--title", "wide net", "--tag", "good", "--tag", "paper", "--notes", "for Ada"]) == 0
    assert main(["annotate", path, "--untag", "paper"]) == 0
    assert read_annotations(one) == Annotations("wide net", ("good",), "for Ada")
    capsys.readouterr()
    assert listed(capsys, str(tmp_path), "--tag", "good") == ["exp/run_001"]
    assert listed(capsys, str(tmp_path), "--tag", "good", "--tag", "paper") == []
    (shown,) = (run for run in catalog.list_runs() if run["title"])
    assert (shown["name"], shown["tags"], shown["notes"]) == ("exp/run_001", ("good",), "for Ada")


def test_damaged_annotations_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "exp" / "run_001")
    for text in ("", "[]", '{"title": 1, "tags": [], "notes": ""}', '{"title": "", "tags": [2], "notes": ""}'):
        (tmp_path / "exp" / "run_001" / "annotations.json").write_text(text)
        with pytest.raises(CheckpointCorruptError, match=r"annotations\.json is damaged .*; delete the file"):
            read_annotations(run)


@pytest.mark.parametrize("name", ["run_001", "my run", "train_a_0_lr=0.1,momentum=0.9", "a#b?c%20d"])
def test_run_is_deleted_with_its_folder_and_nothing_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "precious").mkdir()
    run = make_run(tmp_path / "exp" / name)
    other = make_run(tmp_path / "exp" / "run_009")
    (tmp_path / "exp" / name / "link").symlink_to(tmp_path / "precious")
    delete_run(run)
    assert sorted(os.listdir(tmp_path / "exp")) == ["run_009"] and (tmp_path / "precious").exists() and other.exists()
    delete_run(run)  # it is gone, as it should be
    delete_run(Storage.from_uri(tmp_path))
    assert (tmp_path / "precious").exists(), "a folder that is not a run's stays"


def test_live_or_paused_run_is_not_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = make_live_run(tmp_path / "exp" / "run_001")
    paused = RunFolder(tmp_path / "exp" / "run_002")
    paused.event("paused", attempt=1)
    done = make_run(tmp_path / "exp" / "run_003")
    for run in (live, Storage.from_uri(paused.path)):
        with pytest.raises(UsageError, match="is live or paused, by its files, and cannot be deleted; stop it first"):
            delete_run(run)
    assert main(["rm", done.path_of(""), live.path_of("")]) == 1
    assert "exp/run_001 is live or paused" in capsys.readouterr().err
    assert live.exists() and done.exists(), "all of the named runs are deleted, or none"
    assert main(["rm", live.path_of(""), done.path_of(""), "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"deleted": [live.path_of(""), done.path_of("")]}
    assert not live.exists() and not done.exists()


def test_damaged_run_is_deleted_by_force_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "exp" / "run_001")
    (tmp_path / "exp" / "run_001" / "events.jsonl").write_text("garbage\n")
    assert main(["rm", run.path_of("")]) == 1 and run.exists()
    assert main(["rm", run.path_of(""), "--force"]) == 0 and not run.exists()


def test_name_of_a_trainer_does_not_delete_its_newest_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "exp" / "run_001")
    for name in (str(tmp_path / "exp"), "exp"):
        assert main(["rm", name, "--storage-path", str(tmp_path)]) == 2
        assert f"{name} is a Trainer; give the run to delete, such as {run.path_of('')}" in capsys.readouterr().err
    assert main(["rm", "exp/run_001", "--storage-path", str(tmp_path)]) == 0 and not run.exists()


def test_last_and_best_lead_to_other_runs_after_a_deletion(tmp_path: Path) -> None:
    for number, loss in ((1, 3.0), (2, 2.0), (3, 1.0)):
        run = two_ranks(RunFolder(tmp_path / f"run_{number:03d}"), 3.0)
        run.describe(checkpoint_config={"links": True, "keep_best": {"loss": "min"}, "num_to_keep": 1})
        place = save_checkpoint(run.path, 1, loss)
        (tmp_path / "last").unlink(missing_ok=True)
        (tmp_path / "last").symlink_to(place)
    (tmp_path / "best").symlink_to("run_003/checkpoints/checkpoint_000001")
    delete_run(Storage.from_uri(tmp_path / "run_003"))
    assert [os.readlink(tmp_path / name) for name in ("last", "best")] == ["run_002/checkpoints/checkpoint_000001"] * 2


def test_new_run_in_the_folder_of_a_deleted_one_is_another_run_of_the_page(tmp_path: Path) -> None:
    catalog = Catalog(Storage.from_uri(tmp_path))
    run = make_run(tmp_path / "exp" / "run_001")
    (before,) = catalog.list_runs()
    catalog.open_run(before["id"]).read()
    delete_run(run)
    assert catalog.list_runs() == []
    folder = RunFolder(tmp_path / "exp" / "run_001")
    folder.describe()
    folder.attempt(world_size=1)
    folder.reports(0, 0, {"loss": 7.0})
    (after,) = catalog.list_runs()
    assert after["id"] != before["id"] and after["metrics"] == {"loss": 7.0}
    assert catalog.open_run(after["id"]).read()["results"]["columns"].keys() >= {"loss"}
