"""The files of a run, read as a user would: raw, by load_run, by compare_runs."""

from __future__ import annotations

import json
import math
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

import raysgd
from raysgd.backends.none import NoneConfig
from raysgd.errors import CheckpointNotFoundError
from support.poll import until
from support.runs import PATIENCE_S, latest_run, make_trainer, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)


TRAINER = {"seed": 5}


def draw(config: dict[str, Any]) -> None:
    """Report random numbers that depend on the seed; one of them differs on request."""
    for step in range(6):
        number = random.random()
        if step == config.get("differs_at") and raysgd.world_rank() == 1:
            number += 1e-12
        raysgd.report(step=step, number=number, rank=raysgd.world_rank())


def lines_of(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Return the JSON lines of the files that match a pattern, in order; they are standard JSON."""
    return [orjson.loads(line) for file in sorted(folder.glob(pattern)) for line in file.read_text().splitlines()]


def run_dir(trainer: raysgd.Trainer) -> Path:
    return Path(str(trainer.run_dir))


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_every_report_of_every_rank_is_in_the_metrics_files(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        for step in range(1000):
            raysgd.report(step=step, rank=raysgd.world_rank(), odd=math.nan if step % 2 else -math.inf)

    trainer.run(train_func, callbacks=quiet())
    found: dict[int, list[Any]] = {0: [], 1: []}
    for line in lines_of(run_dir(trainer), "metrics-*.jsonl"):
        assert line["first"] == len(found[line["rank"]]) and line["count"] == len(line["rows"])
        found[line["rank"]] += line["rows"]
    for rank, rows in found.items():
        assert [row[2]["step"] for row in rows] == list(range(1000))
        assert all(row[2]["rank"] == rank for row in rows)
        assert rows[0][2:] == [{"step": 0, "rank": rank, "odd": None}, [[["odd"], "-Infinity"]]]
        assert rows[1][3] == [[["odd"], "NaN"]]
    odd = list(latest_run(trainer).metrics["odd"])
    assert len(odd) == 1000 and odd[::2] == [-math.inf] * 500 and all(map(math.isnan, odd[1::2]))


def test_reports_that_cannot_be_written_are_counted_in_a_warning(
    trainer: raysgd.Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = tmp_path / "gone"

    def train_func(config: dict[str, Any]) -> int:
        raysgd.report(step=0)
        assert until(gone.exists, PATIENCE_S)
        for step in range(1, 201):
            raysgd.report(step=step)
        return 200

    class Replaces(raysgd.Callback):
        """Puts a file in the place of the run's folder."""

        folder = Path()

        def on_run_start(self, info: raysgd.RunInfo) -> None:
            self.folder = Path(info.run_dir)

        def on_result(self, result: raysgd.Result) -> None:
            if not gone.exists():
                assert until((self.folder / "run.json").exists, PATIENCE_S)
                self.folder.rename(tmp_path / "away")
                self.folder.touch()
                gone.touch()

    replaces = Replaces()
    assert trainer.run(train_func, callbacks=[*quiet(), replaces]) == 200
    assert trainer.run_info is not None
    first, last = trainer.run_info.warnings
    assert first.startswith("the run's files cannot be written, which is tried again: ")
    assert re.match(
        r"40[012] of 402 reports and \d+ events could not be written to .*run_\d+, and load_run will not", last
    )
    assert last in [record.getMessage() for record in caplog.records]
    replaces.folder.unlink()


def test_long_runs_are_written_in_segments(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        for step in range(600):
            raysgd.report(step=step, pad="x" * 10_000)

    trainer.run(train_func, callbacks=quiet())
    sizes = [file.stat().st_size for file in sorted(run_dir(trainer).glob("metrics-*.jsonl"))]
    assert len(sizes) >= 2 and 12_000_000 < sum(sizes) < 12_500_000  # two ranks, each report written once
    assert list(latest_run(trainer).metrics["step"]) == list(range(600))


def test_files_can_be_read_during_the_run(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        raysgd.report(step=0)
        while not raysgd.should_stop():
            time.sleep(0.01)

    stream = trainer.run_generator(train_func, callbacks=quiet())
    next(stream)
    folder = run_dir(trainer)
    assert until(lambda: lines_of(folder, "metrics-*.jsonl"), PATIENCE_S), "reports are flushed within a second"
    live = raysgd.load_run(folder)
    assert live.outcome is None and list(live.metrics["step"]) == [0]
    stream.cancel()
    assert list(stream) == []
    assert raysgd.load_run(folder).outcome == "cancelled"


# -- load_run ----------------------------------------------------------------------------------------------------------


def test_load_run_returns_metrics_and_events(trainer: raysgd.Trainer) -> None:
    def train_func(config: dict[str, Any]) -> None:
        for step in range(3):
            raysgd.report(step=step, loss=1.0 + raysgd.world_rank())
        raysgd.save_checkpoint({"step": 2})

    trainer.run(train_func, {"lr": 0.5}, callbacks=quiet())
    run = raysgd.load_run(run_dir(trainer))
    assert run.run_dir == trainer.run_dir and run.outcome == "done" and run.config == {"lr": 0.5}
    assert list(run.metrics["loss"]) == [1.0, 1.0, 1.0]
    assert list(run.metrics["training_iteration"]) == [1, 2, 3]
    assert {"timestamp", "time_total_s", "time_this_iter_s", "world_size", "attempt"} < set(run.metrics.columns)
    assert [tuple(row) for row in run.workers[["training_iteration", "rank", "loss"]].to_numpy()] == [
        (1, 0, 1.0), (1, 1, 2.0), (2, 0, 1.0), (2, 1, 2.0), (3, 0, 1.0), (3, 1, 2.0),
    ]  # fmt: skip
    assert list(raysgd.load_run(run_dir(trainer), reduce={"loss": "mean"}).metrics["loss"]) == [1.5] * 3
    (checkpoint,) = run.checkpoints
    assert checkpoint == trainer.get_last_checkpoint() and checkpoint.load() == {"step": 2}
    assert checkpoint.metrics["loss"] == 1.0

    kinds = list(run.events["kind"])
    assert kinds[0] == "run_start" and kinds[-1] == "run_end"
    assert kinds.index("worker_up") < kinds.index("attempt_start") < kinds.index("checkpoint")
    assert run.events["timestamp"].is_monotonic_increasing


def test_load_run_refuses_other_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="is not a run's folder"):
        raysgd.load_run(tmp_path)


def test_load_run_names_the_runs_in_a_trainers_folder(trainer: raysgd.Trainer) -> None:
    trainer.run(draw, callbacks=quiet())
    newest = run_dir(trainer)
    with pytest.raises(
        CheckpointNotFoundError, match=rf"It is a Trainer's folder, with run_001.*did you mean {newest}\?"
    ):
        raysgd.load_run(newest.parent)


def test_truncated_last_line_is_skipped(trainer: raysgd.Trainer) -> None:
    trainer.run(draw, callbacks=quiet())
    folder = run_dir(trainer)
    for file in (folder / "events.jsonl", *folder.glob("metrics-*.jsonl")):
        with open(file, "a") as out:
            out.write('{"seq": 99, "kind": "wor')
    assert len(raysgd.load_run(folder).metrics) == 6


# -- run.json ----------------------------------------------------------------------------------------------------------


def test_run_json_describes_the_run_without_secrets(trainer: raysgd.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    command = ["train.py", "--epochs", "3", "--api-key=leak-1", "--password", "leak-2", "--tokenizer", "bpe"]
    monkeypatch.setattr(sys, "argv", command)
    config = {"lr": 0.1, "wandb": {"api_key": "leak-3"}, "hf_token": "leak-4", "max_tokens": 512, "fn": draw}
    trainer.run(draw, config, callbacks=quiet())
    text = (run_dir(trainer) / "run.json").read_text()
    description = json.loads(text)

    assert "leak" not in text
    assert description["command"] == [
        "train.py",
        "--epochs",
        "3",
        "--api-key=***",
        "--password",
        "***",
        "--tokenizer",
        "bpe",
    ]
    shown = description["config"]
    assert shown["lr"] == 0.1 and shown["max_tokens"] == 512 and "function draw" in shown["fn"]
    assert shown["wandb"] == {"api_key": "***"} and shown["hf_token"] == "***"
    assert description["versions"]["ray"] == ray.__version__
    assert {"python", "raysgd", "numpy", "torch"} <= set(description["versions"])
    assert (description["train_func"], description["seed"], description["num_workers"]) == ("draw", 5, 2)
    assert description["backend"] == "none" and description["resources"] == [{"CPU": 1}] * 2
    assert [worker["rank"] for worker in description["workers"]] == [0, 1]
    assert len({worker["pid"] for worker in description["workers"]}) == 2


@dataclass(frozen=True, kw_only=True)
class WithKey(NoneConfig):
    """A backend whose config holds a secret key."""

    api_key: str


class Leaks(raysgd.Callback):
    """A callback that raises an error whose message holds a secret."""

    runs_in = "worker"

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def on_result(self, result: Any) -> None:
        raise ConnectionError(f"no answer to {self.secret} from s3://KEY:leak-4@bucket")


def test_no_file_holds_secrets(ray_cluster: Any, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> None:
        raysgd.report(step=0)

    config = {"hf_token": "leak-1", "data": "s3://KEY:leak-4@bucket/data"}
    env = {"env_vars": {"MY_API_KEY": "leak-2", "MODE": "x"}}
    with make_trainer(tmp_path, 1, WithKey(api_key="leak-3"), runtime_env=env) as trainer:
        for secret in ("leak-1", "leak-2", "leak-3"):
            trainer.run(train_func, config, callbacks=[*quiet(), Leaks(secret)])
            events = latest_run(trainer).events
            assert any("no answer to *** from s3://***@bucket" in str(data) for data in events["data"])
            for file in run_dir(trainer).glob("*.json*"):
                assert "leak" not in file.read_text(), file.name
        description = latest_run(trainer).description
    assert description["backend_args"] == {"api_key": "***"}
    assert description["runtime_env"] == {"env_vars": {"MY_API_KEY": "***", "MODE": "x"}}
    assert description["config"]["data"] == "s3://***@bucket/data"


# -- compare_runs ------------------------------------------------------------------------------------------------------


def test_equal_runs_compare_equal(trainer: raysgd.Trainer) -> None:
    folders = []
    for _ in range(2):
        trainer.run(draw, callbacks=quiet())
        folders.append(run_dir(trainer))
    difference = raysgd.compare_runs(*folders)
    assert not difference
    assert str(difference) == "equal in all 6 iterations"


def test_comparison_names_the_first_difference(trainer: raysgd.Trainer) -> None:
    trainer.run(draw, {"lr": 1}, callbacks=quiet())
    first = run_dir(trainer)
    trainer.run(draw, {"lr": 1, "differs_at": 3}, callbacks=quiet())
    difference = raysgd.compare_runs(first, run_dir(trainer))
    assert difference
    assert (difference.iteration, difference.rank) == (4, 1)
    assert list(difference.metrics) == ["number"]
    assert difference.config == {"differs_at": (None, 3)}
    assert "first difference at iteration 4, rank 1: number: " in str(difference)
    assert not raysgd.compare_runs(first, run_dir(trainer), rel_tol=1e-6)
    assert not raysgd.compare_runs(first, run_dir(trainer), ignore=("number",))


def test_runs_of_different_length_are_compared(trainer: raysgd.Trainer) -> None:
    trainer.run(draw, callbacks=quiet())
    first = run_dir(trainer)
    trainer.run(lambda: raysgd.report(step=0, number=random.random(), rank=raysgd.world_rank()), callbacks=quiet())
    difference = raysgd.compare_runs(first, run_dir(trainer))
    assert difference.iteration is None and difference.lengths == (6, 1)
    assert "equal in the 1 iteration both have (1), then one ends (1-6 and 1)" in str(difference)


# -- samples -----------------------------------------------------------------------------------------------------------


def test_worker_load_is_sampled(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        end = time.monotonic() + 4.5
        while time.monotonic() < end:
            raysgd.report(step=1)
            time.sleep(0.01)

    trainer.run(train_func, callbacks=quiet())
    run = latest_run(trainer)
    samples = run.samples
    assert set(samples["rank"]) == {0, 1}
    assert (samples["rss_bytes"] > 10_000_000).all() and (samples["cpu_percent"] >= 0).all()
    assert (samples["reports_per_s"] > 0).all() and (samples["time_per_report_s"] > 0.005).all()
    assert "sample" not in set(run.events["kind"])
