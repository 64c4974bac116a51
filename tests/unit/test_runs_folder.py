"""A run is read from its files, and two runs are compared to find where they first differ."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.errors import CheckpointNotFoundError, ConfigError
from raysgd.runs.comparing import compare_runs
from raysgd.viewer.loaded_run import load_run
from support.run_folders import RunFolder, two_ranks


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run_001")


# -- a run -------------------------------------------------------------------------------------------------------------


def test_metrics_have_a_row_per_iteration_of_rank_0(folder: RunFolder) -> None:
    run = two_ranks(folder, 3.0, 2.0).load()
    assert list(run.metrics["loss"]) == [3.0, 2.0]
    assert list(run.metrics["training_iteration"]) == [1, 2]
    assert list(run.metrics["time_total_s"]) == [1.0, 2.0]
    assert set(run.metrics["attempt"]) == {1} and set(run.metrics["world_size"]) == {2}
    assert run.outcome == "done"
    assert run.run_dir == str(folder.path)


def test_workers_have_a_row_for_each_iteration_and_rank(folder: RunFolder) -> None:
    run = two_ranks(folder, 3.0, 2.0).load()
    rows = [(row["training_iteration"], row["rank"], row["loss"]) for row in run.workers.to_dict("records")]
    assert rows == [(1, 0, 3.0), (1, 1, 6.0), (2, 0, 2.0), (2, 1, 4.0)]


def test_a_metric_called_rank_does_not_take_the_ranks_place(folder: RunFolder) -> None:
    folder.attempt()
    folder.reports(0, 0, {"rank": 7})
    folder.reports(1, 0, {"rank": 7})
    run = folder.load()
    assert list(run.workers["rank"]) == [0, 1]
    assert list(run.metrics["rank"]) == [7]


def test_metrics_are_reduced_over_all_ranks(folder: RunFolder) -> None:
    two_ranks(folder, 3.0, 2.0)
    assert list(folder.load(reduce={"loss": "mean"}).metrics["loss"]) == [4.5, 3.0]
    with pytest.raises(ConfigError):
        folder.load(reduce={"loss": "median"})


def test_metrics_are_reduced_as_the_run_did(folder: RunFolder) -> None:
    two_ranks(folder, 3.0, 2.0).describe(reduce={"loss": "mean"})
    assert list(folder.load().metrics["loss"]) == [4.5, 3.0]
    assert list(folder.load(reduce={}).metrics["loss"]) == [3.0, 2.0]
    assert list(folder.load(reduce={"loss": "max"}).metrics["loss"]) == [6.0, 4.0]
    assert list(folder.load().workers["loss"]) == [3.0, 6.0, 2.0, 4.0]


def test_nested_metrics_are_columns(folder: RunFolder) -> None:
    folder.attempt()
    for rank in (0, 1):
        folder.reports(rank, 0, {"val": {"acc": rank, "top": {"5": 1}}, "val/acc": 9 * rank})
    run = folder.load(reduce={"val/acc": "sum"})
    assert (list(run.metrics["val/acc"]), list(run.metrics["val/top/5"])) == ([9], [1])
    assert list(run.workers["val/acc"]) == [0, 9]
    assert "val" not in run.metrics.columns


def test_warnings_are_texts(folder: RunFolder) -> None:
    folder.event("warning", message="careful")
    folder.event("checkpoint", number=1)
    folder.event("warning", rank=1, message="very")
    assert folder.load().warnings == ["careful", "very"]


def test_latest_attempt_of_a_repeated_iteration_counts(folder: RunFolder) -> None:
    folder.attempt(1, world_size=1)
    folder.reports(0, 0, {"loss": 3.0}, {"loss": 2.0}, {"loss": 1.0})
    folder.frame("attempt_end", {"keep_rounds": 1})
    folder.attempt(2, world_size=1, before=1)
    folder.reports(0, 1, {"loss": 2.5}, attempt=2)
    run = folder.load()
    assert list(run.metrics["loss"]) == [3.0, 2.5, 1.0]
    assert list(run.metrics["attempt"]) == [1, 2, 1]
    folder.event("run_end", kind="done", message="")
    assert list(folder.load().metrics["loss"]) == [3.0, 2.5], "the third was undone"


def test_segments_are_merged_in_order(folder: RunFolder) -> None:
    folder.attempt(world_size=1)
    for number in range(12):
        folder.reports(0, number, {"n": number}, segment=number)
    assert list(folder.load().metrics["n"]) == list(range(12))


def test_numbers_are_read_back_unchanged(folder: RunFolder) -> None:
    folder.attempt(world_size=1)
    folder.reports(0, 0, {"x": 0.1, "n": 2**53 + 1, "nan": math.nan, "inf": -math.inf, "text": "é", "list": [1, 2]})
    (row,) = folder.load().metrics.to_dict("records")
    assert (row["x"], row["n"], row["inf"], row["text"], row["list"]) == (0.1, 2**53 + 1, -math.inf, "é", [1, 2])
    assert math.isnan(row["nan"])


def test_events_and_samples_are_separate(folder: RunFolder) -> None:
    folder.event("warning", message="careful")
    folder.event("sample", rank=1, rss_bytes=5)
    folder.event("checkpoint", number=1)
    folder.frame("checkpoint", {"number": 1, "uri": "x"})  # a frame for readers, not an event
    run = folder.load()
    assert [(row["kind"], row["data"]) for row in run.events.to_dict("records")] == [
        ("warning", {"message": "careful"}),
        ("checkpoint", {"number": 1}),
    ]
    assert run.samples.to_dict("records") == [{"timestamp": 101.0, "rank": 1, "rss_bytes": 5}]


def test_description_and_config_are_read_from_run_json(folder: RunFolder) -> None:
    folder.describe(config={"lr": 0.1}, versions={"torch": "2"})
    run = folder.load()
    assert run.config == {"lr": 0.1}
    assert run.description["versions"] == {"torch": "2"}


def test_committed_checkpoints_are_listed_oldest_first(folder: RunFolder) -> None:
    store = CheckpointStore(Storage.from_uri(folder.path / "checkpoints"))
    for number in (2, 1):
        manifest = Manifest(
            number=number,
            attempt=1,
            iteration=number * 10,
            time_total_s=number * 1.5,
            world_size=1,
            created_s=0.0,
            metrics={"loss": 1 / number},
        )
        store.commit(manifest)
    store.directory(3).make_dirs()  # never committed
    found = folder.load().checkpoints
    assert [(c.iteration, c.time_total_s, c.metrics) for c in found] == [
        (10, 1.5, {"loss": 1.0}),
        (20, 3.0, {"loss": 0.5}),
    ]
    assert [c.path for c in found] == [store.path(1), store.path(2)]


# -- a run that is not whole -------------------------------------------------------------------------------------------


def test_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"not a run's folder: it has no events\.jsonl"):
        load_run(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="and does not exist"):
        load_run(tmp_path / "nothing")


def test_runs_in_a_trainers_folder_are_named(tmp_path: Path) -> None:
    for number in (1, 2, 10, 999, 1000):
        (tmp_path / f"run_{number:03d}").mkdir()
    with pytest.raises(CheckpointNotFoundError) as caught:
        load_run(tmp_path)
    assert str(caught.value).endswith(
        "It is a Trainer's folder, with run_001, run_002, run_010, run_999, run_1000; "
        f"did you mean {tmp_path / 'run_1000'}?"
    )


def test_run_that_has_just_started_has_no_metrics_and_no_outcome(folder: RunFolder) -> None:
    folder.event("run_start", name="run_001", run_dir="x")
    run = folder.load()
    assert (len(run.metrics), len(run.workers), len(run.samples), run.outcome) == (0, 0, 0, None)
    assert (run.config, run.checkpoints) == ({}, [])


def test_unfinished_lines_are_skipped(folder: RunFolder) -> None:
    two_ranks(folder, 3.0, 2.0)
    for name in ("events.jsonl", "metrics-0000.jsonl"):
        whole = (folder.path / name).read_bytes()
        last = whole.rstrip(b"\n").rpartition(b"\n")[2]
        (folder.path / name).write_bytes(whole + last[: len(last) // 2])
    assert list(folder.load().metrics["loss"]) == [3.0, 2.0]


def test_events_in_segments_are_read_as_one(folder: RunFolder) -> None:
    two_ranks(folder, 3.0, 2.0)
    folder.event("warning", message="careful")
    in_one = folder.load()
    whole = (folder.path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (folder.path / "events.jsonl").unlink()
    (folder.path / "events-0000.jsonl").write_bytes(b"".join(whole[:2]))
    (folder.path / "events-0001.jsonl").write_bytes(b"".join(whole[2:]))
    in_two = folder.load()
    assert len(in_two.events) == len(in_one.events) > 0 and in_two.events.equals(in_one.events)
    assert in_two.metrics.equals(in_one.metrics)


def test_lost_run_has_its_complete_rounds(folder: RunFolder) -> None:
    folder.attempt()
    folder.reports(0, 0, {"loss": 3.0}, {"loss": 2.0})
    folder.reports(1, 0, {"loss": 6.0})
    run = folder.load()
    assert list(run.metrics["loss"]) == [3.0]
    assert run.outcome is None


@pytest.mark.parametrize("kind", ["done", "stopped", "cancelled", "error"])
def test_the_outcome_is_how_the_run_ended(folder: RunFolder, kind: str) -> None:
    folder.frame("run_end", {"kind": kind})
    folder.event("run_end", kind=kind, message="")
    assert folder.load().outcome == kind


# -- two runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    return RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")


Pair = tuple[RunFolder, RunFolder]


def test_equal_runs_have_no_difference(pair: Pair) -> None:
    for folder in pair:
        two_ranks(folder, 3.0, 2.0, math.nan)
    difference = compare_runs(pair[0].path, pair[1].path)
    assert not difference
    assert str(difference) == "equal in all 3 iterations"


def test_metric_that_is_nan_in_one_run_and_missing_in_the_other_differs(pair: Pair) -> None:
    for folder, metrics in zip(pair, ({"loss": 1, "acc": math.nan}, {"loss": 1}), strict=True):
        folder.attempt(world_size=1)
        folder.reports(0, 0, metrics)
    assert str(compare_runs(pair[0].path, pair[1].path)) == "first difference at iteration 1, rank 0: acc: nan != None"
    assert not compare_runs(pair[0].path, pair[1].path, ignore=("acc",))


def test_the_first_difference_is_found_with_its_rank_and_metrics(pair: Pair) -> None:
    two_ranks(pair[0], 3.0, 2.0, 1.0)
    pair[1].attempt()
    for number, (one, two) in enumerate([(3.0, 6.0), (2.0, 4.5), (9.0, 9.0)]):
        pair[1].reports(0, number, {"loss": one, "epoch": number})
        pair[1].reports(1, number, {"loss": two, "epoch": number})
    difference = compare_runs(pair[0].path, pair[1].path)
    assert difference
    assert (difference.iteration, difference.rank, difference.metrics) == (2, 1, {"loss": (4.0, 4.5)})
    assert str(difference) == "first difference at iteration 2, rank 1: loss: 4.0 != 4.5"


def test_bits_are_compared_without_a_tolerance(pair: Pair) -> None:
    two_ranks(pair[0], 0.3)
    two_ranks(pair[1], 0.1 + 0.2)
    assert compare_runs(pair[0].path, pair[1].path)
    assert not compare_runs(pair[0].path, pair[1].path, rel_tol=1e-9)


def test_times_and_ignored_metrics_are_not_compared(pair: Pair) -> None:
    for index, folder in enumerate(pair):
        folder.attempt(world_size=1)
        folder.reports(0, 0, {"loss": 1.0, "host": index}, clock=1000.0 * index)
    assert compare_runs(pair[0].path, pair[1].path).metrics == {"host": (0, 1)}
    assert not compare_runs(pair[0].path, pair[1].path, ignore=("host",))


def test_groups_of_metrics_can_be_ignored(pair: Pair) -> None:
    for index, folder in enumerate(pair):
        folder.attempt(world_size=1)
        folder.reports(0, 0, {"loss": 1.0, "val": {"acc": index, "n": 1}})
    assert compare_runs(pair[0].path, pair[1].path).metrics == {"val/acc": (0, 1)}
    assert not compare_runs(pair[0].path, pair[1].path, ignore=("val",))
    assert not compare_runs(pair[0].path, pair[1].path, ignore=("val/acc",))


def test_runs_of_different_length_differ_at_their_end(pair: Pair) -> None:
    two_ranks(pair[0], 3.0, 2.0)
    two_ranks(pair[1], 3.0)
    difference = compare_runs(pair[0].path, pair[1].path)
    assert difference
    assert (difference.iteration, difference.lengths) == (None, (2, 1))
    assert str(difference) == "equal in the 1 iteration both have (1), then one ends (1-2 and 1)"


def test_resumed_run_is_compared_in_its_own_iterations(pair: Pair) -> None:
    two_ranks(pair[0], 5.0, 4.0, 3.0, 2.0, 1.0)
    resume(pair[1], 2.0, 1.0)
    difference = compare_runs(pair[0].path, pair[1].path)
    assert not difference
    assert str(difference) == "equal in the 2 iterations both have (4-5)"
    assert (difference.lengths, difference.spans) == ((5, 2), ((1, 5), (4, 5)))


def test_difference_of_a_resumed_run_is_found(pair: Pair) -> None:
    two_ranks(pair[0], 5.0, 4.0, 3.0, 2.0, 1.0)
    resume(pair[1], 2.0, 1.5)
    assert (compare_runs(pair[0].path, pair[1].path).iteration) == 5


def test_runs_without_an_iteration_in_common_are_not_equal(pair: Pair) -> None:
    two_ranks(pair[0], 5.0, 4.0)
    resume(pair[1], 2.0)
    difference = compare_runs(pair[0].path, pair[1].path)
    assert difference
    assert str(difference) == "no iteration in common (1-2 and 4)"


def resume(folder: RunFolder, *losses: float) -> None:
    """A run that starts from a checkpoint of iteration 3."""
    folder.attempt(before=3)
    for number, loss in enumerate(losses):
        for rank in (0, 1):
            folder.reports(rank, number, {"loss": loss * (rank + 1), "epoch": number + 3})


def test_a_metric_that_only_one_run_has_is_a_difference(pair: Pair) -> None:
    for folder, metrics in zip(pair, ({"loss": 1.0}, {"loss": 1.0, "acc": 0.5}), strict=True):
        folder.attempt(world_size=1)
        folder.reports(0, 0, metrics)
    assert compare_runs(pair[0].path, pair[1].path).metrics == {"acc": (None, 0.5)}


def test_a_rank_that_only_one_run_has_is_a_difference(pair: Pair) -> None:
    two_ranks(pair[0], 3.0)
    pair[1].attempt(world_size=1)
    pair[1].reports(0, 0, {"loss": 3.0, "epoch": 0})
    difference = compare_runs(pair[0].path, pair[1].path)
    assert (difference.iteration, difference.rank) == (1, 1)
    assert difference.metrics["loss"] == (6.0, None)


def test_runs_of_logical_workers_may_have_other_numbers_of_workers(pair: Pair) -> None:
    two_ranks(pair[0], 3.0, 2.0)
    pair[1].attempt(world_size=1)
    for number, loss in enumerate((3.0, 1.0)):
        pair[1].reports(0, number, {"loss": loss, "epoch": number})
    for folder in pair:
        folder.describe(logical_workers=4)
    difference = compare_runs(pair[0].path, pair[1].path)
    assert (difference.iteration, difference.rank, difference.metrics) == (2, 0, {"loss": (2.0, 1.0)})


def test_differences_of_config_and_versions_are_named(pair: Pair) -> None:
    for folder, rate in zip(pair, (0.1, 0.2), strict=True):
        two_ranks(folder, 1.0)
        folder.describe(config={"lr": rate, "epochs": 3}, versions={"torch": f"2.{rate}", "ray": "2"})
    difference = compare_runs(pair[0].path, pair[1].path)
    assert not difference  # the metrics are what counts
    assert difference.config == {"lr": (0.1, 0.2)}
    assert difference.versions == {"torch": ("2.0.1", "2.0.2")}
    assert "config: lr 0.1 / 0.2" in str(difference)
