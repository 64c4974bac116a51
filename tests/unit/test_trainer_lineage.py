"""Checkpoints of a training that several runs have made, each resumed from the one before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.controller.journal.lineage import earlier_checkpoints


def run(folder: Path, *numbers: int, resumed_from: str | None = None, train_func: str = "train") -> Any:
    """Write the folder of a run; returns the path of each of its checkpoints by number."""
    store = CheckpointStore(Storage.from_uri(folder / "checkpoints"))
    for number in numbers:
        counters: dict[str, Any] = {
            "number": number,
            "attempt": 1,
            "iteration": number,
            "time_total_s": 1.0,
            "world_size": 1,
        }
        store.commit(Manifest(**counters, created_s=1.0, metrics={"place": f"{folder.name}-{number}"}))
    (folder / "run.json").write_text(json.dumps({"train_func": train_func, "resumed_from": resumed_from}))
    return store.path


def places(folder: Path) -> list[str]:
    return [each.metrics["place"] for each in earlier_checkpoints(str(folder))]


def test_checkpoints_up_to_each_resume_belong_to_the_training(tmp_path: Path) -> None:
    first = run(tmp_path / "run_001", 1, 2, 3, 4)
    second = run(tmp_path / "run_002", 1, 2, 3, resumed_from=first(3))
    run(tmp_path / "run_003", 1, resumed_from=second(1))
    assert places(tmp_path / "run_003") == ["run_001-1", "run_001-2", "run_001-3", "run_002-1"]
    assert places(tmp_path / "run_002") == ["run_001-1", "run_001-2", "run_001-3"]
    assert places(tmp_path / "run_001") == []


@pytest.mark.parametrize(("train_func", "expected"), [("train", ["run_001-1"]), ("finetune", [])])
def test_run_of_another_folder_belongs_to_the_training_if_it_trains_the_same(
    tmp_path: Path, train_func: str, expected: list[str]
) -> None:
    path = run(tmp_path / "a" / "run_001", 1, 2)
    run(tmp_path / "b" / "run_001", 1, resumed_from=path(1), train_func=train_func)
    assert places(tmp_path / "b" / "run_001") == expected


def test_search_ends_at_runs_that_are_gone_or_repeat(tmp_path: Path) -> None:
    run(tmp_path / "run_002", 1, resumed_from=str(tmp_path / "run_001" / "checkpoints" / "checkpoint_000001"))
    assert places(tmp_path / "run_002") == []
    own = run(tmp_path / "run_003", 1)
    run(tmp_path / "run_003", 1, resumed_from=own(1))
    assert places(tmp_path / "run_003") == []
    run(tmp_path / "run_004", 1, resumed_from=str(tmp_path / "copied"))
    assert places(tmp_path / "run_004") == []
