"""The names ``last`` and ``best``: where they lead after commits, crashes and new runs, on disks with and without links."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow.fs
import pytest
from hypothesis import strategies as st

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.links import CheckpointLinks, follow, make_links
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, directory_name
from raysgd.config import CheckpointConfig

LOWEST = RetentionPolicy(None, "loss", "min")


@pytest.fixture(params=["local", "object store"])
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return Storage.from_uri(tmp_path / "runs")
    return Storage(pyarrow.fs._MockFileSystem(), "bucket/runs")


def commit(runs: Storage, number: int, loss: Any, run: str = "run_001") -> Manifest:
    metrics = {} if loss is None else {"loss": loss}
    manifest = Manifest(
        number=number,
        attempt=1,
        iteration=number,
        time_total_s=1.0,
        world_size=1,
        created_s=1.0,
        metrics=metrics,
        parts={},
    )
    CheckpointStore(runs.child(run).child("checkpoints")).commit(manifest)
    return manifest


def target(runs: Storage, link: str) -> str | None:
    """Return where a name leads: ``run_001/3``."""
    if runs.is_local:
        path = Path(runs.path_of(link))
        if not path.is_symlink():
            return None
        checkpoint = Checkpoint.from_path(path)  # it is whole
        found = Path(str(checkpoint.path)).resolve()
    else:
        followed = follow(runs.child(link))
        if followed is None:
            return None
        found = Path(followed.uri)
    return f"{found.parts[-3]}/{int(found.name.removeprefix('checkpoint_'))}"


def links_of(runs: Storage, run: str = "run_001") -> CheckpointLinks:
    return CheckpointLinks(runs, run, LOWEST)


def test_names_lead_to_the_newest_and_the_best(runs: Storage) -> None:
    links = links_of(runs)
    found = []
    for number, loss in enumerate([3.0, 1.0, 2.0, 1.0, None, math.nan], start=1):
        links.update(commit(runs, number, loss))
        found.append((target(runs, "last"), target(runs, "best")))
    assert found == [
        ("run_001/1", "run_001/1"),
        ("run_001/2", "run_001/2"),
        ("run_001/3", "run_001/2"),
        ("run_001/4", "run_001/4"),  # the newer of equal ones
        ("run_001/5", "run_001/4"),
        ("run_001/6", "run_001/4"),
    ]


def test_a_worse_run_does_not_take_the_best_of_an_earlier_one(runs: Storage) -> None:
    links_of(runs).update(commit(runs, 1, 1.0))
    later = links_of(runs, "run_002")
    later.repair()
    later.update(commit(runs, 1, 2.0, "run_002"))
    assert (target(runs, "last"), target(runs, "best")) == ("run_002/1", "run_001/1")
    later.update(commit(runs, 2, 0.5, "run_002"))
    assert target(runs, "best") == "run_002/2"


def test_a_score_that_comes_later_counts(runs: Storage) -> None:
    links = links_of(runs)
    links.update(commit(runs, 1, 2.0))
    links.update(commit(runs, 2, None))
    assert target(runs, "best") == "run_001/1"
    links.update(commit(runs, 2, 1.0))
    links.update(commit(runs, 1, 2.0))  # amended again, and older
    assert (target(runs, "last"), target(runs, "best")) == ("run_001/2", "run_001/2")


def test_after_a_crash_they_lead_to_whole_checkpoints_and_are_repaired(runs: Storage) -> None:
    links_of(runs).update(commit(runs, 1, 2.0))
    commit(runs, 2, 1.0)  # and the process was killed before it changed the names
    assert (target(runs, "last"), target(runs, "best")) == ("run_001/1", "run_001/1")
    if runs.is_local:
        Path(runs.path_of("last.new")).symlink_to("nowhere")  # killed between the two steps of a change
    links_of(runs).repair()
    assert (target(runs, "last"), target(runs, "best")) == ("run_001/2", "run_001/2")


@hypothesis.given(st.lists(st.one_of(st.none(), st.floats(allow_infinity=False), st.just(1.0)), min_size=1, max_size=8))
@hypothesis.settings(max_examples=50, deadline=None)
def test_updates_and_repair_agree(losses: list[Any]) -> None:
    runs = Storage(pyarrow.fs._MockFileSystem(), "bucket/runs")
    links = links_of(runs)
    for number, loss in enumerate(losses, start=1):
        links.update(commit(runs, number, loss))
    found = target(runs, "last"), target(runs, "best")
    links_of(runs).repair()
    assert (target(runs, "last"), target(runs, "best")) == found


def test_only_runs_whose_config_asks_for_it_have_them(tmp_path: Path) -> None:
    run = Storage.from_uri(tmp_path / "name" / "run_003")
    assert make_links(run, CheckpointConfig()) is None
    assert make_links(Storage.from_uri(tmp_path / "trial_1"), CheckpointConfig(links=True)) is None
    made = make_links(run, CheckpointConfig(links=True, keep_best={"loss": "min", "accuracy": "max"}))
    assert made is not None
    CheckpointStore(run.child("checkpoints")).directory(1).make_dirs()
    made.update(commit(Storage.from_uri(tmp_path / "name"), 1, 1.0, "run_003"))
    assert (tmp_path / "name" / "best").readlink() == Path("run_003/checkpoints") / directory_name(1)


def test_a_file_of_another_content_is_not_followed(runs: Storage) -> None:
    if runs.is_local:
        pytest.skip("links are followed by the file system")
    runs.write_bytes("last", b"../../secrets")
    assert follow(runs.child("last")) is None
    assert follow(runs.child("best")) is None


def test_repair_orders_runs_by_their_numbers(runs: Storage) -> None:
    for run in ("run_999", "run_1000"):
        commit(runs, 1, 1.0, run)
    links_of(runs, "run_1001").repair()
    assert (target(runs, "last"), target(runs, "best")) == ("run_1000/1", "run_1000/1")
