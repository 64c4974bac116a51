"""Retention over all runs in a folder: what is left after each commit, and what a live run needs is not deleted."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import hypothesis
import pyarrow.fs
import pytest
from hypothesis import strategies as st

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.links import list_manifests, make_links
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.config import CheckpointConfig
from raysgd.controller.checkpoints.index import CheckpointIndex
from raysgd.controller.journal.journal import SILENT_S
from raysgd.controller.run.earlier import find_earlier
from raysgd.controller.run_plan import Start


class Run:
    """A run that commits checkpoints as the TrainerActor does, in a folder of an object store or of a disk.

    Args:
        runs: The Trainer's folder.
        config: Which checkpoints are kept.
        start: The path of the checkpoint that it is resumed from.
    """

    def __init__(self, runs: Storage, number: int, config: CheckpointConfig, start: str | None = None) -> None:
        self.folder = runs.child(f"run_{number:03d}")
        self.event("run_start", resumed_from=start)
        self.store = CheckpointStore(self.folder.child("checkpoints"))
        self.earlier = find_earlier(self.folder, config)
        retention = RetentionPolicy(config.num_to_keep, config.score_attribute, config.score_order, config.keep_best)
        self.index = CheckpointIndex(Start(), retention, () if self.earlier is None else self.earlier.records)
        self.links = make_links(self.folder, config)
        self.number = 0

    def event(self, kind: str, age_s: float = 0.0, **data: Any) -> None:
        line = {"seq": 1, "attempt": 1, "kind": kind, "timestamp": time.time() - age_s, "data": data}
        earlier = self.folder.read_bytes("events-0000.jsonl") if self.folder.exists("events-0000.jsonl") else b""
        self.folder.write_bytes("events-0000.jsonl", earlier + json.dumps(line).encode() + b"\n")

    def save(self, loss: float) -> str:
        self.number += 1
        manifest = Manifest(
            number=self.number,
            attempt=1,
            iteration=self.number,
            time_total_s=1.0,
            world_size=1,
            created_s=1.0,
            metrics={"loss": loss},
            parts={},
        )
        self.store.commit(manifest)
        if self.links is not None:
            self.links.update(manifest)
        if self.earlier is not None:
            self.earlier.delete()
        doomed = self.index.add(manifest)
        for number in doomed:
            if number > 0:
                self.store.delete(number)
        if self.earlier is not None:
            self.earlier.delete([number for number in doomed if number < 1])
        return self.store.path(self.number)


def left(runs: Storage) -> list[tuple[str, int]]:
    return [(store.storage.parent().name, each.number) for store, each in list_manifests(runs)]


@pytest.fixture(params=["local", "object store"])
def runs(request: pytest.FixtureRequest, tmp_path: Any) -> Storage:
    if request.param == "local":
        return Storage.from_uri(tmp_path / "runs")
    return Storage(pyarrow.fs._MockFileSystem(), "bucket/runs")


KEEP_2 = CheckpointConfig(num_to_keep=2, scope="folder", keep_best={"loss": "min"}, links=True)
LOSSES = st.one_of(st.floats(allow_infinity=False), st.sampled_from([1.0, 2.0]))


@hypothesis.given(
    st.lists(st.tuples(st.lists(LOSSES, max_size=4), st.sampled_from(["run_end", "silent"])), max_size=5),
    st.integers(1, 3),
    st.sampled_from([None, "loss"]),
)
@hypothesis.settings(max_examples=150, deadline=None)
def test_newest_and_best_of_all_runs_are_left(
    trainings: list[tuple[list[float], str]], num_to_keep: int, score: str | None
) -> None:
    runs = Storage(pyarrow.fs._MockFileSystem(), "bucket/runs")
    config = CheckpointConfig(
        num_to_keep=num_to_keep, scope="folder", keep_best={"loss": "min"}, score_attribute=score, score_order="min"
    )
    saved: list[tuple[tuple[str, int], float]] = []
    for number, (losses, end) in enumerate(trainings, start=1):
        run = Run(runs, number, config)
        for loss in losses:
            run.save(loss)
            saved.append(((run.folder.name, run.number), loss))
            ranked = [place for place, _ in saved]
            numbers = [(place, loss) for place, (_, loss) in enumerate(saved) if not math.isnan(loss)]
            by_loss = [saved[place][0] for place, _ in sorted(numbers, key=lambda each: (each[1], -each[0]))]
            unranked = [ranked[place] for place, (_, loss) in reversed(list(enumerate(saved))) if math.isnan(loss)]
            kept = ranked[-num_to_keep:] if score is None else (by_loss + unranked)[:num_to_keep]
            assert set(left(runs)) == {*kept, *by_loss[:1], ranked[-1]}
        run.event("run_end" if end == "run_end" else "sample", age_s=2 * SILENT_S)


def test_runs_of_another_scope_count_by_themselves(runs: Storage) -> None:
    for number in (1, 2):
        run = Run(runs, number, CheckpointConfig(num_to_keep=2))
        for loss in (3.0, 2.0, 1.0):
            run.save(loss)
        run.event("run_end")
    assert left(runs) == [("run_001", 2), ("run_001", 3), ("run_002", 2), ("run_002", 3)]


def test_nothing_is_deleted_before_the_run_has_a_checkpoint(runs: Storage) -> None:
    first = Run(runs, 1, CheckpointConfig())
    for loss in (1.0, 2.0, 3.0):
        first.save(loss)
    first.event("run_end")
    second = Run(runs, 2, KEEP_2, first.store.path(2))
    assert len(left(runs)) == 3
    second.save(4.0)
    assert left(runs) == [("run_001", 1), ("run_001", 3), ("run_002", 1)]


@pytest.mark.parametrize("state", ["writes", "paused"])
def test_what_a_live_run_needs_is_kept_until_it_has_ended(runs: Storage, state: str) -> None:
    first = Run(runs, 1, CheckpointConfig())
    for loss in (1.0, 2.0, 3.0):
        first.save(loss)
    first.event("run_end")
    other = Run(runs, 2, CheckpointConfig(), first.store.path(2))
    if state == "paused":
        other.event("paused", age_s=2 * SILENT_S)
    third = Run(runs, 3, KEEP_2, first.store.path(3))
    third.save(4.0)
    third.save(5.0)
    assert left(runs) == [("run_001", 1), ("run_001", 2), ("run_003", 1), ("run_003", 2)]  # 1 is the best, 2 is needed
    other.save(6.0)
    third.save(7.0)
    assert left(runs) == [("run_001", 1), ("run_002", 1), ("run_003", 2), ("run_003", 3)]
    for ended in (other, third):
        ended.event("run_end")
    fourth = Run(runs, 4, KEEP_2, third.store.path(3))
    fourth.save(8.0)
    fourth.save(9.0)
    assert left(runs) == [("run_001", 1), ("run_004", 1), ("run_004", 2)]


def test_names_that_this_run_does_not_keep_lead_to_checkpoints_that_stay(runs: Storage) -> None:
    first = Run(runs, 1, KEEP_2)
    for loss in (2.0, 1.0, 3.0):
        first.save(loss)
    first.event("run_end")
    second = Run(runs, 2, CheckpointConfig(num_to_keep=1, scope="folder"))
    second.save(4.0)
    assert left(runs) == [("run_001", 2), ("run_001", 3), ("run_002", 1)]


def test_checkpoints_of_a_run_whose_journal_is_damaged_stay(runs: Storage) -> None:
    first = Run(runs, 1, KEEP_2)
    first.save(2.0)
    first.folder.write_bytes("events-0000.jsonl", b"{}\n")
    second = Run(runs, 2, CheckpointConfig(num_to_keep=1, scope="folder"))
    second.save(1.0)
    assert left(runs) == [("run_001", 1), ("run_002", 1)]
