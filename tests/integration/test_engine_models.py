"""Models of transformers, with random weights, end to end in one worker group, against plain loops in one process.

A decoder with FSDP2 and tensor parallelism, of which a worker is killed; an encoder-decoder in the stages of a pipeline; and an
encoder that a template trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import raysgd
from raysgd import Finetuner
from raysgd.testing import FaultPlan, Kill
from support.engine_models import batch, build
from support.engine_steps import language_optimizer
from support.poll import until
from support.project import ROOT
from support.runs import PATIENCE_S, make_trainer, quiet, travels_by_value

pytestmark = [pytest.mark.timeout(300), pytest.mark.shared_trainer]
travels_by_value(__name__)

NUM_STEPS, CLIP = 6, 0.5
NUM_ROWS, NUM_EVAL_ROWS, BATCH_SIZE = 24, 7, 8


@pytest.fixture(scope="module")
def trainer(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raysgd.Trainer]:
    """A Trainer of two replicas on two workers each: each worker imports transformers once."""
    files, environment = tmp_path_factory.mktemp("runs"), {"env_vars": {"PYTHONPATH": str(ROOT / "tests")}}
    with make_trainer(files, 4, "torch", workers_per_replica=2, runtime_env=environment) as made:
        yield made


def make_scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.2 * step))


def train_plainly(model: Any, batches: list[dict[str, Any]]) -> list[float]:
    """Train in one process without the engine, and return the loss of each step."""
    optimizer, losses = language_optimizer(model), []
    scheduler = make_scheduler(optimizer)
    model.train()
    for one in batches:
        loss = model(**one).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_model(config: dict[str, Any]) -> None:
    """Train with the engine on this replica's rows of each batch, from the newest checkpoint; save after each step."""
    engine = raysgd.Engine(**config["strategies"], clip_grad_norm=CLIP)
    model = build(config["kind"], seed=raysgd.world_rank())
    model, optimizer, scheduler, _, _ = engine.compose(
        model=model, optimizer=language_optimizer(model), lr_scheduler_fn=make_scheduler
    )
    model.train()
    state = engine.load_checkpoint()
    first = step = 0 if state is None else state["step"]
    replicas, replica = raysgd.data_parallel_size(), raysgd.data_parallel_rank()
    while step < NUM_STEPS:
        if step == config.get("saved_before"):
            assert until(raysgd.list_checkpoints, PATIENCE_S), "no checkpoint was committed"
        whole = batch(config["kind"], step, is_even=True)
        loss = model(**{name: value.chunk(replicas)[replica] for name, value in whole.items()}).loss
        engine.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        raysgd.report(step=step, loss=loss.detach(), first=first)
        engine.save_checkpoint(step=step)


def losses_of(trainer: raysgd.Trainer, train_func: Any, config: dict[str, Any]) -> list[raysgd.Result]:
    return list(trainer.run_generator(train_func, config, callbacks=quiet(), reduce={"loss": "mean"}))


@pytest.mark.fault
def test_sharded_decoder_resumes_after_a_death_with_the_plain_losses(trainer: raysgd.Trainer) -> None:
    expected = train_plainly(build("llama"), [batch("llama", step, is_even=True) for step in range(NUM_STEPS)])
    plan = FaultPlan([Kill(rank=1, step=4)])
    config = {"kind": "llama", "strategies": {"zero_stage": 3, "tensor_parallel": 2}, "saved_before": 3}
    results = losses_of(trainer, plan.wrap(train_model), config)
    plan.assert_all_fired()
    for result in results:
        assert result["loss"] == pytest.approx(expected[result["step"] - 1], rel=1e-5), result
    again = [result for result in results if result["attempt"] == 2]
    assert [result["step"] for result in again] == list(range(again[0]["first"] + 1, NUM_STEPS + 1))
    assert again[0]["first"] > 0, "it began again in place of resuming"
    saved = trainer.get_last_checkpoint()
    assert saved is not None
    model = build("llama", seed=5)
    model.load_state_dict(saved.load()["model"])
    assert float(model(**batch("llama", 0, is_even=True)).loss) < expected[0]


def test_encoder_decoder_trains_in_pipeline_stages_to_the_plain_losses(trainer: raysgd.Trainer) -> None:
    expected = train_plainly(build("t5"), [batch("t5", step, is_even=True) for step in range(NUM_STEPS)])
    strategies = {"pipeline_parallel": 2, "micro_batches": 2, "zero_stage": 2, "activation_checkpointing": "full"}
    results = losses_of(trainer, train_model, {"kind": "t5", "strategies": strategies})
    assert [result["loss"] for result in results] == pytest.approx(expected, rel=1e-5)
    saved = trainer.get_last_checkpoint()
    assert saved is not None and set(saved.load()["model"]) == set(build("t5").state_dict())


# -- a template ----------------------------------------------------------------------------------------------------------


def make_rows() -> list[dict[str, Any]]:
    whole = batch("bert, classifier", 0, rows=NUM_ROWS + NUM_EVAL_ROWS)
    return [{name: value[row] for name, value in whole.items()} for row in range(NUM_ROWS + NUM_EVAL_ROWS)]


class Tuner(Finetuner):
    """Fine-tunes a BERT that classifies."""

    def train_valid_test_datasets_provider(self) -> Any:
        rows: Any = make_rows()
        return DataLoader(rows[:NUM_ROWS], batch_size=self.settings.batch_size), rows[NUM_ROWS:], None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        model = build("bert, classifier")
        return model, language_optimizer(model), make_scheduler

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
        logits = torch.cat([self.gather(model(**one).logits) for one in eval_dataloader])
        return {"logits": logits.tolist()}


def fine_tune(config: dict[str, Any]) -> Any:
    engine = raysgd.Engine(tensor_parallel=2, zero_stage=2, accumulation_steps=2)
    return Tuner(engine=engine, batch_size=BATCH_SIZE // 4, epochs=2, clip_grad_norm=CLIP, log_interval=1).train()


def test_encoder_is_fine_tuned_by_a_template_with_the_plain_losses(trainer: raysgd.Trainer) -> None:
    rows: Any = make_rows()
    batches = list(DataLoader(rows[:NUM_ROWS], batch_size=BATCH_SIZE)) * 2
    model = build("bert, classifier")
    expected = train_plainly(model, batches)
    stream = trainer.run_generator(fine_tune, {}, callbacks=quiet(), reduce={"loss": "mean"})
    losses = {result["step"]: result["loss"] for result in stream}
    assert losses == pytest.approx(dict(enumerate(expected, start=1)), rel=1e-5)
    (whole,) = DataLoader(rows[NUM_ROWS:], batch_size=NUM_EVAL_ROWS)
    with torch.no_grad():
        logits = model.eval()(**whole).logits
    torch.testing.assert_close(torch.tensor(stream.get_returns()["eval_logits"]), logits, rtol=1e-4, atol=1e-5)
