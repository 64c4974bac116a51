"""The engine in runs: elastic and detached ones, and trials of Ray Tune.

Checkpoints of one strategy are continued by another, and through a death. The losses are those of the plain loop.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import tune

import raysgd
from support.engine_models import batch, build
from support.engine_steps import language_optimizer, train_language_plainly
from support.runs import make_trainer, once, quiet, travels_by_value
from support.searches import Fit, column

pytestmark = pytest.mark.timeout(300)
travels_by_value(__name__)

#: The workers import the models of the tests.
PATH = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
RUNTIME_ENV = {"env_vars": {"PYTHONPATH": PATH}}
KIND = "gpt2"
#: A model that needs no import of transformers, which takes seconds in each new process.
LIGHT = "encoder"
NUM_STEPS = 2
#: Workers and strategies of one run after the other; each continues the one before.
RUNS: list[tuple[int, dict[str, Any]]] = [
    (2, {"zero_stage": 3, "cpu_offload": True}),
    (4, {"tensor_parallel": 2, "zero_stage": 2}),
    (2, {"zero_stage": 1}),
    (4, {"pipeline_parallel": 2, "zero_stage": 3, "activation_checkpointing": "full"}),
    (4, {"zero_stage": 3, "cpu_offload": True, "tensor_parallel": 2}),
    (2, {}),
]


def train(config: dict[str, Any]) -> None:
    engine = raysgd.Engine(**config["strategies"])
    kind = config.get("kind", KIND)
    model = build(kind, seed=raysgd.world_rank())
    model, optimizer, scheduler, _, _ = engine.compose(
        model=model,
        optimizer=language_optimizer(model),
        lr_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
    )
    model.train()
    state = engine.load_checkpoint()
    first = step = 0 if state is None else state["step"]
    copies, copy = raysgd.data_parallel_size(), raysgd.data_parallel_rank()
    while step < max(config["until"], first + 1) or should_wait(config):
        if step == config.get("kill_at") and raysgd.world_rank() == 1 and once(config["folder"], "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        whole = batch(kind, step, is_even=True)
        num_rows = len(whole["input_ids"])
        own = slice(num_rows * copy // copies, num_rows * (copy + 1) // copies)
        loss = model(**{key: value[own] for key, value in whole.items()}).loss
        engine.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        raysgd.report(step=step, loss=loss.detach(), first=first, rows=own.stop - own.start)
        engine.save_checkpoint(step=step)


def should_wait(config: dict[str, Any]) -> bool:
    """Return whether to train longer, until the group has another size or a file exists; the same on all ranks."""
    has_size = raysgd.world_size() == config.get("size_at_end", raysgd.world_size())
    has_file = raysgd.broadcast(Path(config["file"]).exists()) if "file" in config else True
    if has_size and has_file:
        return False
    time.sleep(0.1)
    return True


def run(runs: Path, num_workers: Any, strategies: dict[str, Any], until: int, **more: Any) -> list[Any]:
    with trainer_for(runs, num_workers, strategies) as trainer:
        return run_in(trainer, strategies, until, **more)


def trainer_for(runs: Path, num_workers: Any, strategies: dict[str, Any]) -> raysgd.Trainer:
    each = raysgd.EngineConfig(**strategies).workers_per_replica
    return make_trainer(runs, num_workers, "torch", workers_per_replica=each, runtime_env=RUNTIME_ENV)


def run_in(
    trainer: raysgd.Trainer, strategies: dict[str, Any], until: int, resume_from: Any = None, **more: Any
) -> list[Any]:
    config = {"strategies": strategies, "until": until, **more}
    stream = trainer.run_generator(
        train, config, callbacks=quiet(), reduce={"loss": "mean", "rows": "sum"}, resume_from=resume_from
    )
    return list(stream)


class WarmTrainers:
    """Trainers whose workers serve all runs of their size: each of them imports transformers, which takes seconds."""

    def __init__(self, folder: Path, num_cpus: int) -> None:
        self._folder = folder
        self._num_cpus = num_cpus
        self._trainers: dict[tuple[int, int], raysgd.Trainer] = {}

    def get(self, num_workers: int, strategies: dict[str, Any]) -> raysgd.Trainer:
        key = num_workers, raysgd.EngineConfig(**strategies).workers_per_replica
        if key not in self._trainers:
            while sum(size for size, _ in self._trainers) + num_workers > self._num_cpus:
                self._trainers.pop(next(iter(self._trainers))).shutdown()
            self._trainers[key] = trainer_for(self._folder, num_workers, strategies)
        return self._trainers[key]

    def shutdown(self) -> None:
        for trainer in self._trainers.values():
            trainer.shutdown()


@pytest.fixture(scope="class")
def trainers(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmTrainers]:
    made = WarmTrainers(tmp_path_factory.mktemp("runs"), num_cpus=8)
    yield made
    made.shutdown()


@pytest.mark.shared_trainer
class TestStrategiesInWarmWorkers:
    def test_a_checkpoint_of_one_strategy_is_continued_by_another(self, trainers: WarmTrainers) -> None:
        expected = train_language_plainly(KIND, NUM_STEPS * len(RUNS))
        checkpoint, losses = None, []
        for num_workers, strategies in RUNS:
            trainer = trainers.get(num_workers, strategies)
            first = len(losses)
            results = run_in(trainer, strategies, first + NUM_STEPS, checkpoint)
            assert {result["first"] for result in results} == {first}
            assert {result["rows"] for result in results} == {8}, "each replica of the model counts once"
            losses += [result["loss"] for result in results]
            assert losses == pytest.approx(expected[: len(losses)], rel=1e-5), strategies
            checkpoint = trainer.get_last_checkpoint()
        assert checkpoint is not None
        saved = checkpoint.load()
        assert set(saved["model"]) == set(build(KIND).state_dict()) and saved["step"] == len(expected)
        plain = build(KIND, seed=3)
        plain.load_state_dict(saved["model"])
        optimizer = language_optimizer(plain)
        optimizer.load_state_dict(saved["optimizer"])
        assert len(optimizer.state) == len(list(plain.parameters()))
        assert float(plain(**batch(KIND, 0, is_even=True)).loss.detach()) < expected[0]

    def test_template_trains_alike_whatever_holds_a_copy_of_the_model(self, trainers: WarmTrainers) -> None:
        """Its loaders are split by replicas of the model: two in each of the runs."""
        found = []
        for num_workers, strategies in ((2, {}), (4, {"tensor_parallel": 2}), (4, {"pipeline_parallel": 2})):
            stream = trainers.get(num_workers, strategies).run_generator(
                train_template, {"strategies": strategies}, callbacks=quiet(), reduce={"loss": "mean"}
            )
            losses = [result["loss"] for result in stream if "loss" in result]
            found.append((losses, stream.get_returns()))
        (losses, returned), *others = found
        labels = batch(KIND, 0, rows=30, is_even=True)["labels"][20:].tolist()
        assert len(losses) >= 6 and returned["eval_labels"] == labels
        for their_losses, their_returned in others:
            assert their_losses == pytest.approx(losses, rel=1e-5)
            assert their_returned["eval_loss"] == pytest.approx(returned["eval_loss"], rel=1e-5)
            assert their_returned["eval_labels"] == returned["eval_labels"]


def train_template(config: dict[str, Any]) -> dict[str, Any]:
    from raysgd import Finetuner

    whole = batch(KIND, 0, rows=30, is_even=True)
    rows = [{name: values[number] for name, values in whole.items()} for number in range(30)]

    class Tuner(Finetuner):
        def train_valid_test_datasets_provider(self) -> Any:
            return rows[:24], rows[20:], None

        def model_optimizer_lr_scheduler_provider(self) -> Any:
            return build(KIND), None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            return model(**batch).loss

        def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
            labels = [self.gather(batch["labels"]) for batch in eval_dataloader]
            return {"loss": self._compute_loss(eval_dataloader), "labels": torch.cat(labels).tolist()}

    engine = raysgd.Engine(**config["strategies"])
    return Tuner(engine=engine, batch_size=4, epochs=2, learning_rate=0.01, log_interval=1).train()


@pytest.mark.fault
def test_large_model_survives_a_death_with_the_same_losses(ray_cluster: Any, tmp_path: Path) -> None:
    expected = train_language_plainly(LIGHT, 6)
    strategies = {"tensor_parallel": 2, "zero_stage": 3, "sequence_parallel": True}
    results = run(tmp_path / "runs", (2, 4), strategies, 6, kind=LIGHT, kill_at=3, folder=str(tmp_path))
    by_step = {result["step"]: result["loss"] for result in results}
    assert [by_step[step] for step in sorted(by_step)] == pytest.approx(expected, rel=1e-5)
    assert {result["world_size"] for result in results} == {2, 4} and results[-1]["attempt"] > 1


@pytest.mark.fault
def test_elastic_group_trains_with_the_engine_through_a_death_and_growth(ray_cluster: Any, tmp_path: Path) -> None:
    strategies = {"zero_stage": 3, "activation_checkpointing": "full"}
    config = {"kind": LIGHT, "kill_at": 4, "folder": str(tmp_path), "size_at_end": 2}
    results = run(tmp_path / "runs", (1, 2), strategies, 8, **config)
    by_step = {result["step"]: result["loss"] for result in results}
    assert sorted(by_step) == list(range(1, len(by_step) + 1))
    assert [by_step[step] for step in sorted(by_step)] == pytest.approx(
        train_language_plainly(LIGHT, len(by_step)), rel=1e-5
    )
    sizes = [result["world_size"] for result in results]
    assert sizes[0] == sizes[-1] == 2 and 1 in sizes, "the group did not shrink and grow"


def test_detached_run_trains_with_the_engine(ray_cluster: Any, tmp_path: Path) -> None:
    config = {"kind": LIGHT, "strategies": {"zero_stage": 3}, "until": 8, "file": str(tmp_path / "enough")}
    files = raysgd.RunConfig(name="large", storage_path=tmp_path / "runs", detached=True)
    with raysgd.Trainer(2, "torch", run_config=files, runtime_env=RUNTIME_ENV) as trainer:
        next(trainer.run_generator(train, config, callbacks=quiet(), reduce={"loss": "mean"}))
    trainer = raysgd.Trainer.attach("large")
    stream = trainer.stream()
    paused_at = trainer.pause().iteration
    trainer.resume()
    (tmp_path / "enough").touch()
    results = list(stream)
    losses = [result["loss"] for result in results]
    assert losses == pytest.approx(train_language_plainly(LIGHT, len(losses)), rel=1e-5)
    assert [result["first"] for result in results] == [0] * paused_at + [paused_at] * (len(losses) - paused_at)
    assert len(losses) > paused_at, "no step was made after the pause"
    trainer.shutdown()


@pytest.mark.fault
@pytest.mark.usefixtures("no_leftovers_of_trials")
def test_trials_train_with_the_engine(fit: Fit, tmp_path: Path) -> None:
    """The second trial uses the first one's processes; a worker of the first one dies."""
    trainer = raysgd.Trainer(2, "torch", workers_per_replica=2, runtime_env=RUNTIME_ENV)
    strategies: list[dict[str, Any]] = [{"tensor_parallel": 2, "zero_stage": 3}, {"tensor_parallel": 2}]
    grid = fit(
        trainer.to_trainable(train, reduce={"loss": "mean"}),
        {
            "kind": LIGHT,
            "strategies": tune.grid_search(strategies),
            "until": 6,
            "kill_at": 3,
            "folder": str(tmp_path),
        },
        reuse_actors=True,
        max_concurrent_trials=1,
    )
    expected = train_language_plainly(LIGHT, 7)
    for number, result in enumerate(grid):
        assert result.error is None and column(result, "loss") == pytest.approx(expected[:6], rel=1e-5)
        assert (result.metrics["attempt"] > 1) == (number == 0)
        model = build(LIGHT).train()
        model.load_state_dict(raysgd.load_checkpoint(result.checkpoint.path)["model"])
        assert float(model(**batch(LIGHT, 6, is_even=True)).loss.detach()) == pytest.approx(expected[6], rel=1e-5)
