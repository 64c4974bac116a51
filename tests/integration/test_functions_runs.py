"""JAX models by functions on real workers: equal losses on every mesh, nothing lost, evaluation, checkpoints, recovery, resuming.

The test process makes no JAX array: that would start threads, and tests fork.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import tune

import raysgd
from raysgd.callbacks import EarlyStoppingCallback
from raysgd.errors import ConfigError
from support import wandb_files
from support.project import ROOT
from support.runs import are_gone, travels_by_value

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

from raysgd.functions import Deployer, FitResult, Predictor, Trainer, runs  # noqa: E402

travels_by_value(__name__)
pytestmark = [pytest.mark.jax, pytest.mark.timeout(240)]

BATCH = 16  # rows of all devices together
RANDOM = np.random.default_rng(0)
EXAMPLES: list[dict[str, Any]] = [
    {"id": number, "x": RANDOM.normal(size=8).astype(np.float32), "words": ["w"] * (number % 3)} for number in range(75)
]
WITHOUT_TAIL = EXAMPLES[:48]
CLASSES = 4


def make_params() -> dict[str, Any]:
    generator = np.random.default_rng(1)
    return {
        name: {"kernel": generator.normal(0, 0.3, shape).astype(np.float32), "bias": np.zeros(shape[1:], np.float32)}
        for name, shape in (("up", (8, 16)), ("down", (16, CLASSES)))
    }


def collate_fn(examples: list[dict[str, Any]]) -> dict[str, Any]:
    assert all(type(each) is dict and type(each["words"]) is list for each in examples)
    return {
        "x": np.stack([each["x"] for each in examples]),
        "y": np.array([each["id"] % CLASSES for each in examples]),
        "id": np.array([each["id"] for each in examples]),
    }


def logits_of(params: Any, batch: Any) -> Any:
    hidden = jax.numpy.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
    return hidden @ params["down"]["kernel"] + params["down"]["bias"]


def loss_fn(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["y"]).mean()


def noisy_loss(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    noise = jax.random.normal(train_rng, batch["x"].shape) if is_training else 0
    return loss_fn(train_rng, state, params, {**batch, "x": batch["x"] + 0.1 * noise}, is_training)


def id_loss(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    return batch["id"].mean() + 0 * params["up"]["bias"].sum()


def pred_fn(pred_rng: Any, params: Any, batch: Any) -> dict[str, Any]:
    return {"id": batch["id"], "class": logits_of(params, batch).argmax(-1)}


def output_fn(predicted: dict[str, Any]) -> list[str]:
    return [f"{number}:{label}" for number, label in zip(predicted["id"], predicted["class"], strict=True)]


def metric_fn(examples: list[dict[str, Any]], outputs: list[str]) -> dict[str, Any]:
    assert [each["id"] for each in examples] == [int(each.partition(":")[0]) for each in outputs]
    hits = [
        each["id"] % CLASSES == int(output.partition(":")[2]) for each, output in zip(examples, outputs, strict=True)
    ]
    return {"rougeL": np.mean(hits), "nested": {"misses": len(hits) - sum(hits)}}


def make_deployer(workers: Any = 2, devices: int = 2, shards: int = 1, **settings: Any) -> Deployer:
    return Deployer(7, shards, num_workers=workers, devices_per_worker=devices, verbose=False, **settings)


def make_trainer(deployer: Deployer, **settings: Any) -> Trainer:
    given = {"collate_fn": collate_fn, "loss_fn": noisy_loss, "params": make_params(), "optimizer": optax.adamw(0.03)}
    return Trainer(deployer, **{**given, **settings})


def run_fit(trainer: Trainer, **settings: Any) -> FitResult:
    per_device = BATCH // trainer.deployer.axis_sizes["data"]
    given = {"train_examples": EXAMPLES, "per_device_batch_size": per_device, "n_epochs": 2}
    return trainer.fit(**{**given, **settings})


def fit_with_evaluation(trainer: Trainer, **settings: Any) -> FitResult:
    predictor = trainer.get_default_predictor(pred_fn, output_fn)
    return run_fit(
        trainer,
        **{"eval_examples": EXAMPLES[:21], "eval_predictor": predictor, "eval_metric_fn": metric_fn, **settings},
    )


def check_equal(one: FitResult, other: FitResult) -> None:
    assert len(one.history) == len(other.history)
    for first, second in zip(one.history, other.history, strict=True):
        assert first == pytest.approx(second, rel=1e-5, abs=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), one.params, other.params)


@pytest.fixture(scope="module")
def deployer(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployer]:
    with make_deployer(workdir=tmp_path_factory.mktemp("shared") / "work", run_tensorboard=True) as deployer:
        yield deployer


@pytest.fixture(scope="module")
def reference(deployer: Deployer) -> FitResult:
    """A training on 2 workers with 2 devices each, and one shard."""
    return run_fit(make_trainer(deployer), eval_examples=EXAMPLES[:21])


shared = pytest.mark.shared_trainer


@shared
def test_losses_and_predictions_have_every_example_once_in_order(deployer: Deployer) -> None:
    trainer = make_trainer(deployer, loss_fn=id_loss)
    result = fit_with_evaluation(trainer, eval_examples=EXAMPLES[5:15], save_last_ckpt=True)
    assert [each["train_loss"] for each in result.history] == pytest.approx([37.0, 37.0])
    assert [each["eval_loss"] for each in result.history] == pytest.approx([9.5, 9.5])
    assert result.num_steps == 2 * 5
    assert result.num_compilations == {"train": 2, "eval_loss": 1, "predict": 1}  # one for each shape
    predictor = trainer.get_default_predictor(pred_fn, output_fn)
    assert [int(each.partition(":")[0]) for each in predictor.predict(EXAMPLES, per_device_batch_size=4)] == [
        *range(75)
    ]
    alone = Predictor(deployer, collate_fn, pred_fn)
    rows = alone.predict(EXAMPLES[:10], 4, make_params())
    assert [int(each["id"]) for each in rows] == [*range(10)]
    assert rows == alone.predict(EXAMPLES[:10], 4, result.checkpoints["last"])  # the loss had no gradient


def as_wide_as_the_largest(examples: list[dict[str, Any]]) -> dict[str, Any]:
    width = 1 + max(each["id"] for each in examples) // 8
    return {**collate_fn(examples), "wide": np.ones((len(examples), width), np.float32)}


def wide_loss(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    return loss_fn(train_rng, state, params, batch, is_training) * batch["wide"].sum(1).mean()


def wide_pred(pred_rng: Any, params: Any, batch: Any) -> Any:
    return batch["wide"].sum(1)


@shared
def test_shapes_that_depend_on_the_rows_are_those_of_one_worker(deployer: Deployer, tmp_path: Path) -> None:
    settings = {"collate_fn": as_wide_as_the_largest, "loss_fn": wide_loss}
    found, predicted = [], []
    with make_deployer(1, 4, run_config=raysgd.RunConfig(storage_path=tmp_path)) as one:
        for each in (deployer, one):
            trainer = make_trainer(each, **settings)
            found.append(run_fit(trainer, eval_examples=EXAMPLES[:21]))
            predicted.append(trainer.get_default_predictor(wide_pred).predict(EXAMPLES[:21], 4))
    check_equal(*found)
    assert predicted[0] == predicted[1] == [2.0] * 16 + [3.0] * 5


def as_wide_as_the_rank(examples: list[dict[str, Any]]) -> dict[str, Any]:
    return {**collate_fn(examples), "wide": np.ones((len(examples), 1 + jax.process_index()), np.float32)}


@shared
def test_workers_that_collate_different_shapes_end_the_run(deployer: Deployer) -> None:
    trainer = make_trainer(deployer, collate_fn=as_wide_as_the_rank)
    with pytest.raises(ConfigError, match=r"other arrays on rank 1 .*\['wide'\] \(2,\) float32.*\(1,\) float32"):
        run_fit(trainer)


@pytest.mark.parametrize(("workers", "devices", "shards"), [(1, 1, 1), (2, 4, 4)])
def test_training_is_the_same_on_every_mesh(
    reference: FitResult, tmp_path: Path, workers: int, devices: int, shards: int
) -> None:
    with make_deployer(workers, devices, shards, run_config=raysgd.RunConfig(storage_path=tmp_path)) as deployer:
        rules = deployer.get_sharding_rules(make_params())
        trainer = make_trainer(deployer, params_sharding_rules=rules)
        check_equal(run_fit(trainer, eval_examples=EXAMPLES[:21]), reference)


@shared
def test_sanity_check_changes_no_bit_of_the_training(deployer: Deployer, reference: FitResult) -> None:
    result = run_fit(make_trainer(deployer), eval_examples=EXAMPLES[:21], eval_sanity_check=False)
    assert result.history == reference.history
    jax.tree.map(np.testing.assert_array_equal, result.params, reference.params)


def array_metric(examples: Any, outputs: Any) -> dict[str, Any]:
    return {"confusion": np.zeros((2, 2))}


def short_output(predicted: Any) -> list[str]:
    return output_fn(predicted)[:-1]


@shared
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save_argmax_ckpt_by_metrics": ["rouge-L"]}, r"'rouge-L'.*did you mean 'rougeL'\?"),
        ({"eval_metric_fn": array_metric}, "eval_metric_fn returned 'confusion', which is not a metric"),
        ({"output": short_output}, "output_fn returned 15 outputs for 16 rows"),
    ],
)
def test_sanity_check_finds_mistakes_before_the_first_step(
    deployer: Deployer, settings: dict[str, Any], message: str
) -> None:
    trainer = make_trainer(deployer)
    if output := settings.pop("output", None):
        settings = {"eval_predictor": trainer.get_default_predictor(pred_fn, output)}
    with pytest.raises(ConfigError, match=message):
        fit_with_evaluation(trainer, **settings)
    assert len(raysgd.load_run(str(deployer.runs.trainer.run_dir)).metrics) == 0


@shared
def test_best_last_and_every_checkpoint_are_kept_with_evaluation_files(deployer: Deployer) -> None:
    result = fit_with_evaluation(
        make_trainer(deployer),
        train_examples=WITHOUT_TAIL,
        n_epochs=3,
        save_every_ckpt=True,
        save_last_ckpt=True,
        save_argmin_ckpt_by_metrics=["loss", "nested/misses"],
        save_argmax_ckpt_by_metrics=["rougeL"],
    )
    kept = result.checkpoints
    assert sorted(kept) == ["epoch_0", "epoch_1", "epoch_2", "last", "max_rougeL", "min_loss", "min_nested/misses"]
    assert [kept[f"epoch_{epoch}"].metrics["eval_loss"] for epoch in range(3)] == [
        each["eval_loss"] for each in result.history
    ]
    assert kept["min_loss"].metrics["eval_loss"] == min(each["eval_loss"] for each in result.history)
    assert kept["max_rougeL"].metrics["eval_rougeL"] == max(each["eval_rougeL"] for each in result.history)
    folder = Path(str(deployer.workdir)) / "evaluations" / "epoch_2"
    results = json.loads((folder / "results.json").read_text())
    assert {f"eval_{name}": value for name, value in results.items()}.items() <= result.metrics.items()
    outputs = json.loads((folder / "outputs.json").read_text())
    assert [each["example"]["id"] for each in outputs] == [*range(21)]
    assert all(each["pred"].startswith(f"{each['example']['id']}:") for each in outputs)
    assert list(Path(str(result.run_dir), "tensorboard").iterdir())
    jax.tree.map(np.testing.assert_array_equal, result.params, kept["last"].load()["train_state"]["params"])


@shared
def test_only_the_best_checkpoint_is_kept_if_no_other_is_wanted(deployer: Deployer) -> None:
    trainer = make_trainer(deployer)
    result = run_fit(
        trainer,
        train_examples=WITHOUT_TAIL,
        eval_examples=EXAMPLES[:16],
        save_argmax_ckpt_by_metrics=["loss"],
        save_float_dtype="bfloat16",
    )
    folder = Path(str(result.run_dir), "checkpoints")
    assert [*folder.iterdir()] == [Path(str(result.checkpoints["max_loss"].path))]
    assert result.checkpoints["max_loss"].load()["train_state"]["params"]["up"]["bias"].dtype.name == "bfloat16"
    more = run_fit(trainer, train_examples=WITHOUT_TAIL, n_epochs=1)
    assert (more.num_steps, more.checkpoints) == (9, {})  # it continues, and nobody asked for a checkpoint
    assert [each["epoch"] for each in more.history] == [2]
    assert not list(Path(str(more.run_dir), "checkpoints").glob("checkpoint_*"))
    events = raysgd.load_run(str(more.run_dir)).events
    deleted = events[events["kind"] == "checkpoint_deleted"]["data"]
    assert [*deleted] == [{"number": 1}]  # by the TrainerActor, which records it


def killing_collate(examples: list[dict[str, Any]], mark: str, number: int) -> dict[str, Any]:
    """Kill the second worker when it collates this example in the second epoch."""
    if jax.process_index() == 1 and any(each["id"] == number for each in examples):
        seen, killed = Path(mark, "seen"), Path(mark, "killed")
        if seen.exists() and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        seen.touch()
    return collate_fn(examples)


@shared
@pytest.mark.fault
def test_killed_worker_resumes_from_memory_in_the_middle_of_an_epoch(
    deployer: Deployer, reference: FitResult, tmp_path: Path
) -> None:
    trainer = make_trainer(deployer, collate_fn=partial(killing_collate, mark=str(tmp_path), number=40))
    result = run_fit(trainer, eval_examples=EXAMPLES[:21], save_every_n_steps=1)
    assert (tmp_path / "killed").exists()
    assert result.checkpoints == {}
    check_equal(result, reference)
    metrics = raysgd.load_run(str(result.run_dir)).metrics
    assert set(metrics["attempt"]) == {1, 2}


def examples_of_call(epoch_idx: int) -> list[dict[str, Any]]:
    return [*EXAMPLES[: 30 + epoch_idx], {**EXAMPLES[0], "id": 1000 + epoch_idx}]


@shared
@pytest.mark.fault
@pytest.mark.parametrize("saves_every", [1, 64])
def test_calls_of_train_are_one_run_that_survives_a_killed_worker(
    deployer: Deployer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves_every: int
) -> None:
    monkeypatch.setattr(runs, "_SAVE_EVERY_EPOCHS", saves_every)
    expected = run_fit(make_trainer(deployer), train_examples=examples_of_call, n_epochs=4)
    (tmp_path / "seen").touch()
    trainer = make_trainer(deployer, collate_fn=partial(killing_collate, mark=str(tmp_path), number=1002))
    called = [trainer.train(examples_of_call(call), 4) for call in range(4)]
    assert (tmp_path / "killed").exists()
    assert len({each.run_dir for each in called}) == 2  # the first call is a run of its own
    for each, epoch in zip(called, expected.history, strict=True):
        assert each.metrics == pytest.approx(epoch, rel=1e-5, abs=1e-5)
    assert trainer.step == called[-1].num_steps == expected.num_steps
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), called[-1].params, expected.params)
    with pytest.raises(raysgd.errors.UsageError, match="the parameters after step 7 were not kept"):
        _ = called[2].params
    assert trainer.fit(EXAMPLES, 4, 1).metrics["epoch"] == 4  # continues with the state that the workers had


@shared
def test_calls_of_train_leave_their_state_to_predictions_and_to_the_calls_after_an_error(deployer: Deployer) -> None:
    trainer, fitted = make_trainer(deployer), make_trainer(deployer)
    for _ in range(3):
        trainer.train(EXAMPLES, 4)
    fitted.fit(EXAMPLES, 4, 3)
    predicted = (each.get_default_predictor(pred_fn, output_fn).predict(EXAMPLES, 4) for each in (trainer, fitted))
    assert next(predicted) == next(predicted)
    for _ in range(2):
        trainer.train(EXAMPLES, 4)
    with pytest.raises(KeyError, match="words"):
        trainer.train([{"text": "no id"}] * 9, 4)
    assert trainer.step == 25
    fitted.fit(EXAMPLES, 4, 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), trainer.params, fitted.params)
    assert trainer.train(EXAMPLES, 4).metrics["epoch"] == 5


@pytest.mark.fault
def test_elastic_group_computes_the_same_batches_with_fewer_workers(deployer: Deployer, tmp_path: Path) -> None:
    settings = {"train_examples": WITHOUT_TAIL, "n_epochs": 3}
    expected = run_fit(make_trainer(deployer), **settings)  # its loss draws random numbers
    collate = partial(killing_collate, mark=str(tmp_path), number=40)
    with make_deployer((1, 2), 2, run_config=raysgd.RunConfig(storage_path=tmp_path / "runs")) as elastic:
        trainer = make_trainer(elastic, collate_fn=collate)
        result = run_fit(trainer, save_every_n_steps=1, **settings)
    sizes = raysgd.load_run(str(result.run_dir)).metrics["world_size"]
    assert (sizes.iloc[0], min(sizes)) == (2, 1)
    check_equal(result, expected)


def failing_collate(examples: list[dict[str, Any]], mark: str, number: int) -> dict[str, Any]:
    """Raise an exception when this example is collated in the second epoch."""
    if any(each["id"] == number for each in examples):
        if Path(mark, "seen").exists():
            raise FloatingPointError("a mistake of the user")
        Path(mark, "seen").touch()
    return collate_fn(examples)


def test_training_resumes_in_the_middle_of_an_epoch_on_another_mesh(reference: FitResult, tmp_path: Path) -> None:
    settings = {"eval_examples": EXAMPLES[:21], "save_last_ckpt": True, "save_argmax_ckpt_by_metrics": ["loss"]}
    with make_deployer(1, 2, workdir=tmp_path / "work") as first:
        trainer = make_trainer(first, collate_fn=partial(failing_collate, mark=str(tmp_path), number=40))
        with pytest.raises(FloatingPointError, match="a mistake of the user"):
            run_fit(trainer, save_every_n_steps=1, **settings)
    newest = raysgd.Checkpoint.from_path(tmp_path / "work" / "last")
    assert 5 < int(newest.load()["train_state"]["step"]) < 10
    with make_deployer(2, 1, 2, workdir=tmp_path / "work") as second:
        result = run_fit(make_trainer(second), resume_from="last", **settings)
        assert len(raysgd.load_run(str(result.run_dir)).metrics) < 5
        check_equal(result, reference)
        assert result.checkpoints["max_loss"].metrics == result.history[0]  # of the run before
        again = run_fit(make_trainer(second), resume_from="last", **settings)  # finished: nothing is trained
        assert again.history == result.history and again.checkpoints == result.checkpoints
        jax.tree.map(np.testing.assert_array_equal, again.params, result.params)


@shared
def test_callback_ends_a_training_early_with_a_checkpoint(deployer: Deployer) -> None:
    trainer = make_trainer(deployer)
    callback = EarlyStoppingCallback("train_loss", "max", patience=1)  # the loss falls
    settings = {"train_examples": WITHOUT_TAIL, "save_last_ckpt": True}
    result = run_fit(trainer, n_epochs=500, callbacks=[callback], **settings)
    assert 2 <= len(result.history) < 500
    assert int(result.checkpoints["last"].load()["train_state"]["step"]) == result.num_steps
    assert run_fit(trainer, n_epochs=1, **settings).num_steps == result.num_steps + 3


@shared
def test_mistakes_in_functions_are_explained(deployer: Deployer) -> None:
    def table_loss(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        return logits_of(params, batch)[:, :2]

    with pytest.raises(ConfigError, match=r"loss_fn returned an array of shape \(16, 2\)"):
        run_fit(make_trainer(deployer, loss_fn=table_loss))

    def lost_loss(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        return loss_fn(train_rng, state, params, batch, is_training) * jax.numpy.nan

    lost = run_fit(make_trainer(deployer, loss_fn=lost_loss), train_examples=WITHOUT_TAIL, n_epochs=1)
    assert np.isnan(lost.metrics["train_loss"]) and lost.num_steps == 3
    with pytest.raises(ConfigError, match="collate_fn returned 15 rows for 16 examples"):
        run_fit(make_trainer(deployer, collate_fn=lambda examples: collate_fn(examples[1:])))


def traced_pred(pred_rng: Any, params: Any, batch: Any, folder: str) -> Any:
    """Leave a file for each compilation: Python runs this function for nothing else."""
    tempfile.mkstemp(dir=folder)
    return pred_fn(pred_rng, params, batch)


@shared
def test_next_fit_and_predict_in_warm_workers_compile_nothing(deployer: Deployer, tmp_path: Path) -> None:
    trainer = make_trainer(deployer)
    predictor = trainer.get_default_predictor(partial(traced_pred, folder=str(tmp_path)), output_fn)
    settings = {"eval_examples": EXAMPLES[:21], "eval_predictor": predictor, "n_epochs": 1}
    first = run_fit(trainer, **settings)
    assert first.num_compilations == {"train": 2, "eval_loss": 2, "predict": 1}  # the loss has a tail
    rows = predictor.predict(EXAMPLES, per_device_batch_size=4)
    compiled = len([*tmp_path.iterdir()])
    assert compiled == 2 * 2  # by two workers, of the evaluation and of predict
    second = run_fit(trainer, **settings)
    assert second.num_compilations == {"train": 0, "eval_loss": 0, "predict": 0}
    assert second.num_steps == 2 * first.num_steps
    assert predictor.predict(EXAMPLES, params=first.params, per_device_batch_size=4) == rows
    assert len([*tmp_path.iterdir()]) == compiled
    other = run_fit(make_trainer(deployer, loss_fn=loss_fn), train_examples=WITHOUT_TAIL, n_epochs=1)
    assert other.num_compilations["train"] == 1  # another function is not taken for it


def newest_pids(deployer: Deployer) -> dict[int, int]:
    """Return the processes of the latest run's last group, by rank."""
    events = raysgd.load_run(str(deployer.runs.trainer.run_dir)).events
    return {each["rank"]: each["pid"] for each in events[events["kind"] == "worker_up"]["data"]}


@shared
@pytest.mark.fault
def test_worker_that_dies_between_runs_is_replaced(deployer: Deployer, reference: FitResult) -> None:
    run_fit(make_trainer(deployer, loss_fn=loss_fn), train_examples=WITHOUT_TAIL, n_epochs=1)
    pids = newest_pids(deployer)
    os.kill(pids[0], signal.SIGKILL)
    assert are_gone([pids[0]])
    check_equal(run_fit(make_trainer(deployer), eval_examples=EXAMPLES[:21]), reference)
    after = newest_pids(deployer)
    assert after[0] != pids[0] and after[1] == pids[1]


class ArrayOfJax:
    """Becomes a JAX array when it is unpickled, as an array in the parameters of a model does."""

    def __reduce__(self) -> Any:
        return jax.numpy.zeros, (CLASSES,)


def biased_pred(pred_rng: Any, params: Any, batch: Any, bias: Any) -> Any:
    return (logits_of(params, batch) + bias).argmax(-1)


@shared
def test_functions_may_hold_arrays_of_jax(deployer: Deployer) -> None:
    predictor = Predictor(deployer, collate_fn, partial(biased_pred, bias=ArrayOfJax()))
    assert len(predictor.predict(EXAMPLES[:3], 1, make_params())) == 3


def test_wandb_gets_every_step_and_the_evaluations(ray_cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    offline = {"mode": "offline", "project": "pipes"}
    with make_deployer(1, 1, workdir=tmp_path / "work", run_wandb=True, wandb_init_kwargs=offline) as deployer:
        result = fit_with_evaluation(make_trainer(deployer), train_examples=WITHOUT_TAIL, save_last_ckpt=True)
        run_dir = Path(str(deployer.runs.trainer.run_dir))
    found = wandb_files.read(run_dir)
    logged = wandb_files.rows(found)
    assert [row["step"] for row in logged] == [1, 2, 3, 3, 4, 5, 6, 6]  # the epochs' metrics have rows of their own
    assert [row["training_iteration"] for row in logged] == [*range(1, 9)]
    epochs = [row for row in logged if "eval_loss" in row]
    assert [{name: row[name] for name in ("train_loss", "eval_loss", "eval_rougeL")} for row in epochs] == [
        {name: each[name] for name in ("train_loss", "eval_loss", "eval_rougeL")} for each in result.history
    ]
    assert all(row["grad_norm"] > 0 for row in logged if "loss" in row)
    assert [each.run.project for each in found if each.WhichOneof("record_type") == "run"] == ["pipes"]
    config = wandb_files.updates(found, "config")
    assert (config["n_epochs"], config["num_train_examples"], config["n_model_shards"]) == (2, 48, 1)
    assert wandb_files.updates(found, "summary")["last_checkpoint"] == str(result.checkpoints["last"].path)
    assert wandb_files.exit_codes(found) == [0]


def run_template(ray_cluster: dict[str, Any], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the template of redco's README as a user does, on a cluster that is running."""
    script = ROOT / "tests" / "support" / "functions_template.py"
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster["gcs_address"], "WANDB_MODE": "offline"}
    return subprocess.run(
        [sys.executable, str(script), str(folder / "work"), *arguments],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_template_of_redco_runs_with_every_keyword_on_one_and_four_workers(ray_cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    found = []
    for workers in ("1", "4"):
        folder = tmp_path / workers
        folder.mkdir()
        done = run_template(ray_cluster, folder, workers, "rougeL")
        assert done.returncode == 0, done.stderr[-4000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"history"')]  # workers print, too
        found.append(json.loads(line))
        assert json.loads((folder / "work" / "evaluations" / "epoch_3" / "outputs.json").read_text())[0].keys() == {
            "example",
            "pred",
        }
    for one, other in zip(*[each["history"] for each in found], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
    assert found[0]["history"][-1]["eval_rougeL"] > 0.5  # a guess has 1 of 6
    assert found[0]["checkpoints"] == found[1]["checkpoints"] == ["last", "max_rougeL"]


def test_template_of_redco_is_refused_for_a_wrong_name_of_a_metric(ray_cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = run_template(ray_cluster, tmp_path, "2", "rouge-L")
    assert done.returncode != 0 and "did you mean 'rougeL'?" in done.stderr
    assert not (tmp_path / "work" / "evaluations").exists()


def test_functions_runs_in_a_trial_of_ray_tune(fit: Any, tmp_path: Path) -> None:
    def objective(config: dict[str, Any]) -> None:
        with make_deployer(2, 1, run_config=raysgd.RunConfig(storage_path=config["runs"])) as deployer:
            result = run_fit(make_trainer(deployer), train_examples=WITHOUT_TAIL, n_epochs=1)
        tune.report({"train_loss": result.metrics["train_loss"]})

    resources = raysgd.tune_integration.trial_resources(num_workers=2)
    (found,) = fit(tune.with_resources(objective, resources), {"runs": str(tmp_path)})
    assert 0 < found.metrics["train_loss"] < 10
