"""A page's data is read from a run's folder: all of it, or what is new."""

from __future__ import annotations

import base64
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller.frames import Frame
from raysgd.errors import CheckpointNotFoundError
from raysgd.runs.tail import JournalTail
from raysgd.viewer import page, run_data
from raysgd.viewer.catalog import Catalog
from raysgd.viewer.columns import encode
from raysgd.viewer.loaded_run import load_run
from raysgd.viewer.page import write_file, write_frame
from raysgd.viewer.run_data import RunData, as_texts
from support.journals import STARTED, WrittenRun


def decoded(encoded: dict[str, str]) -> list[float]:
    return list(np.frombuffer(base64.b64decode(encoded["data"]), dtype=f"<{encoded['type']}").astype(float))


def data_of(run: WrittenRun) -> RunData:
    return RunData(Storage.from_uri(run.path))


def column(answer: dict[str, Any], name: str) -> list[float]:
    return decoded(answer["results"]["columns"][name])


# -- results -----------------------------------------------------------------------------------------------------------


def test_page_has_the_results_that_load_run_has(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001", reduce={"loss": "mean"})
    run.begin_attempt([11, 12])
    for rank in (0, 1):
        run.report(*({"loss": i + rank, "val": {"acc": 0.5 * i}, "done": i == 2} for i in range(3)), rank=rank)
    run.end()
    answer = data_of(run).read(is_final=True)
    loaded = load_run(run.path).metrics
    assert decoded(answer["results"]["iterations"]) == [1, 2, 3] == list(loaded["training_iteration"])
    for name in ("loss", "val/acc", "done", "world_size", "timestamp", "time_total_s"):
        assert column(answer, name) == list(loaded[name].astype(float)), name
    assert (answer["state"], answer["results"]["ranks"]) == ("done", [0, 1])
    ranks = data_of(run)
    ranks.read(is_final=True)
    assert [decoded(curve["y"]) for curve in ranks.rank_curves("loss")["curves"].values()] == [[0, 1, 2], [1, 2, 3]]
    assert decoded(ranks.rank_curves("loss", step=2)["curves"]["1"]["y"]) == [1, 3]


def test_file_has_the_numbers_of_the_rank_that_results_are_of_once(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11, 12])
    for rank in (0, 1):
        run.report(*({"loss": 1 / (i + 1) + rank} for i in range(20)), rank=rank)
    run.end()
    file = "".join(write_file([data_of(run)]))
    data = data_of(run)
    data.read(is_final=True)
    of_rank = data.rank_curves("loss")["curves"]
    assert [file.count(of_rank[rank]["y"]["data"]) for rank in ("0", "1")] == [1, 1]


def test_iterations_that_a_finished_run_did_not_repeat_disappear(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11, 12])
    for rank in (0, 1):
        run.report(*({"loss": 1.0} for _ in range(3)), {"loss": math.nan}, rank=rank)
    run.begin_attempt([11, 13], iterations_before=1)
    for rank in (0, 1):
        run.report({"loss": 0.5}, rank=rank)
    data = data_of(run.write())
    before = data.read()
    assert column(before, "loss")[:3] == [1, 0.5, 1] and before["results"]["nonfinite"]
    run.end()
    after = data.read(before["cursor"], is_final=True)["results"]
    assert (after["from"], decoded(after["iterations"]), after["nonfinite"]) == (3, [], {})
    answer = data_of(run).read(is_final=True)
    assert column(answer, "loss") == [1, 0.5] == list(load_run(run.path).metrics["loss"])
    assert [decoded(curve["y"]) for curve in data.rank_curves("loss")["curves"].values()] == [[1, 0.5]] * 2


def test_numbers_that_are_not_finite_are_listed(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11])
    run.report(
        {"loss": 1.0}, {"loss": math.nan}, {"loss": -math.inf}, {"note": "text", "shape": [1, 2]}, {"loss": None}
    )
    answer = data_of(run.end()).read(is_final=True)
    assert np.array_equal(column(answer, "loss"), [1, math.inf, math.inf, math.nan, math.nan], equal_nan=True)
    assert answer["results"]["nonfinite"] == {"loss": {"count": 2, "first": [[2, "NaN"], [3, "-Infinity"]]}}
    assert answer["results"]["texts"] == {"note": [[4, "text"]], "shape": [[4, "[1, 2]"]]}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.5, 2.25], "f4"),
        ([0, 1 << 24], "f4"),
        ([0, (1 << 24) + 1], "f8"),
        ([1e300, 1.0], "f8"),
        ([1000.0001, 1000.0002], "f8"),
        ([math.nan], "f4"),
        ([], "f4"),
    ],
)
def test_numbers_take_four_bytes_where_that_cannot_be_seen(values: list[float], kind: str) -> None:
    encoded = encode(values)
    assert encoded["type"] == kind
    assert np.allclose(decoded(encoded), values, rtol=1e-7, atol=0, equal_nan=True)
    assert encode(values, is_time=True)["type"] == "f8"


# -- what the time was used for ----------------------------------------------------------------------------------------


def test_time_of_a_live_run_counts_up_to_now_and_is_added_up_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, clock = [STARTED + 30.0], [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    run = WrittenRun(tmp_path / "run_001")
    run.now += 2
    run.begin_attempt([11, 12])
    run.now += 10
    for rank in (0, 1):
        run.event("sample", rank=rank, steps=5, uses={"setup": 2.0, "training": 8.0})
    run.event("paused")
    data = data_of(run.write())
    first = data.time_used()
    assert (first["seconds"]["paused"], first["is_final"]) == (pytest.approx(2 * 18), False)
    assert first["shares"].keys() == first["seconds"].keys() - {"paused"} and first["goodput"] == pytest.approx(8 / 12)
    now[0] += 100
    assert data.time_used() == first, "a page asks again and again"
    clock[0] += 100
    assert data.time_used()["seconds"]["paused"] == pytest.approx(2 * 118)
    run.now += 50
    run.event("resumed")
    run.end()
    clock[0] += 100
    last = data.time_used()
    now[0] += 100
    clock[0] += 100
    assert last["is_final"] and last["seconds"]["paused"] == pytest.approx(2 * 50) and data.time_used() == last


# -- what is new -------------------------------------------------------------------------------------------------------


def test_second_read_has_only_what_is_new(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11])
    run.report({"loss": 3.0}, {"loss": 2.0})
    data = data_of(run.write())
    first = data.read()
    assert column(first, "loss") == [3, 2] and "facts" in first
    assert data.read(first["cursor"]).keys() == {"cursor", "state", "is_closed", "is_behind", "updated"}
    run.report({"loss": 1.0})
    run.write()
    second = data.read(first["cursor"])
    assert (second["results"]["from"], column(second, "loss")) == (3, [1])
    assert "facts" not in second
    assert column(data.read(), "loss") == [3, 2, 1], "another page begins with all results"
    run.end()
    last = data.read(second["cursor"])
    assert not second["is_closed"] and last["is_closed"]
    assert last["state"] == "done" and "results" not in last and "facts" in last


def test_repeated_iterations_replace_those_of_the_page(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11])
    run.report({"loss": 4.0, "old": 1}, {"loss": 3.0, "old": math.nan}, {"loss": 2.0})
    data = data_of(run.write())
    cursor = data.read()["cursor"]
    run.frame("attempt_end", {"keep_rounds": 1})
    run.begin_attempt([12], iterations_before=1)
    run.report({"loss": 30.0})
    run.write()
    answer = data.read(cursor)
    assert (answer["results"]["from"], column(answer, "loss")) == (2, [30, 2])
    assert answer["results"]["nonfinite"] == {}, "the value that was not finite was replaced"


def test_line_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11])
    run.report({"loss": 1.0})
    run.write()
    file = run.path / "metrics-0000.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    data = data_of(run)
    answer = data.read()
    assert "results" not in answer
    file.write_bytes(whole)
    assert column(data.read(answer["cursor"]), "loss") == [1]


def test_frames_come_in_order_though_files_are_written_one_after_the_other(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11])
    run.report({"loss": 1.0})
    run.event("warning", message="later than the report")
    run.write()
    metrics = run.path / "metrics-0000.jsonl"
    hidden = metrics.rename(run.path / "hidden")
    now = [0.0]
    tail = JournalTail(Storage.from_uri(run.path), clock=lambda: now[0])

    def kinds(found: list[Frame]) -> list[str]:
        return [frame.data["kind"] if frame.kind == "event" else frame.kind for frame in found]

    assert kinds(tail.read()) == ["run_start", "worker_up", "attempt", "attempt_start", "entered"]
    assert tail.read() == []
    hidden.rename(metrics)
    assert kinds(tail.read()) == ["reports", "warning"]
    metrics.unlink()
    late = JournalTail(Storage.from_uri(run.path), clock=lambda: now[0])
    assert len(late.read()) == 5
    now[0] = 60.0
    assert kinds(late.read()) == ["warning"], "a report that was lost does not hide what follows"


def test_frames_after_a_restart_of_the_controller_are_not_awaited(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11])
    run._seq += 10**9
    run.event("controller_restart", attempt=1)
    run.write()
    tail = JournalTail(Storage.from_uri(run.path))
    assert [frame.data.get("kind") for frame in tail.read()][-1] == "controller_restart"


def test_file_system_other_than_the_disk_is_read_from_where_the_last_read_ended(tmp_path: Path) -> None:
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11])
    run.report({"loss": 1.0})
    run.write()
    files = PyFileSystem(FSSpecHandler(DirFileSystem(str(tmp_path), LocalFileSystem())))
    data = RunData(Storage(files, "run_001", uri="memory://run_001"))
    cursor = data.read()["cursor"]
    run.report({"loss": 0.5})
    run.write()
    assert column(data.read(cursor), "loss") == [0.5]


# -- facts -------------------------------------------------------------------------------------------------------------


def test_timeline_has_processes_attempts_and_checkpoints(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11, 12])
    run.now += 10
    saved = {"number": 1, "uri": "runs/checkpoint_000001", "iteration": 4, "metrics": {"loss": 1.0}}
    run.event("checkpoint", **saved, seconds=0.5, size_bytes=10)
    run.event("checkpoint_deleted", number=1)
    run.event("failure", ranks=[1], nodes=["node-1"], error="rank 1 died", action="retry 1")
    run.now += 2
    run.begin_attempt([11, 13], iterations_before=4, checkpoint="runs/checkpoint_000001")
    run.now += 4
    run.event("left", rank=1, attempt=2)
    run.now += 1
    timeline = data_of(run.end("error", message="given up")).read(is_final=True)["facts"]["timeline"]
    lives = {(life["rank"], life["pid"]): life for life in timeline["workers"]}
    assert lives.keys() == {(0, 11), (1, 12), (1, 13)}
    assert (lives[1, 12]["end"], lives[1, 12]["how"]) == (STARTED + 10, "died")
    assert (lives[0, 11]["end"], lives[0, 11]["how"]) == (STARTED + 17, "end")
    assert lives[0, 11]["inside"] == [[STARTED + 0.5, STARTED + 10], [STARTED + 12.5, STARTED + 17]]
    assert lives[1, 13]["start"] == STARTED + 12 and lives[1, 13]["inside"] == [[STARTED + 12.5, STARTED + 16]]
    first, second = timeline["attempts"]
    assert (first["end"], first["why"]) == (STARTED + 10, "rank 1 died")
    assert (second["checkpoint"], second["entered"]) == ("checkpoint_000001", STARTED + 12.5)
    (found,) = timeline["checkpoints"]
    assert (found["seconds"], found["num_bytes"], found["is_deleted"]) == (0.5, 10, True)
    assert [event["kind"] for event in timeline["events"]] == ["run_start", "failure", "run_end"]


def test_worker_whose_death_ends_the_run_has_died(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11, 12])
    run.now += 10
    run.event("failure", ranks=[1], nodes=["node-1"], error="rank 1 died", action="give up")
    data = data_of(run.write())
    live = data.read()
    run.now += 1
    run.end("error", message="rank 1 died")
    ended = data.read()
    for answer, of_other in ((live, None), (ended, STARTED + 11)):
        ends = {life["rank"]: (life["end"], life["how"]) for life in answer["facts"]["timeline"]["workers"]}
        assert ends == {0: (of_other, "end" if of_other else ""), 1: (STARTED + 10, "died")}


def test_workers_of_a_smaller_group_and_of_a_pause_are_released(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11, 12, 13])
    run.now += 10
    run.event("failure", ranks=[0], nodes=["node-1"], error="rank 0 died", action="retry 1")
    run.begin_attempt([12, 13])
    run.now += 10
    run.event("paused", attempt=2)
    data = data_of(run.write())
    answer = data.read()
    assert answer["state"] == "paused"
    lives = [(life["rank"], life["pid"], life["how"]) for life in answer["facts"]["timeline"]["workers"]]
    assert lives == [(0, 11, "died"), (1, 12, "left"), (2, 13, "left"), (0, 12, "left"), (1, 13, "left")]


def test_secrets_stay_redacted(tmp_path: Path) -> None:
    run = WrittenRun(
        tmp_path / "run_001", config={"api_key": "hunter2-long", "opt": {"lr": 0.1}}, versions={"ray": "2.60"}
    )
    run.event("warning", message="login at s3://name:hunter2-long@bucket failed")
    facts = data_of(run.end("error", message="token=hunter2-long")).read(is_final=True)["facts"]
    assert facts["config"] == {"api_key": "***", "opt.lr": "0.1"} and facts["versions"] == {"ray": "2.60"}
    assert "hunter2" not in str(facts)


def test_samples_and_checkpoints_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_data, "MAX_SAMPLES", 10)
    run = WrittenRun(tmp_path / "run_001")
    run.begin_attempt([11])
    for number in range(100):
        run.now += 2
        run.event("sample", rank=0, node="node-1", run="run_001", cpu_percent=1.0, rss_bytes=number, gpu_percent=None)
    samples = data_of(run.write()).read()["facts"]["samples"]["0"]
    assert samples.keys() == {"time", "cpu_percent", "rss_bytes"}
    times = decoded(samples["time"])
    assert len(times) <= 10 and times[0] == STARTED + 2 and times[-1] > STARTED + 150


def test_config_is_shown_by_dotted_names() -> None:
    assert as_texts({"a": {"b": [1, "x"], "c": {}}, "d": None}) == {"a.b": '[1, "x"]', "a.c": "{}", "d": "null"}


def test_run_without_results_or_description_is_read(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    (run.path / "run.json").unlink()
    data = data_of(run.end("error", error_type="WorkerError", message="no worker could start"))
    answer = data.read()
    assert answer["state"] == "error" and "results" not in answer
    assert answer["facts"]["error"]["message"] == "no worker could start"
    with pytest.raises(CheckpointNotFoundError, match="not a run's folder"):
        RunData(Storage.from_uri(tmp_path)).read()


# -- the list ----------------------------------------------------------------------------------------------------------


def test_catalog_lists_runs_at_any_level_and_keeps_their_numbers(tmp_path: Path) -> None:
    first = WrittenRun(tmp_path / "a" / "run_001")
    first.begin_attempt([11])
    first.end()
    catalog = Catalog(Storage.from_uri(tmp_path))
    (listed,) = catalog.list_runs()
    assert (listed["name"], listed["state"], listed["started"]) == ("a/run_001", "done", STARTED)
    second = WrittenRun(tmp_path / "0" / "run_001")
    second.now += 100
    second.event("warning", message="new")
    second.event("paused", attempt=1)
    second.write()
    (tmp_path / "0" / "run_002").mkdir()
    (tmp_path / "0" / "run_002" / "events.jsonl").write_text("not JSON\n")
    states = {run["name"]: (run["id"], run["state"]) for run in catalog.list_runs()}
    assert states["a/run_001"] == (listed["id"], "done")
    assert states["0/run_001"][1] == "paused" and states["0/run_002"][1] == "unreadable"
    assert catalog.open_run(listed["id"]).read()["facts"]["name"] == "a/run_001"
    for number in (-1, 3):
        with pytest.raises(CheckpointNotFoundError):
            catalog.open_run(number)
    shutil.rmtree(tmp_path / "a")
    assert {run["name"] for run in catalog.list_runs()} == {"0/run_001", "0/run_002"}


def test_catalog_of_a_run_lists_that_run(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run_001")
    run.end("stopped")
    assert [found["state"] for found in Catalog(Storage.from_uri(run.path)).list_runs()] == ["stopped"]
    assert Catalog(Storage.from_uri(tmp_path / "missing")).list_runs() == []


def test_large_page_is_left_out_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = WrittenRun(tmp_path / "run")
    run.begin_attempt([1])
    run.report({"loss": 1.0})
    run.end()
    assert write_frame(str(tmp_path / "run")).startswith("<iframe ")
    monkeypatch.setattr(page, "_MAX_FRAME_CHARACTERS", 1000)
    assert write_frame(str(tmp_path / "run")) == (
        f"<p>Curves and timeline: <code>raysgd report {tmp_path / 'run'}</code></p>"
    )
    assert write_frame(str(tmp_path / "missing")) == ""
