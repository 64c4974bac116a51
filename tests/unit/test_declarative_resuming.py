"""Declarative trainings that are resumed: the same to the bit, from the right checkpoint, at the right row."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.checkpoint.links import list_manifests
from raysgd.checkpoint.storage.storage import Storage
from raysgd.declarative.entry import check_unused, find_start, finished, merge_checkpoint, train
from raysgd.declarative.reading import args_of, merge
from raysgd.errors import CheckpointError, ConfigError
from support import declared
from support.declared_runs import (
    RISING,
    STEPS,
    assert_equal,
    check_resuming,
    loop_of,
    numbers,
    run,
    run_without_seed,
    training,
)
from support.project import ROOT

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    declared.CALLS.clear()
    yield
    declared.CALLS.clear()


# -- resuming --------------------------------------------------------------------------------------------------------------

ORDERS = {
    "own order of raysgd": {},
    "random augmentation": {"dataset__train_args__noise": "random"},
    "numpy augmentation": {"dataset__train_args__noise": "numpy"},
    "torch augmentation": {"dataset__train_args__noise": "torch"},
    "sampler that draws": {"dataset_sampler__type": "support.declared.GlobalOrder"},
    "loader with a position": {"dataloader__type": "support.declared.PositionedLoader"},
    "loader that is not torch's": {"dataloader__type": "support.declared.PlainLoader"},
    "bf16": {"precision": "bf16"},
    "scheduler by epochs": {"lr_scheduler": {"type": "torch.optim.lr_scheduler.StepLR", "args": {"step_size": 1}}},
    "scheduler by steps": {
        "lr_scheduler": {"type": "torch.optim.lr_scheduler.StepLR", "args": {"step_size": 2}, "interval": "step"}
    },
    "merged": {"checkpoint__save_type": "merged"},
}


@pytest.mark.parametrize("steps", [2 * STEPS, STEPS + 2], ids=["after an epoch", "within an epoch"])
@pytest.mark.parametrize("changes", ORDERS.values(), ids=ORDERS)
def test_a_resumed_training_is_the_same_to_the_bit(tmp_path: Path, changes: dict[str, Any], steps: int) -> None:
    check_resuming(tmp_path, changes, steps)


def test_a_loader_with_processes_is_resumed_to_the_bit(tmp_path: Path) -> None:
    """In a new process: threads of the libraries that other tests have loaded make a forked process crash now and then."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom support.declared_runs import STEPS, check_resuming\n"
        "changes = {'dataloader__train_args': {'num_workers': 1}, 'dataset__train_args__noise': 'torch'}\n"
        "for steps in (2 * STEPS, STEPS + 2):\n    check_resuming(Path(sys.argv[1], str(steps)), changes, steps)\n"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path}
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_loader_with_a_position_reads_nothing_again(tmp_path: Path) -> None:
    values = training(dataloader__type="support.declared.PositionedLoader", max_epochs=1)
    run({**values, "max_train_steps": 2}, tmp_path)
    declared.PositionedLoader.reads = 0
    run(values, tmp_path)
    assert declared.PositionedLoader.reads == 11 - 4


def test_the_best_loss_survives_a_resume(tmp_path: Path) -> None:
    values = numbers([1.0], max_train_steps=1, checkpoint__every_n_train_steps=1, dataset__val_args={"values": [1.0]})
    values["optimizer"] = RISING
    better, _ = run(values, tmp_path)
    worse, _ = run({**values, "max_train_steps": 2}, tmp_path)
    assert (better["best_loss"], worse["best_loss"], worse["val_loss"]) == (2.0, 2.0, 3.0)


def test_without_validation_the_training_loss_decides(tmp_path: Path) -> None:
    run(numbers([1.0], max_train_steps=3, max_epochs=3, checkpoint__every_n_train_steps=1), tmp_path)
    with raysgd.local(dir=tmp_path):
        losses = [each.metrics["loss"] for each in raysgd.list_checkpoints()]
        assert losses == [each.metrics["train_loss"] for each in raysgd.list_checkpoints()]
        assert losses == sorted(losses, reverse=True)
        assert len(losses) == 3


def test_another_batch_size_within_an_epoch_continues_or_is_refused(tmp_path: Path) -> None:
    values = training(max_train_steps=2)  # 8 rows are done, in steps of 4
    run(values, tmp_path)
    same = {**values, "max_train_steps": 3, "micro_batch_size": 1, "grad_accumulation_steps": 4}
    metrics, _ = run_without_seed(same, tmp_path)
    assert metrics["finished_train_steps"] == 3
    with pytest.raises(
        ConfigError, match=r"after 12 rows of epoch 0, in steps of 4 rows; steps of 5 rows cannot continue"
    ):
        run({**values, "max_train_steps": 4, "micro_batch_size": 5, "grad_accumulation_steps": 1}, tmp_path)


@pytest.mark.parametrize(("before", "now"), [("step", "epoch"), ("epoch", "step")])
def test_scheduler_that_has_counted_by_another_interval_is_refused(before: str, now: str, tmp_path: Path) -> None:
    def values(interval: str, steps: int) -> dict[str, Any]:
        scheduler = {"type": "torch.optim.lr_scheduler.StepLR", "interval": interval, "args": {"step_size": 2}}
        return training(lr_scheduler=scheduler, max_train_steps=steps)

    run(values(before, 2), tmp_path)
    with pytest.raises(ConfigError, match=f"lr_scheduler.interval is '{now}', and was '{before}'"):
        run(values(now, 4), tmp_path)
    assert run(values(before, 4), tmp_path)[0]["finished_train_steps"] == 4


def test_data_of_another_size_is_refused_within_an_epoch(tmp_path: Path) -> None:
    run(training(max_train_steps=2), tmp_path)
    with pytest.raises(CheckpointError, match="within epoch 0 of 21 rows, and the data has 25"):
        run(training(max_train_steps=4, dataset__train_args__size=25), tmp_path)
    run(training(max_train_steps=STEPS), tmp_path)
    metrics, _ = run(training(max_train_steps=STEPS + 1, dataset__train_args__size=25), tmp_path)
    assert metrics["finished_train_steps"] == STEPS + 1


def test_what_hooks_save_comes_back(tmp_path: Path) -> None:
    values = training(max_train_steps=1, hook={"type": "support.declared.ExtraState"})
    run(values, tmp_path)
    run({**values, "max_train_steps": 2}, tmp_path)
    assert declared.CALLS == [3]


def test_what_hooks_cannot_save_is_named(tmp_path: Path) -> None:
    values = training(
        max_train_steps=1, hook={"type": "support.declared.ExtraState", "args": {"value": {"__type": "threading.Lock"}}}
    )
    with pytest.raises(raysgd.errors.UnsafeStateError, match="kept"):
        run(values, tmp_path)


def test_a_finished_training_is_recognised(tmp_path: Path) -> None:
    values = training(max_epochs=1, checkpoint__save_dir=str(tmp_path), checkpoint__resume_from="last")
    run(values, tmp_path / "run_001" / "checkpoints")
    args = args_of(values)
    start = find_start(args).checkpoint
    assert start is not None
    assert finished(args, start)["finished_train_steps"] == STEPS  # type: ignore[index]
    assert finished(args_of({**values, "max_epochs": 2}), start) is None


def test_counts_are_integers_also_in_checkpoints_and_after_a_resume(tmp_path: Path) -> None:
    values = training(max_epochs=1, checkpoint__save_dir=str(tmp_path), checkpoint__resume_from="last")
    first, _ = run(values, tmp_path / "run_001" / "checkpoints")
    start = find_start(args_of(values)).checkpoint
    assert start is not None
    again, _ = run(values, tmp_path / "run_001" / "checkpoints")
    for found in (first, start.metrics, again):
        assert {name: type(found[name]) for name in ("step", "epoch", "rows")} == dict.fromkeys(
            ("step", "epoch", "rows"), int
        )


def test_resume_from_finds_last_best_paths_and_nothing(tmp_path: Path) -> None:
    values = training(checkpoint__save_dir=str(tmp_path), max_epochs=2)
    for resume_from in ("last", "best"):
        assert find_start(args_of(merge(values, {"checkpoint.resume_from": resume_from}))).checkpoint is None
    with pytest.raises(raysgd.errors.CheckpointNotFoundError):
        find_start(args_of(merge(values, {"checkpoint.resume_from": str(tmp_path / "nothing")})))
    run(numbers([1.0], max_train_steps=3, max_epochs=3, optimizer=RISING), tmp_path / "run_001" / "checkpoints")
    found = {
        name: find_start(args_of(merge(values, {"checkpoint.resume_from": name}))).checkpoint
        for name in ("last", "best", str(tmp_path / "run_001"), str(tmp_path))
    }
    places = {name: Path(str(each.path)).name for name, each in found.items() if each is not None}
    assert list(places.values()) == ["checkpoint_000003", "checkpoint_000001", "checkpoint_000003", "checkpoint_000003"]


def test_training_that_begins_in_a_used_folder_is_refused(tmp_path: Path) -> None:
    values = training(checkpoint__save_dir=str(tmp_path), max_epochs=1)
    check_unused(args_of(values))
    run(values, tmp_path / "run_001" / "checkpoints")
    with pytest.raises(
        ConfigError, match=r"earlier training; give checkpoint.resume_from: last to resume it, or another"
    ):
        train(values)
    check_unused(args_of(merge(values, {"checkpoint.no_save": True})))


def test_another_micro_batch_continues_at_its_row_with_a_loader_that_saves_its_position(tmp_path: Path) -> None:
    values = numbers(
        [float(value) for value in range(12)],
        micro_batch_size=2,
        grad_accumulation_steps=2,
        dataloader__type="support.declared.PositionedLoader",
        hook={"type": "support.declared.SeenRows"},
    )
    run(values, tmp_path)
    changed = {**values, "micro_batch_size": 1, "grad_accumulation_steps": 4, "max_train_steps": 2}
    run_without_seed(changed, tmp_path)
    assert declared.CALLS == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]


def test_hooks_that_draw_do_not_change_a_resumed_training(tmp_path: Path) -> None:
    values = training(
        dataset_sampler__type="support.declared.GlobalOrder",
        hook={"type": "support.declared.Drawing"},
        max_train_steps=2 * STEPS,
    )
    whole, weights = run(values)
    run({**values, "max_train_steps": STEPS + 2}, tmp_path)
    resumed, weights_of_resumed = run_without_seed(values, tmp_path)
    assert resumed["train_loss"] == whole["train_loss"]
    assert_equal(weights, weights_of_resumed)


def test_the_best_checkpoint_is_never_one_whose_loss_is_nan(tmp_path: Path) -> None:
    values = numbers([1.0], max_train_steps=2, max_epochs=2, checkpoint__save_dir=str(tmp_path))
    values = merge(values, {"model.type": "support.declared.Diverging", "checkpoint.resume_from": "best"})
    run(values, tmp_path / "run_001" / "checkpoints")
    losses = [each.metrics["loss"] for _, each in list_manifests(Storage.from_uri(tmp_path))]
    assert losses[0] == 1.0 and math.isnan(losses[1])
    start = find_start(args_of(values)).checkpoint
    assert start is not None and start.metrics["loss"] == 1.0


def test_an_evaluation_may_have_other_batches_than_the_training(tmp_path: Path) -> None:
    values = training(max_train_steps=3, dataset__val_args={"dim": 4, "size": 5})
    metrics, _ = run(values, tmp_path)
    with raysgd.local(dir=tmp_path):
        found = loop_of({**values, "micro_batch_size": 5, "grad_accumulation_steps": 1}).evaluate("val")
    assert found["val_loss"] == pytest.approx(metrics["val_loss"])


def test_a_merged_checkpoint_is_continued(tmp_path: Path) -> None:
    run(training(max_epochs=1), tmp_path / "run_001" / "checkpoints")
    path = merge_checkpoint(tmp_path / "run_001", tmp_path / "merged")
    assert raysgd.Checkpoint.from_path(path).metrics["epochs"] == 1
    metrics, _ = run_without_seed(training(max_epochs=2), tmp_path / "merged")
    assert metrics["finished_train_steps"] == 2 * STEPS
    with pytest.raises(raysgd.errors.CheckpointNotFoundError):
        merge_checkpoint(tmp_path / "nothing", tmp_path / "merged")
