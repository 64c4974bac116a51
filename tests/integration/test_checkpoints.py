"""Checkpoints of a Trainer: saving, resuming, retention, and failing storage."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    MissingMetricError,
    ReshardError,
    StorageError,
    UnsafeStateError,
    UsageError,
)
from support.poll import until
from support.runs import events_of, latest_run, make_trainer, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)

TORCH_TRAINER = {"num_workers": 3, "seed": 3, "deterministic": True}


@pytest.fixture(scope="module")
def picky_trainer(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raysgd.Trainer]:
    """A Trainer with one worker that keeps the two checkpoints with the highest accuracy."""
    keeps = raysgd.CheckpointConfig(num_to_keep=2, score_attribute="accuracy")
    with make_trainer(tmp_path_factory.mktemp("runs"), 1, checkpoint_config=keeps) as trainer:
        yield trainer


def last_of(trainer: raysgd.Trainer) -> raysgd.Checkpoint:
    checkpoint = trainer.get_last_checkpoint()
    assert checkpoint is not None
    return checkpoint


def on_storage(trainer: raysgd.Trainer) -> list[str]:
    return sorted(os.listdir(Path(str(trainer.run_dir)) / "checkpoints"))


def load() -> Any:
    return raysgd.load_checkpoint()


def save_and_report(config: dict[str, Any]) -> Any:
    """Save and report ``config["steps"]`` steps, or resume; return the state that the run started from."""
    state = raysgd.load_checkpoint()
    start = 0 if state is None else state["step"] + 1
    for step in range(start, config["steps"]):
        raysgd.report(step=step)
        raysgd.save_checkpoint({"step": step, "from": raysgd.world_rank()})
    return state


# -- saving ------------------------------------------------------------------------------------------------------------


def test_state_of_rank_0_is_saved_and_loaded_on_all_ranks(trainer: raysgd.Trainer) -> None:
    def train_func() -> Any:
        rank = raysgd.world_rank()
        before = raysgd.load_checkpoint()
        raysgd.save_checkpoint({"from": rank, "weights": [0.5, math.inf]} if rank == 0 else None)
        while (state := raysgd.load_checkpoint()) is None:  # the commit happens in the background
            time.sleep(0.01)
        return before, state

    returned = trainer.run(train_func, callbacks=quiet(), returns="all")
    saved = {"from": 0, "weights": [0.5, math.inf]}
    assert returned == [(None, saved), (None, saved)]
    assert last_of(trainer).load() == saved


def test_all_ranks_load_the_same_checkpoint(trainer: raysgd.Trainer) -> None:
    def train_func() -> list[Any]:
        seen = []
        for step in range(40):
            raysgd.save_checkpoint(step)
            time.sleep(0.02 * raysgd.world_rank())  # rank 1 loads later, when more is committed
            seen.append(raysgd.load_checkpoint())
            raysgd.barrier()
        return seen

    first, second = trainer.run(train_func, callbacks=quiet(), returns="all")
    assert first == second
    assert first[-1] is not None


def test_loaded_checkpoint_is_not_deleted_before_it_is_read(ray_cluster: Any, tmp_path: Path) -> None:
    def train_func() -> list[Any]:
        seen = []
        for step in range(20):
            for number in range(2):
                raysgd.save_checkpoint((step, number))
            time.sleep(0.03 * raysgd.world_rank())
            seen.append(raysgd.load_checkpoint())
        return seen

    with make_trainer(tmp_path, checkpoint_config=raysgd.CheckpointConfig(num_to_keep=1)) as trainer:
        first, second = trainer.run(train_func, callbacks=quiet(), returns="all")
        assert first == second
        assert last_of(trainer).load() == (19, 1)
        assert len(on_storage(trainer)) == 1


def test_all_ranks_list_the_same_checkpoints_and_can_load_them(ray_cluster: Any, tmp_path: Path) -> None:
    def train_func() -> list[Any]:
        seen = []
        for step in range(300):
            raysgd.report(step=step)
            raysgd.save_checkpoint(step)
            time.sleep(0.03 * raysgd.world_rank())  # rank 1 reads later, when checkpoints could have been deleted
            listed = raysgd.list_checkpoints()
            seen.append(
                [(checkpoint.metrics["step"], raysgd.load_checkpoint(checkpoint.path)) for checkpoint in listed]
            )
            if raysgd.broadcast(step > 10 and len(listed) == 2):  # a slow disk commits late
                break
        return seen

    with make_trainer(tmp_path, checkpoint_config=raysgd.CheckpointConfig(num_to_keep=2)) as trainer:
        first, second = trainer.run(train_func, callbacks=quiet(), returns="all")
        assert first == second
        assert all(metric == state for listed in first for metric, state in listed)
        assert max(len(listed) for listed in first) == 2
        assert len(on_storage(trainer)) == 2


def test_run_without_a_save_has_no_checkpoint(trainer: raysgd.Trainer) -> None:
    trainer.run(save_and_report, {"steps": 1}, callbacks=quiet())
    assert trainer.get_last_checkpoint() is not None
    trainer.run(save_and_report, {"steps": 0}, callbacks=quiet())
    assert trainer.get_last_checkpoint() is None and trainer.get_best_checkpoint() is None


def test_state_can_change_right_after_save(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        import numpy as np

        weights = np.zeros(1 << 20)
        for step in range(3):
            weights += 1
            raysgd.save_checkpoint({"step": step, "weights": weights})

    trainer.run(train_func, callbacks=quiet())
    for checkpoint in latest_run(trainer).checkpoints:
        state = checkpoint.load()
        assert set(state["weights"]) == {state["step"] + 1.0}
    assert len(latest_run(trainer).checkpoints) == 3


def test_each_rank_saves_and_gets_its_own_part(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def save() -> None:
        raysgd.save_checkpoint({"part of": raysgd.world_rank()}, all_ranks=True)

    trainer.run(save, callbacks=quiet())
    checkpoint = last_of(trainer)
    assert [checkpoint.load(rank=rank) for rank in (0, 1)] == [{"part of": 0}, {"part of": 1}]
    found = trainer.run(load, resume_from=checkpoint, callbacks=quiet(), returns="all")
    assert found == [{"part of": 0}, {"part of": 1}]
    with make_trainer(tmp_path, 1) as alone, pytest.raises(ReshardError, match="by 2 ranks and cannot be split over 1"):
        alone.run(load, resume_from=checkpoint, callbacks=quiet())


def test_user_files_are_saved_and_loaded(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def save(config: dict[str, Any]) -> None:
        folder = Path(config["folder"])
        if raysgd.world_rank() == 0:
            (folder / "deep").mkdir(parents=True)
            (folder / "model.bin").write_bytes(b"weights")
            (folder / "deep" / "vocabulary.txt").write_text("words")
        raysgd.save_checkpoint(folder if raysgd.world_rank() == 0 else None, files=True)
        if raysgd.world_rank() == 0:
            shutil.rmtree(folder)

    def read() -> tuple[bytes, str]:
        folder = Path(raysgd.load_checkpoint())
        return (folder / "model.bin").read_bytes(), (folder / "deep" / "vocabulary.txt").read_text()

    trainer.run(save, {"folder": str(tmp_path / "of the user")}, callbacks=quiet())
    checkpoint = last_of(trainer)
    found = trainer.run(read, resume_from=checkpoint, callbacks=quiet(), returns="all")
    assert found == [(b"weights", "words")] * 2
    assert (Path(checkpoint.load()) / "model.bin").read_bytes() == b"weights"


def test_ranks_may_save_an_empty_folder_or_no_files(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def save(config: dict[str, Any]) -> None:
        folder = Path(config["folder"]) / str(raysgd.world_rank())
        folder.mkdir(parents=True)
        raysgd.save_checkpoint(folder if raysgd.world_rank() == 0 else None, files=True)
        raysgd.save_checkpoint(folder if raysgd.world_rank() == 1 else None, files=True, all_ranks=True)
        (folder / "shard").write_text(str(raysgd.world_rank()))
        raysgd.save_checkpoint(folder if raysgd.world_rank() == 1 else None, files=True, all_ranks=True)

    def read(config: dict[str, Any]) -> list[list[str]]:
        return [sorted(os.listdir(raysgd.load_checkpoint(path))) for path in config["paths"]]

    trainer.run(save, {"folder": str(tmp_path / "shards")}, callbacks=quiet())
    paths = [checkpoint.path for checkpoint in latest_run(trainer).checkpoints]
    assert trainer.run(read, {"paths": paths}, callbacks=quiet(), returns="all") == [[[], [], []], [[], [], ["shard"]]]


def test_state_that_needs_pickle_is_named_and_refused(trainer: raysgd.Trainer) -> None:
    def train_func(config: dict[str, Any]) -> None:
        state = {"step": 1, "scheduler": {"fn": [lambda step: step + 1]}}
        raysgd.save_checkpoint(state, allow_pickle=config["allow_pickle"])

    with pytest.raises(UnsafeStateError, match=r"state\['scheduler'\]\['fn'\]\[0\] is a function") as caught:
        trainer.run(train_func, {"allow_pickle": False}, callbacks=quiet())
    assert caught.value.path == "state['scheduler']['fn'][0]"
    assert trainer.get_last_checkpoint() is None

    trainer.run(train_func, {"allow_pickle": True}, callbacks=quiet())
    checkpoint = last_of(trainer)
    with pytest.raises(UnsafeStateError, match="allow_pickle=True"):
        checkpoint.load()
    assert checkpoint.load(allow_pickle=True)["scheduler"]["fn"][0](1) == 2
    with pytest.raises(UnsafeStateError, match="allow_pickle=True"):
        trainer.run(load, resume_from=checkpoint, callbacks=quiet())


@pytest.mark.parametrize("other", ["reports", "returns", "saves once more"])
def test_unequal_numbers_of_saves_raise(trainer: raysgd.Trainer, other: str) -> None:
    def train_func(config: dict[str, Any]) -> None:
        is_other = raysgd.world_rank() == 1
        for step in range(5):
            if not is_other or config["other"] == "saves once more":
                raysgd.save_checkpoint({"step": step})
            if not (is_other and config["other"] == "returns"):
                raysgd.report(step=step)
        if is_other and config["other"] == "saves once more":
            raysgd.save_checkpoint({"step": 5})

    with pytest.raises(
        CheckpointError, match=r"called by some ranks only \(rank 0: \d, rank 1: \d\)\. Every rank calls"
    ):
        trainer.run(train_func, {"other": other}, callbacks=quiet())


def test_save_does_not_wait_for_returned_ranks(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        for step in range(4 if raysgd.world_rank() == 0 else 2):
            raysgd.report(step=step)
            raysgd.save_checkpoint({"step": step})

    trainer.run(train_func, callbacks=quiet())
    assert last_of(trainer).load() == {"step": 3}
    assert [checkpoint.iteration for checkpoint in latest_run(trainer).checkpoints] == [1, 2, 3, 4]


def test_save_without_a_state_on_rank_0_raises(trainer: raysgd.Trainer) -> None:
    with pytest.raises(CheckpointError, match=r"save_checkpoint\(None\) on rank 0"):
        trainer.run(lambda: raysgd.save_checkpoint(None), callbacks=quiet())


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["checkpoint", "path", "Path", "state"])
def test_run_resumes_from_a_checkpoint(trainer: raysgd.Trainer, kind: str) -> None:
    trainer.run(save_and_report, {"steps": 3}, callbacks=quiet())
    saved = last_of(trainer)
    assert saved.iteration == 3 and saved.metrics["step"] == 2
    path = str(saved.path)
    given = {"checkpoint": saved, "path": path, "Path": Path(path), "state": {"step": 2, "from": 0}}[kind]

    stream = trainer.run_generator(save_and_report, {"steps": 5}, resume_from=given, callbacks=quiet())
    results = list(stream)
    assert stream.get_returns() == {"step": 2, "from": 0}
    assert [result["step"] for result in results] == [3, 4]
    before = 0 if kind == "state" else 3
    assert [result["training_iteration"] - before for result in results] == [1, 2]
    assert results[0]["time_total_s"] >= (0 if kind == "state" else saved.time_total_s)
    assert last_of(trainer).iteration == before + 2
    assert last_of(trainer).load()["step"] == 4


def test_missing_checkpoint_raises(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint at"):
        trainer.run(save_and_report, {"steps": 1}, resume_from=tmp_path, callbacks=quiet())


def test_folder_of_a_run_means_its_newest_checkpoint(trainer: raysgd.Trainer) -> None:
    trainer.run(save_and_report, {"steps": 1}, callbacks=quiet())
    stream = trainer.run_generator(save_and_report, {"steps": 2}, resume_from=trainer.run_dir, callbacks=quiet())
    assert [result["step"] for result in stream] == [1]
    assert stream.get_returns() == {"step": 0, "from": 0}


def test_damaged_checkpoint_raises(trainer: raysgd.Trainer) -> None:
    trainer.run(save_and_report, {"steps": 1}, callbacks=quiet())
    checkpoint = last_of(trainer)
    (part,) = Path(str(checkpoint.path)).glob("*-r00000.json")
    part.write_bytes(part.read_bytes().replace(b'"step"', b'"stop"'))
    with pytest.raises(CheckpointCorruptError, match=part.name):
        trainer.run(save_and_report, {"steps": 2}, resume_from=checkpoint, callbacks=quiet())
    with pytest.raises(CheckpointCorruptError, match=part.name):
        checkpoint.load()


# -- retention ---------------------------------------------------------------------------------------------------------


def save_scored(config: dict[str, Any]) -> None:
    for step, accuracy in enumerate(config["accuracies"]):
        if config["order"] == "report first":
            raysgd.report(step=step, accuracy=accuracy)
            raysgd.save_checkpoint({"step": step})
        elif config["order"] == "save first":
            raysgd.save_checkpoint({"step": step})
            raysgd.report(step=step, accuracy=accuracy)
        else:
            raysgd.report(step=step, accuracy=0.5)
            raysgd.save_checkpoint({"step": step}, metrics={"accuracy": accuracy})


@pytest.mark.parametrize("order", ["report first", "save first", "metrics given"])
def test_best_and_newest_checkpoints_are_kept(picky_trainer: raysgd.Trainer, order: str) -> None:
    accuracies = [0.1, 0.9, math.nan, 0.8, 0.2]
    picky_trainer.run(save_scored, {"accuracies": accuracies, "order": order}, callbacks=quiet())
    assert on_storage(picky_trainer) == ["checkpoint_000002", "checkpoint_000004", "checkpoint_000005"]
    last, best = last_of(picky_trainer), picky_trainer.get_best_checkpoint()
    assert best is not None
    assert (last.load()["step"], last.metrics["accuracy"]) == (4, 0.2)
    assert (best.load()["step"], best.metrics["accuracy"]) == (1, 0.9)
    worst = picky_trainer.get_best_checkpoint("accuracy", "min")
    assert worst is not None and worst.load()["step"] == 4
    with pytest.raises(MissingMetricError, match="the newest has no metric 'no such metric'; it has"):
        picky_trainer.get_best_checkpoint("no such metric")
    assert [event["number"] for event in events_of(picky_trainer, "checkpoint_deleted")] == [1, 3]
    read = {
        checkpoint.load()["step"]: checkpoint.metrics["accuracy"]
        for checkpoint in latest_run(picky_trainer).checkpoints
    }
    assert read == {1: 0.9, 3: 0.8, 4: 0.2}


def test_retention_is_per_run(picky_trainer: raysgd.Trainer) -> None:
    config = {"order": "report first"}
    picky_trainer.run(save_scored, config | {"accuracies": [0.9, 0.95]}, callbacks=quiet())
    first = str(picky_trainer.run_dir)
    picky_trainer.run(save_scored, config | {"accuracies": [0.1, 0.3, 0.2]}, callbacks=quiet())
    best = picky_trainer.get_best_checkpoint()
    assert best is not None and best.metrics["accuracy"] == 0.3
    assert str(best.path).startswith(str(picky_trainer.run_dir)) and picky_trainer.run_dir != first
    assert on_storage(picky_trainer) == ["checkpoint_000002", "checkpoint_000003"]
    assert sorted(os.listdir(Path(first) / "checkpoints")) == ["checkpoint_000001", "checkpoint_000002"]


def test_newest_checkpoint_is_kept_without_a_score(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, 1, checkpoint_config=raysgd.CheckpointConfig(num_to_keep=1)) as trainer:
        trainer.run(save_and_report, {"steps": 3}, callbacks=quiet())
        assert on_storage(trainer) == ["checkpoint_000003"]
        assert last_of(trainer).load()["step"] == 2
        best = trainer.get_best_checkpoint()
        assert best == last_of(trainer)


# -- failing storage ---------------------------------------------------------------------------------------------------


def make_storage_unavailable(config: dict[str, Any]) -> str:
    """Save once, and again after the folder became a file."""
    (run_dir,) = Path(config["storage"]).glob("*/run_*")
    file = Path(config["storage"]) / "model.bin"
    file.write_bytes(b"weights")
    for step in range(2):
        raysgd.save_checkpoint(file, files=True) if config.get("files") else raysgd.save_checkpoint({"step": step})
        raysgd.report(step=step)
        if step == 0:
            while raysgd.load_checkpoint() is None:
                time.sleep(0.01)
            (run_dir / "checkpoints").rename(run_dir / "moved")
            (run_dir / "checkpoints").write_text("in the way")
    return "trained to the end"


def test_failed_write_ends_the_run(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, 1) as trainer:
        with pytest.raises(StorageError, match=r"checkpoint 2 could not be written: .*/checkpoint_000002"):
            trainer.run(make_storage_unavailable, {"storage": str(tmp_path)}, callbacks=quiet())
        assert latest_run(trainer).outcome == "error"


@pytest.mark.parametrize("files", [False, True])
def test_failed_write_is_only_a_warning(ray_cluster: Any, tmp_path: Path, files: bool) -> None:
    with make_trainer(tmp_path, 1, checkpoint_config=raysgd.CheckpointConfig(on_write_error="warn")) as trainer:
        config = {"storage": str(tmp_path), "files": files}
        assert trainer.run(make_storage_unavailable, config, callbacks=quiet()) == "trained to the end"
        messages = [warning["message"] for warning in events_of(trainer, "warning")]
        assert any("checkpoint 2 could not be written" in message for message in messages)
        assert len(latest_run(trainer).metrics) == 2


# -- torch -------------------------------------------------------------------------------------------------------------


def train_epochs(config: dict[str, Any]) -> str:
    """Build, load, prepare and train, as in the guide; the model, the loader and the loop draw random numbers."""
    import torch
    from torch import nn

    data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(24, 1), torch.arange(24.0).sin())
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    start = 0
    if state := raysgd.load_checkpoint():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start = state["epoch"] + 1
    model = raysgd.torch.prepare_model(model)
    loader = raysgd.torch.prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    loader.set_epoch(start)
    for epoch in range(start, config["epochs"]):
        for x, y in loader:
            loss = (model(x + 0.1 * torch.randn_like(x)).squeeze(1) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        state = {"epoch": epoch, "model": model, "optimizer": optimizer, "scheduler": scheduler}
        raysgd.save_checkpoint(state)
        raysgd.report(epoch=epoch, loss=loss)
        while epoch == config.get("waits_in"):
            raysgd.barrier()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def measure_buffers(config: dict[str, Any]) -> int:
    """Return the bytes of the largest staging buffer after one step of Adam, before a first save."""
    import threading

    import torch

    from raysgd.session import context

    if config["asks"]:
        raysgd.load_checkpoint()
    parameter = torch.nn.Parameter(torch.zeros(config["numbers"]))
    parameter.grad = torch.ones(config["numbers"])
    torch.optim.Adam([parameter]).step()
    for thread in threading.enumerate():
        if thread.name == "raysgd-pages":
            thread.join()
    session: Any = context.current()
    return max((buffer.capacity for buffer in session._writer._pool._free), default=0)


def test_memory_of_the_first_checkpoint_is_mapped_before_it_is_saved(torch_trainer: raysgd.Trainer) -> None:
    config = {"numbers": 8 << 20, "asks": False}
    state_bytes = 3 * 4 * config["numbers"]  # the parameter, and two moments of Adam
    without = torch_trainer.run(measure_buffers, config, callbacks=quiet(), returns="all")
    assert max(without) < state_bytes, "train_func does not ask for a checkpoint, so it may save none"
    first, *others = torch_trainer.run(measure_buffers, {**config, "asks": True}, callbacks=quiet(), returns="all")
    assert first >= state_bytes > max(others), "rank 0 saves for all"


def test_repeated_and_resumed_runs_are_equal_bit_for_bit(torch_trainer: raysgd.Trainer) -> None:
    uninterrupted = torch_trainer.run(train_epochs, {"epochs": 5}, callbacks=quiet())
    first = torch_trainer.run_dir
    assert torch_trainer.run(train_epochs, {"epochs": 5}, callbacks=quiet(), returns="all") == [uninterrupted] * 3
    assert not raysgd.compare_runs(str(first), str(torch_trainer.run_dir))

    stream = torch_trainer.run_generator(train_epochs, {"epochs": 5, "waits_in": 2}, callbacks=quiet())
    next(result for result in stream if result["epoch"] == 2)
    stream.cancel()
    assert list(stream) == []
    checkpoint = last_of(torch_trainer)
    assert checkpoint.load()["epoch"] == 2

    resumed = torch_trainer.run(train_epochs, {"epochs": 5}, resume_from=checkpoint, callbacks=quiet())
    assert resumed == uninterrupted
    assert list(latest_run(torch_trainer).metrics["training_iteration"])[-1] == 5
    difference = raysgd.compare_runs(str(first), str(torch_trainer.run_dir))
    assert not difference and "equal in the 2 iterations both have (4-5)" in str(difference)
    assert torch_trainer.run(train_epochs, {"epochs": 4}, callbacks=quiet()) != uninterrupted


def test_wrapped_torch_objects_are_saved_as_plain_state(torch_trainer: raysgd.Trainer) -> None:
    import torch
    from torch import nn

    torch_trainer.run(train_epochs, {"epochs": 2}, callbacks=quiet())
    state = last_of(torch_trainer).load()
    assert list(state["model"]) == ["0.weight", "0.bias", "3.weight", "3.bias"]

    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    assert optimizer.state[next(iter(model.parameters()))]["step"] == 4  # 24 rows, 3 ranks, 4 rows per batch, 2 epochs
    assert scheduler.get_last_lr() == pytest.approx([0.007])


def test_parts_of_an_incomplete_checkpoint_are_deleted(trainer: raysgd.Trainer) -> None:
    def train_func(config: dict[str, Any]) -> None:
        raysgd.save_checkpoint({"step": 1}, all_ranks=True)
        raysgd.report(step=1)
        if raysgd.world_rank() == 0:
            raysgd.save_checkpoint({"step": 2}, all_ranks=True)
            folder = Path(config["runs"], f"run_{config['number']:03d}/checkpoints/checkpoint_000002")
            assert until(lambda: (folder / "a0001-r00000.json").exists(), 30)
        raysgd.barrier()
        raise ValueError("before all ranks had saved")

    trainer.run(os.getpid, callbacks=quiet())
    before = Path(str(trainer.run_dir))
    config = {"runs": str(before.parent), "number": int(before.name[4:]) + 1}
    with pytest.raises(ValueError, match="before all ranks had saved"):
        trainer.run(train_func, config, callbacks=quiet())
    (left,) = latest_run(trainer).checkpoints
    assert left.load(rank=1)["step"] == 1
    assert os.listdir(Path(str(trainer.run_dir)) / "checkpoints") == ["checkpoint_000001"]


def test_checkpoints_are_listed_and_deleted_by_the_driver(ray_cluster: Any, tmp_path: Path) -> None:
    def save_three(config: dict[str, Any]) -> None:
        for value in range(3):
            raysgd.save_checkpoint({"value": value}, metrics={"score": -value})

    kept = raysgd.CheckpointConfig(num_to_keep=2, links=True, score_attribute="score")
    run_config = raysgd.RunConfig(name="mine", storage_path=tmp_path)
    with raysgd.Trainer(1, "none", run_config=run_config) as trainer:
        trainer.run(save_three, callbacks=[raysgd.callbacks.ProgressCallback(mode="off")], checkpoint_config=kept)
        first, _, last = trainer.list_checkpoints()  # the best two, and the newest
        assert [first.load(), last.load()] == [{"value": 0}, {"value": 2}]
        for deleted, left in ((last, 1), (first, 1)):
            trainer.delete_checkpoint(deleted)
            assert raysgd.Checkpoint.from_path(tmp_path / "mine" / "last").load() == {"value": left}
        assert raysgd.Checkpoint.from_path(tmp_path / "mine" / "best").load() == {"value": 1}
        with pytest.raises(UsageError, match="is not a checkpoint of the latest run"):
            trainer.delete_checkpoint(first)
        trainer.delete_checkpoint(trainer.list_checkpoints()[0])
        assert trainer.list_checkpoints() == [] and not (tmp_path / "mine" / "last").is_symlink()
        assert trainer.run(lambda config: raysgd.load_checkpoint(), resume_from="last") is None
