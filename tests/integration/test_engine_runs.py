"""The engine in runs: checkpoints of one strategy are continued by another, and through a death."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import raysgd
from support.engine_models import batch, build
from support.engine_steps import language_optimizer, train_language_plainly
from support.runs import make_trainer, once, quiet, travels_by_value

pytestmark = pytest.mark.timeout(300)
travels_by_value(__name__)

#: The workers import the models of the tests.
PATH = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
KIND = "gpt2"
NUM_STEPS = 3
#: Workers and strategies of one run after the other; each continues the one before.
RUNS: list[tuple[int, dict[str, Any]]] = [
    (4, {"zero_stage": 3, "cpu_offload": True}),
    (2, {"zero_stage": 3}),
    (4, {"zero_stage": 3, "cpu_offload": True, "tensor_parallel": 2}),
    (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    (2, {"zero_stage": 1}),
    (4, {"pipeline_parallel": 2, "zero_stage": 3, "activation_checkpointing": "full"}),
    (2, {}),
    (4, {"tensor_parallel": 2, "zero_stage": 2}),
    (1, {}),
]


def train(config: dict[str, Any]) -> None:
    engine = raysgd.Engine(**config["strategies"])
    model = build(KIND, seed=raysgd.world_rank())
    model, optimizer, scheduler, _, _ = engine.compose(
        model=model,
        optimizer=language_optimizer(model),
        lr_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
    )
    model.train()
    state = engine.load_checkpoint()
    first = step = 0 if state is None else state["step"]
    copies, copy = raysgd.data_parallel_size(), raysgd.data_parallel_rank()
    until = config["until"]
    while step < until:
        if step == config.get("kill_at") and raysgd.world_rank() == 1 and once(config["folder"], "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        whole = batch(KIND, step, is_even=True)
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


def run(runs: Path, num_workers: Any, strategies: dict[str, Any], until: int, **more: Any) -> tuple[Any, list[Any]]:
    each = raysgd.EngineConfig(**strategies).workers_per_replica
    resume_from = more.pop("resume_from", None)
    settings: dict[str, Any] = {"workers_per_replica": each, "runtime_env": {"env_vars": {"PYTHONPATH": PATH}}}
    with make_trainer(runs, num_workers, "torch", **settings) as trainer:
        config = {"strategies": strategies, "until": until, **more}
        stream = trainer.run_generator(
            train, config, callbacks=quiet(), reduce={"loss": "mean", "rows": "sum"}, resume_from=resume_from
        )
        results = list(stream)
        checkpoint = trainer.get_last_checkpoint()
        assert checkpoint is not None
        return checkpoint, results


def test_a_checkpoint_of_one_strategy_is_continued_by_another(ray_cluster: Any, tmp_path: Path) -> None:
    expected = train_language_plainly(KIND, NUM_STEPS * len(RUNS))
    checkpoint, losses = None, []
    for number, (num_workers, strategies) in enumerate(RUNS, 1):
        checkpoint, results = run(
            tmp_path / str(number), num_workers, strategies, number * NUM_STEPS, resume_from=checkpoint
        )
        assert {result["first"] for result in results} == {(number - 1) * NUM_STEPS}
        assert {result["rows"] for result in results} == {8}, "each copy of the model counts once"
        losses += [result["loss"] for result in results]
        assert losses == pytest.approx(expected[: len(losses)], rel=1e-5), strategies
    assert checkpoint is not None
    saved = checkpoint.load()
    assert set(saved["model"]) == set(build(KIND).state_dict()) and saved["step"] == len(expected)
    plain = build(KIND, seed=3)
    plain.load_state_dict(saved["model"])
    optimizer = language_optimizer(plain)
    optimizer.load_state_dict(saved["optimizer"])
    assert len(optimizer.state) == len(list(plain.parameters()))
    assert float(plain(**batch(KIND, 0, is_even=True)).loss.detach()) < expected[0]


@pytest.mark.fault
def test_large_model_survives_a_death_with_the_same_losses(ray_cluster: Any, tmp_path: Path) -> None:
    expected = train_language_plainly(KIND, 10)
    strategies = {"tensor_parallel": 2, "zero_stage": 3, "sequence_parallel": True}
    _, results = run(tmp_path / "runs", (2, 4), strategies, 10, kill_at=5, folder=str(tmp_path))
    by_step = {result["step"]: result["loss"] for result in results}
    assert [by_step[step] for step in sorted(by_step)] == pytest.approx(expected, rel=1e-5)
    assert {result["world_size"] for result in results} == {2, 4} and results[-1]["attempt"] > 1
