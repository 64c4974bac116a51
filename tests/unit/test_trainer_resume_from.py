"""Where a training begins: what ``resume_from`` means, at every front door."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raysgd
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.controller.run_plan import Start
from raysgd.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, ConfigError
from raysgd.trainer.resume_from import find_checkpoint, resolve_start

LOWEST = RetentionPolicy(None, "loss", "min")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A checkpoint of another run, without files."""
    manifest = Manifest(number=9, attempt=1, iteration=7, time_total_s=1.5, world_size=1, created_s=0.0)
    return CheckpointStore(Storage.from_uri(tmp_path)).commit(manifest)


def test_run_starts_without_a_state_by_default() -> None:
    assert resolve_start(None) == (Start(), None)


@pytest.mark.parametrize("kind", [str, Path, Checkpoint.from_path])
def test_run_resumes_from_a_checkpoint_with_its_own_numbering(kind: Callable[[str], Any], checkpoint: str) -> None:
    start, state = resolve_start(kind(checkpoint))
    assert state is None
    assert start == Start(checkpoint, iteration=7, time_total_s=1.5, number=0)


@pytest.mark.parametrize("state", [{"epoch": 3}, ({"w": [1.0]}, {"lr": 0.1}), [1], 3, b"x"])
def test_run_resumes_from_any_state_that_save_checkpoint_takes(state: Any) -> None:
    assert resolve_start(state) == (Start(), state)


@pytest.mark.parametrize(
    ("given", "kind"),
    [(len, "a builtin_function_or_method"), (dict, "a type"), (object(), "an object")],
)
def test_invalid_resume_from_is_refused(given: Any, kind: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"run\(resume_from=\.\.\.\) got {kind}; give a Checkpoint, a path, 'last', 'best', or a state",
    ):
        resolve_start(given)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint at"):
        resolve_start(tmp_path / "nothing")


def test_deleted_checkpoint_is_refused(tmp_path: Path, checkpoint: str) -> None:
    held = Checkpoint.from_path(checkpoint)
    CheckpointStore(Storage.from_uri(tmp_path)).delete(9)
    with pytest.raises(CheckpointNotFoundError):
        resolve_start(held)


def test_checkpoint_in_memory_only_is_refused() -> None:
    with pytest.raises(CheckpointError, match="memory only"):
        resolve_start(Checkpoint(None))


def save(run: Path, *losses: float) -> None:
    """Write checkpoints as a run has them; their number is that of the step."""
    with raysgd.local(dir=run / "checkpoints"):
        for step, loss in enumerate(losses, start=1):
            raysgd.save_checkpoint({"step": step}, metrics={"loss": loss})


def damage(run: Path, number: int) -> None:
    (part,) = (run / f"checkpoints/checkpoint_{number:06d}").glob("a*.json")
    part.write_bytes(part.read_bytes()[:-1])


def place_of(found: Checkpoint | None) -> tuple[str, int] | None:
    """Return the run and the step of a checkpoint."""
    if found is None:
        return None
    return Path(str(found.path)).parent.parent.name, found.load()["step"]


def test_last_is_the_newest_checkpoint_of_the_newest_run_that_has_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def last() -> tuple[str, int] | None:
        return place_of(find_checkpoint("last", str(tmp_path)).checkpoint)

    assert last() is None, "a first run starts from the beginning"
    assert "has no checkpoint; training starts from the beginning" in caplog.text
    save(tmp_path / "run_999", 3.0, 2.0)
    assert last() == ("run_999", 2)
    save(tmp_path / "run_1000", 1.0)
    save(tmp_path / "run_1001")
    (tmp_path / "run_backup").mkdir()
    assert last() == ("run_1000", 1)


def test_best_is_that_of_all_runs_and_never_one_whose_metric_is_nan(tmp_path: Path) -> None:
    save(tmp_path / "run_001", 3.0, 1.0, 2.0)
    save(tmp_path / "run_002", float("nan"), 2.5)
    assert place_of(find_checkpoint("best", str(tmp_path), LOWEST).checkpoint) == ("run_001", 2)
    damage(tmp_path / "run_001", 2)
    found = find_checkpoint("best", str(tmp_path), LOWEST)
    assert place_of(found.checkpoint) == ("run_001", 3)
    assert [each.partition(" is damaged")[0] for each in found.skipped] == ["run_001: checkpoint 2"]
    with pytest.raises(ConfigError, match=r"score_attribute=\.\.\."):
        find_checkpoint("best", str(tmp_path))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("run_001/checkpoints/checkpoint_000001", ("run_001", 1)),
        ("run_001", ("run_001", 2)),
        ("", ("run_002", 1)),
    ],
    ids=["checkpoint", "run", "folder of runs"],
)
def test_a_checkpoint_a_run_and_the_folder_of_runs_can_be_given(
    path: str, expected: tuple[str, int], tmp_path: Path
) -> None:
    save(tmp_path / "run_001", 1.0, 2.0)
    save(tmp_path / "run_002", 1.0)
    assert place_of(find_checkpoint(tmp_path / path).checkpoint) == expected


@pytest.mark.parametrize(
    "name", ["run.json", "events.jsonl"]
)  # a run that ended before its group was ready has no other
def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "run_001").mkdir()
    (tmp_path / "run_001" / name).write_text(json.dumps({}))
    for path in (tmp_path, tmp_path / "run_001"):
        with pytest.raises(CheckpointNotFoundError, match=r"the run in|no run in"):
            find_checkpoint(path)


def test_last_of_a_trainer_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"give RunConfig\(name=\.\.\.\), or the path of a run"):
        resolve_start("last")


def test_damaged_checkpoint_that_is_named_raises(tmp_path: Path) -> None:
    save(tmp_path / "run_001", 1.0, 2.0)
    damage(tmp_path / "run_001", 2)
    with pytest.raises(CheckpointCorruptError):
        resolve_start(tmp_path / "run_001/checkpoints/checkpoint_000002")


@given(runs=st.lists(st.lists(st.booleans(), max_size=3), max_size=3))
@settings(max_examples=25, deadline=None)
def test_last_is_the_newest_whole_one_and_says_which_newer_ones_are_damaged(runs: Sequence[Sequence[bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected, skipped = None, list[str]()
        for place, are_whole in enumerate(runs, start=1):
            run = Path(folder) / f"run_{place:03d}"
            save(run, *(1.0 for _ in are_whole))
            for number, is_whole in enumerate(are_whole, start=1):
                if is_whole:
                    expected, skipped = (run.name, number), []
                else:
                    damage(run, number)
                    skipped.insert(0, f"{run.name}: checkpoint {number}")
        if expected is None and skipped:
            with pytest.raises(CheckpointCorruptError, match=f"has no whole checkpoint; {skipped[0]} is damaged"):
                find_checkpoint("last", folder)
            return
        found = find_checkpoint("last", folder)
        assert place_of(found.checkpoint) == expected
        assert [each.partition(" is damaged and was skipped: ")[0] for each in found.skipped] == skipped
        assert resolve_start("last", folder)[0].skipped == found.skipped
