"""The declarative loop in a world of one: hooks in order, reductions, exact validation, mistakes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import raysgd
from raysgd.declarative.args import as_values
from raysgd.declarative.components import make_model
from raysgd.declarative.entry import Training, write_plan
from raysgd.declarative.reading import args_of, merge
from raysgd.declarative.strategies import decide, engine_fields, list_warnings
from raysgd.declarative.values import Importer
from raysgd.engine.config import EngineConfig
from raysgd.errors import ConfigError
from raysgd.session.rank_state import seed_generators
from raysgd.torch.samplers import Order
from support import declared
from support.declared_runs import MLP, RISING, STEPS, assert_equal, numbers, run, training

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    declared.CALLS.clear()
    yield
    declared.CALLS.clear()


# -- hooks ---------------------------------------------------------------------------------------------------------------


def test_hooks_are_called_in_this_order(tmp_path: Path) -> None:
    values = training(
        max_epochs=1,
        max_train_steps=1,
        dataset__val_args={"dim": 4, "size": 3},
        hook={"type": "support.declared.Everything"},
        checkpoint__save_last=True,
    )
    run(values, tmp_path)
    validation = [
        "on_val_start",
        "on_val_step_start",
        "on_val_step_end",
        "after_aggregate_val_step_outputs",
        "on_val_end",
    ]
    assert [name for _, name in declared.CALLS] == [
        "after_setup",
        "on_train_start",
        "on_epoch_start",
        "on_step_start",
        "before_zero_grad",
        "after_zero_grad",
        "on_train_step_start",
        "before_sync_grad",
        "after_sync_grad",
        "on_train_step_end",
        "after_aggregate_train_step_outputs",
        "before_gnorm_clip",
        "after_gnorm_clip",
        "before_optimizer_step",
        "after_optimizer_step",
        "before_log_train_metrics",
        "on_step_end",
        *validation,
        "before_log_val_metrics",
        "on_save_checkpoint",
        "on_epoch_end",
        "on_train_end",
        "on_finalize",
    ]
    declared.CALLS.clear()
    run({**values, "max_train_steps": 2}, tmp_path)
    order = ["on_load_checkpoint", "after_load_checkpoint", "after_setup", "on_train_start"]
    assert [name for _, name in declared.CALLS][:4] == order


def test_hooks_of_model_optimizer_scheduler_come_before_the_configured_one() -> None:
    values = training(
        model__type="support.declared.HookedModel",
        optimizer={"type": "support.declared.HookedOptimizer", "args": {"lr": 0.1}},
        lr_scheduler={"type": "support.declared.HookedScheduler", "args": {"step_size": 1}},
        hook={"type": "support.declared.Everything"},
        max_epochs=1,
    )
    run(values)
    owners = [owner for owner, name in declared.CALLS if name == "on_epoch_start"]
    assert owners == ["model", "optimizer", "lr_scheduler", "hook"]


def test_functions_are_hooks_by_their_names() -> None:
    run(numbers([1.0, 3.0], hook={"after_gnorm_clip": "support.declared.note_norm"}))
    assert declared.CALLS == [1.0]


def test_the_environment_is_initialised_first_and_own_loggers_log() -> None:
    values = numbers(
        [1.0, 3.0],
        init_env_fn="support.declared.note_environment",
        log=[{"type": "support.declared.Logger", "args": {"name": "mine"}}],
    )
    run(values)
    assert declared.CALLS[:2] == [("init_env", 0), ("setup", 1)]
    assert declared.CALLS[2][:3] == ("mine", "train", 1)
    assert declared.CALLS[-1] == ("finalize", "mine")


# -- reductions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduction", "loss", "gradient"),
    [("mean", 4.0, 4.0), ("sum", 8.0, 8.0), ("row-mean", 4.0, 4.0)],
)
def test_losses_and_gradients_are_reduced(reduction: str, loss: float, gradient: float) -> None:
    values = numbers(
        [1.0, 3.0, 5.0, 7.0],
        micro_batch_size=2,
        global_batch_size=4,
        optimizer__loss_reduction=reduction,
        optimizer__grad_reduction=reduction,
    )
    metrics, weights = run(values)
    assert metrics["train_loss"] == loss
    assert float(weights["weight"]) == -gradient
    assert float(metrics["gnorm"]) == gradient


def test_a_step_of_uneven_micro_batches_can_be_the_mean_over_rows() -> None:
    uneven = {"micro_batch_size": 2, "grad_accumulation_steps": 2}
    of_batches, _ = run(numbers([1.0, 3.0, 8.0], **uneven))
    assert of_batches["train_loss"] == (2 + 8) / 2
    changes = {**uneven, "optimizer__loss_reduction": "row-mean", "optimizer__grad_reduction": "row-mean"}
    of_rows, weights = run(numbers([1.0, 3.0, 8.0], **changes))
    assert of_rows["train_loss"] == 4.0
    assert float(weights["weight"]) == -4.0


@pytest.mark.parametrize("function", [None, "support.declared.sum_tokens"])
@pytest.mark.parametrize(("reduction", "loss"), [("mean", 12 / 2), ("per-token-mean", 12 / 3)])
def test_gradients_and_losses_can_be_the_mean_over_tokens(function: str | None, reduction: str, loss: float) -> None:
    values = numbers(
        [1.0, 3.0, 8.0],
        micro_batch_size=2,
        grad_accumulation_steps=2,
        model__type="support.declared.Total",
        optimizer__grad_reduction="per-token-mean",
        optimizer__loss_reduction=reduction,
        optimizer__aggregate_outputs_fn=function,
        dataset__val_args={"values": [1.0, 1.0, 7.0]},
    )
    metrics, weights = run(values)
    assert float(weights["weight"]) == pytest.approx(-12 / 3)
    assert metrics["train_loss"] == loss
    if reduction == "per-token-mean":
        assert metrics["val_loss"] == pytest.approx(9 / 3 * (1 - 12 / 3))


def test_tokens_that_nobody_counted_are_refused() -> None:
    values = numbers(
        [1.0],
        model__type="support.declared.Total",
        optimizer__grad_reduction="per-token-mean",
        optimizer__aggregate_outputs_fn="support.declared.sum_nothing",
    )
    with pytest.raises(ConfigError, match="returned num_tokens=None"):
        run(values)
    values["optimizer"] = {**values["optimizer"], "aggregate_outputs_fn": None}
    with pytest.raises(
        ConfigError, match=r"support\.declared\.Mean returned no num_tokens, by which per-token-mean divides"
    ):
        run({**values, "model": {"type": "support.declared.Mean"}})


def test_gradients_are_scaled_before_they_are_clipped() -> None:
    values = numbers([1.0, 3.0], grad_accumulation_steps=2, optimizer__grad_reduction="sum", optimizer__clip_gnorm=1.0)
    metrics, weights = run(values)
    assert float(metrics["gnorm"]) == 4.0
    assert float(weights["weight"]) == pytest.approx(-1.0, rel=1e-5)


# -- validation, learning rates --------------------------------------------------------------------------------------------


def test_the_validation_loss_is_the_mean_over_all_rows() -> None:
    values = numbers([0.0], dataset__val_args={"values": [1.0, 2.0, 6.0]}, micro_batch_size=2)
    metrics, _ = run(values)
    assert metrics["val_loss"] == 3.0  # not (1.5 + 6) / 2


def test_rows_are_those_of_the_dataset_whatever_the_first_dimension_of_a_batch_is() -> None:
    changes: dict[str, Any] = {
        "model__type": "support.declared.OfPairs",
        "dataset__type": "support.declared.Pairs",
        "dataset__val_args": {"values": [1.0, 2.0, 3.0, 10.0]},
        "optimizer__loss_reduction": "row-mean",
        "optimizer__grad_reduction": "row-mean",
    }
    metrics, weights = run(numbers([1.0, 2.0, 3.0, 6.0], micro_batch_size=3, grad_accumulation_steps=2, **changes))
    assert (metrics["rows"], metrics["train_loss"], float(weights["weight"])) == (4, 3.0, -3.0)
    assert metrics["val_loss"] == pytest.approx(4.0 * (1 - 3.0))


def test_max_val_steps_limits_the_validation() -> None:
    values = numbers([0.0], dataset__val_args={"values": [1.0, 2.0, 6.0]}, max_val_steps=2)
    assert run(values)[0]["val_loss"] == 1.5


@pytest.mark.parametrize("noise", ["", "torch", "random", "numpy"])
def test_a_validation_does_not_change_the_training(noise: str) -> None:
    settings = {"max_epochs": 2, "dataset__train_args": {"dim": 4, "size": 21, "noise": noise}}
    plain = run(training(**settings))[1]
    rows = {"dim": 4, "size": 5, "noise": noise}  # a validation draws for them
    assert_equal(plain, run(training(**settings, val_every_n_train_steps=1, dataset__val_args=rows))[1])


def test_hooks_that_draw_in_a_validation_do_not_change_the_training() -> None:
    hook = {"type": "support.declared.DrawingValidations"}
    run(training(max_epochs=2, hook=hook))
    plain = [*declared.CALLS]
    declared.CALLS.clear()
    run(training(max_epochs=2, hook=hook, val_every_n_train_steps=1, dataset__val_args={"dim": 4, "size": 3}))
    assert [step for step, *_ in plain] == list(range(2 * STEPS)) and plain == declared.CALLS


def test_last_step_that_is_validated_to_be_saved_has_one_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reported = _reports(monkeypatch)
    by_epoch = {"dataset__val_args": {"dim": 4, "size": 3}, "val_every_n_epochs": None, "checkpoint__save_last": True}
    run(training(max_epochs=2, checkpoint__every_n_train_steps=100, **by_epoch), tmp_path)
    assert [each["step"] for each in reported] == list(range(1, 2 * STEPS + 1))
    assert [each["step"] for each in reported if "val_loss" in each][-1] == 2 * STEPS


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_the_rate_that_is_reported_is_the_one_applied(interval: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = _reports(monkeypatch)
    scheduler = {
        "type": "torch.optim.lr_scheduler.StepLR",
        "args": {"step_size": 1, "gamma": 0.5},
        "interval": interval,
    }
    run(training(max_epochs=2, lr_scheduler=scheduler))
    rates = [each["lr"] for each in reported]
    steps = [0.01 * 0.5 ** (step if interval == "step" else step // STEPS) for step in range(2 * STEPS)]
    assert rates == pytest.approx(steps)


def test_the_rates_of_all_groups_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = _reports(monkeypatch)
    run(training(max_epochs=1, optimizer__type="support.declared_groups.two_groups"))
    assert {"lr", "lr_1"} <= set(reported[0])


def _reports(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "raysgd.session.local.LocalSession.report", lambda self, metrics: reported.append(dict(metrics))
    )
    return reported


# -- the rest --------------------------------------------------------------------------------------------------------------


def test_an_iterable_dataset_needs_no_sampler(tmp_path: Path) -> None:
    values = {
        "model": {"type": "support.declared.Mean"},
        "optimizer": {"type": "torch.optim.SGD", "args": {"lr": 0.1}},
        "dataset": {"type": "support.declared.Endless"},
        "max_train_steps": 3,
    }
    assert run(values, tmp_path)[0]["finished_train_steps"] == 3
    with pytest.raises(ConfigError, match="is an IterableDataset, which no sampler can split"):
        run(merge(values, {"dataset_sampler.train_args": {"shuffle": True}}))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"model__type": "support.declared.Nothing"},
            "^model: support.declared.Nothing: support.declared has no 'Nothing'",
        ),
        ({"model__type": "no_such_module.Model"}, "there is no module 'no_such_module'"),
        ({"model__type": "builtins.dict"}, "made a dict; give a torch module"),
        ({"model__args": {"dims": 3}}, "support.declared.MLP cannot be called with dims: .*unexpected keyword"),
        ({"optimizer__type": "support.declared.MLP"}, "^optimizer: support.declared.MLP cannot be called with lr"),
        ({"tracing_from_weights": "/nothing.pt"}, "cannot be loaded into the model"),
    ],
)
def test_a_component_that_cannot_be_made_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run(training(**changes))


def test_a_model_that_returns_no_loss_is_refused() -> None:
    values = numbers([1.0, 2.0], micro_batch_size=2, model={"type": "support.declared.NoLoss"})
    with pytest.raises(ConfigError, match=r"support.declared.NoLoss returned a tensor of shape \(2,\); its forward"):
        run(values)


def test_weights_are_loaded_before_the_training(tmp_path: Path) -> None:
    torch.save({"weight": torch.tensor(5.0)}, tmp_path / "weights.pt")
    _, weights = run(numbers([1.0], tracing_from_weights=str(tmp_path / "weights.pt")))
    assert float(weights["weight"]) == 4.0


def test_inputs_and_buffers_have_their_types() -> None:
    values = training(max_epochs=1, precision={"param": "bf16", "input": "bf16"})
    assert all(each.dtype == torch.bfloat16 for each in run(values)[1].values())
    assert all(each.dtype == torch.float32 for each in run(training(max_epochs=1, precision="none"))[1].values())


def test_what_means_something_else_than_in_nnscaler_is_named() -> None:
    values = training(checkpoint__save_type="deduped", checkpoint__save_dir="runs", precision="fp16")
    values |= {"search": {"space": {"optimizer.args.lr": [0.1, 0.2]}}}
    values.pop("seed")
    texts = "\n".join(list_warnings(args_of(values)))
    assert all(
        name in texts
        for name in (
            "save_type='deduped' is what 'sharded' is",
            "fp16 of parameters is",
            "neither seed",
            "~/ray_results",
        )
    )
    assert list_warnings(args_of(MLP)) == []


def test_the_order_of_the_data_depends_on_the_seed() -> None:
    for seed in (1, 2, 1):
        run({**numbers([float(value) for value in range(9)], micro_batch_size=9, **SHUFFLED), "seed": seed})
    one, other, again = declared.CALLS
    assert sorted(one) == sorted(other)
    assert one == again != other


SHUFFLED: dict[str, Any] = {
    "dataset_sampler__train_args": {"shuffle": True},
    "hook": {"type": "support.declared.SeenRows"},
}


def test_fp16_leaves_buffers_as_they_are() -> None:
    values = numbers([1.0, 2.0], micro_batch_size=2, model={"type": "support.declared.Normed"}, precision="fp16")
    _, weights = run(values)
    assert weights["norm.running_mean"].dtype == torch.float32


@pytest.mark.parametrize(
    ("precision", "kind"), [("bf16", torch.float32), ("fp16", torch.float32), ({"buffer": "bf16"}, torch.bfloat16)]
)
def test_tables_that_are_not_saved_stay_exact_unless_buffers_are_named(precision: Any, kind: torch.dtype) -> None:
    model = make_model(
        args_of(numbers([1.0], model={"type": "support.declared.Tabled"}, precision=precision)), Importer()
    )
    assert model.table.dtype == kind


def test_gradients_that_are_not_clipped_stay_though_one_is_infinite() -> None:
    _, weights = run(numbers([1.0], model={"type": "support.declared.Infinite"}))
    assert float(weights["finite"]) == -1.0


def test_a_rate_that_is_a_tensor_is_reported_as_it_was_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = _reports(monkeypatch)
    values = training(
        optimizer={
            "type": "torch.optim.Adam",
            "args": {"lr": {"__type": "torch.tensor", "data": 0.5}, "foreach": False},
        },
        lr_scheduler={
            "type": "torch.optim.lr_scheduler.StepLR",
            "args": {"step_size": 1, "gamma": 0.5},
            "interval": "step",
        },
        max_train_steps=3,
    )
    run(values)
    assert [each["lr"] for each in reported] == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("name", ["accumulation_steps", "weighted_gradients", "plan"])
def test_fields_of_the_engine_that_the_training_sets_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.{name} is set by the training: give "):
        engine_fields(args_of(training(engine={name: 2})), Importer())


def test_strategies_follow_from_the_settings() -> None:
    def fields(**changes: Any) -> dict[str, Any]:
        compute = {"plan_ngpus": 4, "use_zero": True}
        return engine_fields(args_of(training(compute_config=compute, **changes)), Importer())

    assert fields(pas_policy="tp") == {"zero_stage": 1, "tensor_parallel": 4}
    assert fields(pas_policy="hybrid") == {"zero_stage": 1, "tensor_parallel": 2, "pipeline_parallel": 2}
    assert fields(pas_policy="support.declared.two_of_each")["tensor_parallel"] == 4
    assert fields(pas_policy="pp", engine={"activation-checkpointing": "full"})["activation_checkpointing"] == "full"
    with pytest.raises(ConfigError, match="has no argument 'tensor_paralel'"):
        fields(engine={"tensor_paralel": 2})


def test_a_training_is_a_train_func(tmp_path: Path) -> None:
    with raysgd.local(dir=tmp_path):
        metrics = Training({}, EngineConfig(), str(tmp_path))(as_values(args_of(training(max_epochs=1))))
    assert metrics["finished_train_steps"] == STEPS
    assert math.isfinite(metrics["best_loss"])


def test_each_step_is_reported_once_with_the_loss_of_its_validation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reported = _reports(monkeypatch)
    run(training(max_epochs=3, dataset__val_args={"dim": 4, "size": 3}, val_every_n_epochs=2), tmp_path)
    assert [each["step"] for each in reported] == list(range(1, 3 * STEPS + 1))
    validated = [each["step"] for before, each in zip([{}, *reported], reported, strict=False) if "val_loss" in each]
    assert validated[:1] == [STEPS]  # with the checkpoint of each epoch
    losses = [each.get("val_loss") for each in reported]
    assert len({loss for loss in losses if loss is not None}) == 3


def test_validations_are_made_after_every_second_epoch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = _reports(monkeypatch)
    validation = {"dataset__val_args": {"dim": 4, "size": 3}, "val_every_n_epochs": 2, "checkpoint__no_save": True}
    run(training(max_epochs=5, hook={"type": "support.declared.Everything"}, **validation))
    assert [each["step"] for each in reported] == list(range(1, 5 * STEPS + 1))
    starts = [name for _, name in declared.CALLS if name in ("on_epoch_end", "on_val_start")]
    assert starts == ["on_epoch_end", "on_val_start", "on_epoch_end"] * 2 + ["on_epoch_end"]


def test_a_loader_without_a_length_reports_the_validation_of_an_epoch_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = _reports(monkeypatch)
    values = training(
        max_epochs=1, dataset__val_args={"dim": 4, "size": 3}, dataloader__type="support.declared.PlainLoader"
    )
    run(values)
    assert [each["step"] for each in reported][-2:] == [5, 5]
    assert "val_loss" in reported[-1] and "val_loss" not in reported[-2]


def test_a_stop_ends_the_training_with_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("raysgd.session.local.LocalSession.should_stop", lambda self: True)
    metrics, _ = run(training(max_epochs=9), tmp_path)
    assert metrics["finished_train_steps"] == 1
    with raysgd.local(dir=tmp_path):
        assert raysgd.list_checkpoints()[-1].metrics["step"] == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"dataloader__train_args": {"shuffle": True}},
            "train_args.shuffle cannot be set: dataset_sampler decides",
        ),
        ({"init_env_fn": "support.declared.CALLS"}, "init_env_fn support.declared.CALLS is not callable"),
        ({"hook": {"type": "support.declared.Numbers", "args": {"values": []}}}, "has no method of a TrainHook"),
        (
            {"hook": {"after_gnorm_clip": "operator.setitem"}},
            r"after_gnorm_clip is called with \(trainer, gnorm\), of which .* but takes \(a, b, c, /\)",
        ),
        (
            {"optimizer__aggregate_outputs_fn": "support.declared.CALLS"},
            "aggregate_outputs_fn support.declared.CALLS is not",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run(training(**changes))


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_scheduler_follows_the_loss(interval: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = _reports(monkeypatch)
    plateau = {"type": "torch.optim.lr_scheduler.ReduceLROnPlateau", "args": {"patience": 0, "threshold": 10.0}}
    run(training(max_epochs=3, lr_scheduler={**plateau, "interval": interval}, dataset__val_args={"dim": 4, "size": 3}))
    assert reported[-1]["lr"] < reported[0]["lr"] == 0.01


PLATEAU = {
    "type": "torch.optim.lr_scheduler.ReduceLROnPlateau",
    "args": {"patience": 0, "factor": 0.5, "threshold": 0.0},
    "interval": "step",
}


def test_a_scheduler_gets_the_loss_of_the_step_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = _reports(monkeypatch)
    losses = [5.0, 4.0, 6.0, 3.0, 4.0, 2.0]  # the third and the fifth are not better than the best
    run(numbers(losses, max_train_steps=6, model__type="support.declared.Given", lr_scheduler=PLATEAU))
    assert [each["train_loss"] for each in reported] == losses
    assert [each["lr"] for each in reported] == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_a_scheduler_gets_validation_losses_alone_also_after_a_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[float] = []
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    monkeypatch.setattr(plateau, "step", lambda self, loss, epoch=None: given.append(loss))
    values = numbers([1.0, 2.0], max_epochs=4, lr_scheduler=PLATEAU, optimizer=RISING)
    values |= {"dataset": {**values["dataset"], "val_args": {"values": [1.0]}}, "val_every_n_train_steps": 2}
    run({**values, "max_train_steps": 6}, tmp_path)
    whole = list(given)
    given.clear()
    run({**values, "max_train_steps": 2}, tmp_path / "resumed")
    run({**values, "max_train_steps": 6}, tmp_path / "resumed")
    assert given == whole and len(whole) == 5  # there is none before the first validation, after step 2
    assert whole[0] == whole[1] < whole[2] == whole[3] < whole[4]


def test_an_own_sampler_draws_the_same_whatever_the_generators_are(tmp_path: Path) -> None:
    orders = []
    for seed in (1, 2):
        seed_generators(seed, 0)
        sampler = Order(declared.GlobalOrder(range(9), 1, 0), 5)
        sampler.set_epoch(1)
        orders.append(list(sampler))
    assert orders[0] == orders[1] and sorted(orders[0]) == list(range(9))
    sampler.set_epoch(2)
    assert list(sampler) != orders[0]


def test_a_trial_reports_only_results_with_its_metric(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reported = _reports(monkeypatch)
    values = as_values(args_of(training(max_epochs=2, dataset__val_args={"dim": 4, "size": 3})))
    with raysgd.local():
        Training(values, EngineConfig(), str(tmp_path), metric="val_loss")({"optimizer.args.lr": 0.1})
    assert [each["step"] for each in reported] == [STEPS, 2 * STEPS]
    assert all(each["lr"] == 0.1 for each in reported)


def test_a_stop_saves_also_without_save_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("raysgd.session.local.LocalSession.should_stop", lambda self: True)
    run(training(checkpoint__save_last=False), tmp_path)
    with raysgd.local(dir=tmp_path):
        assert [each.metrics["step"] for each in raysgd.list_checkpoints()] == [1]


def test_any_policy_can_be_compiled_to_a_plan(tmp_path: Path) -> None:
    values = training(
        compute_config={"runtime_ngpus": 2},
        run_mode="compile",
        pas_policy="dp",
        engine={"clip_grad_norm": 1.0, "zero_stage": 1},
        gen_savedir=str(tmp_path / "plan"),
    )
    args = args_of(values)
    files = write_plan(args, decide(args, Importer()))
    described = json.loads(Path(files["plan.json"]).read_text())
    assert (described["num_workers"], described["workers_per_replica"], described["engine"]["zero_stage"]) == (2, 1, 1)
    assert described["parameters"] == {"layers.0.weight": [4, 4], "layers.1.weight": [4, 4]}
    assert "data x2" in Path(files["plan.txt"]).read_text()
