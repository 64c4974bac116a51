"""``raysgd import-config``: files of other trainers become files that mean the same, and what does not is listed."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from raysgd.cli.main import main
from raysgd.declarative import load_args
from raysgd.declarative.args import TrainerArgs
from raysgd.declarative.importing import hugging_face, lightning
from raysgd.declarative.importing.files import as_yaml, import_config
from raysgd.declarative.importing.rules import Translation

PARTS: dict[str, Any] = {
    "model": {"class_path": "my.Lit", "init_args": {"width": 8}},
    "data": {"class_path": "my.Data", "init_args": {"batch_size": 4}},
    "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
}


def translated(folder: Path, values: Any, name: str = "peer.yaml", *words: str) -> tuple[TrainerArgs, Translation]:
    """Return the training that a translated file is, and the translation."""
    path = folder / name
    path.write_text(values if isinstance(values, str) else json.dumps(values, ensure_ascii=False))  # YAML, too
    made = import_config(path)
    (folder / "job.yaml").write_text(as_yaml(made, str(path)))
    return load_args(folder / "job.yaml", words), made


def of_lightning(folder: Path, *, parts: dict[str, Any] = PARTS, **trainer: Any) -> tuple[TrainerArgs, Translation]:
    given = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **trainer}
    return translated(folder, {**parts, "trainer": {name: value for name, value in given.items() if value is not ...}})


def keys_to_do(made: Translation) -> set[str]:
    return {key for key, _ in made.remarks}


# -- the tables have every key -------------------------------------------------------------------------------------------


def test_every_argument_of_lightnings_trainer_has_a_rule() -> None:
    pl = pytest.importorskip("pytorch_lightning")
    known = {key.removeprefix("trainer.") for key in lightning.RULES}
    assert set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"} <= known
    checkpoint = inspect.signature(pl.callbacks.ModelCheckpoint.__init__).parameters
    assert set(checkpoint) - {"self"} == set(lightning.CHECKPOINT)
    stopping = inspect.signature(pl.callbacks.EarlyStopping.__init__).parameters
    assert set(stopping) - {"self"} == set(lightning.EARLY_STOPPING)


def test_every_field_of_training_arguments_has_a_rule() -> None:
    transformers = pytest.importorskip("transformers")
    fields = {each.name for each in dataclasses.fields(transformers.TrainingArguments) if each.init}
    assert fields - set(hugging_face.RULES) == set()


def test_every_strategy_of_lightning_is_translated_or_listed(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.strategies import StrategyRegistry

    stages: dict[str, Any] = {}
    for name in StrategyRegistry.available_strategies():
        args, made = of_lightning(tmp_path, parts=PARTS, strategy=name)
        stages[name] = "listed" if "trainer.strategy" in keys_to_do(made) else args.engine.get("zero_stage", 0)
    assert {name for name, stage in stages.items() if stage == "listed"} == {
        "deepspeed_stage_2_offload", "deepspeed_stage_3_offload_nvme", "single_tpu", "single_xla", "xla", "xla_debug",
    }  # fmt: skip
    assert {name: stage for name, stage in stages.items() if stage not in (0, "listed")} == {
        "deepspeed": 2, "deepspeed_stage_1": 1, "deepspeed_stage_2": 2, "deepspeed_stage_3": 3, "deepspeed_stage_3_offload": 3,
        "fsdp": 3, "fsdp_cpu_offload": 3,
    }  # fmt: skip


# -- values mean the same ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_epochs": None}, {"max_epochs": 1000, "max_train_steps": None}),
        ({"max_epochs": ...}, {"max_epochs": 1000}),
        ({"max_epochs": -1, "max_steps": 50}, {"max_epochs": None, "max_train_steps": 50}),
        ({"max_epochs": None, "max_steps": 50}, {"max_epochs": None, "max_train_steps": 50}),
        ({"max_epochs": 3, "max_steps": -1}, {"max_epochs": 3, "max_train_steps": None}),
        ({"devices": "4", "num_nodes": 2}, {"num_workers": 8}),
        ({"devices": [0, 2]}, {"num_workers": 2}),
        ({"devices": "0,1,"}, {"num_workers": 2}),
        ({"devices": "auto"}, {"num_workers": 1}),
        ({"accumulate_grad_batches": 4, "devices": 2}, {"rows_per_step": 32}),
        ({"gradient_clip_val": 0.5}, {"optimizer.clip_gnorm": 0.5}),
        ({"gradient_clip_val": 1, "gradient_clip_algorithm": "norm"}, {"optimizer.clip_gnorm": 1.0}),
        ({"precision": "16-mixed"}, {"engine": {"precision": "fp16"}}),
        ({"precision": 16}, {"engine": {"precision": "fp16"}}),
        ({"precision": "bf16-mixed"}, {"engine": {"precision": "bf16"}}),
        ({"precision": "bf16-mixed", "strategy": "deepspeed"}, {"engine": {"zero_stage": 2, "precision": "bf16-true"}}),
        ({"precision": "32-true"}, {"engine": {}}),
        ({"check_val_every_n_epoch": 3}, {"val_every_n_epochs": 3}),
        (
            {"val_check_interval": 10, "check_val_every_n_epoch": None, "accumulate_grad_batches": 2},
            {"val_every_n_train_steps": 5, "val_every_n_epochs": None},
        ),
        ({"val_check_interval": 1.0}, {"val_every_n_train_steps": None, "val_every_n_epochs": 1}),
        ({"limit_val_batches": 0}, {"dataset.val_args": {}}),
        ({"limit_val_batches": 5}, {"max_val_steps": 5}),
        ({"limit_val_batches": 1.0}, {"max_val_steps": None}),
        ({"enable_checkpointing": False}, {"checkpoint.no_save": True}),
        ({}, {"checkpoint.keep_last_n_checkpoints": 1, "checkpoint.save_best": False}),
        ({"deterministic": True}, {"trainer": {"deterministic": True}}),
        ({"accelerator": "gpu", "devices": 2}, {"trainer": {"gpus_per_worker": 1}}),
        (
            {
                "strategy": {
                    "class_path": "lightning.pytorch.strategies.FSDPStrategy",
                    "init_args": {"cpu_offload": True},
                }
            },
            {"engine": {"zero_stage": 3, "cpu_offload": True}},
        ),
        (
            {"strategy": {"class_path": "DDPStrategy", "init_args": {"find_unused_parameters": True}}},
            {"engine": {"find_unused_parameters": True}},
        ),
        ({"default_root_dir": "runs/a"}, {"checkpoint.save_dir": "runs/a"}),
    ],
    ids=str,
)
def test_arguments_of_lightnings_trainer_keep_their_meaning(
    given: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    args, made = of_lightning(tmp_path, **given)
    for name, value in expected.items():
        found: Any = args
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value, name
    assert keys_to_do(made) == {"model", "data"}


@pytest.mark.parametrize(
    "given",
    [
        {"accelerator": ...}, {"accelerator": "gpu", "devices": -1}, {"accelerator": "mps"},
        {"max_epochs": -1}, {"max_epochs": 0}, {"max_time": "00:12:00:00", "max_epochs": None}, {"val_check_interval": 0.25},
        {"val_check_interval": 7, "accumulate_grad_batches": 2},
        {"val_check_interval": 10}, {"limit_train_batches": 0.1}, {"limit_val_batches": 0.5},
        {"limit_val_batches": 4, "accumulate_grad_batches": 2}, {"overfit_batches": 10}, {"fast_dev_run": True},
        {"precision": "bf16-true"}, {"precision": "64-true"}, {"precision": "transformer-engine"},
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, {"sync_batchnorm": True}, {"detect_anomaly": True},
        {"strategy": "xla"}, {"strategy": {"class_path": "my.Strategy"}}, {"use_distributed_sampler": False},
        {"callbacks": [{"class_path": "my.Callback"}]}, {"callbacks": {"class_path": "StochasticWeightAveraging"}},
        {"callbacks": [{"class_path": "EarlyStopping", "init_args": {"monitor": "val_acc", "mode": "max"}}]},
        {"callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "acc", "mode": "max"}}]},
        {"callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "val_loss", "save_top_k": 3}}]},
        {"logger": {"class_path": "my.Logger"}}, {"profiler": "simple"}, {"min_epochs": 2}, {"no_such_argument": 3},
        {"reload_dataloaders_every_n_epochs": 1}, {"deterministic": "warn"}, {"benchmark": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_lightning_has_and_raysgd_has_not_is_listed(given: dict[str, Any], tmp_path: Path) -> None:
    _, made = of_lightning(tmp_path, **given)
    found = keys_to_do(made) - {"model", "data"}
    assert found and all(any(word in key for word in given) for key in found), made.remarks


def test_written_defaults_mean_what_missing_keys_mean(tmp_path: Path) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    transformers = pytest.importorskip("transformers")
    parameters = inspect.signature(pl.Trainer.__init__).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.name != "self"}
    short, long = ({**PARTS, "trainer": {"max_epochs": 2}}, {**PARTS, "trainer": {**defaults, "max_epochs": 2}})
    assert translated(tmp_path, short)[0] == translated(tmp_path, long | {"ckpt_path": None, "lr_scheduler": None})[0]
    written = json.loads(transformers.TrainingArguments(output_dir="out", optim="adamw_torch").to_json_string())
    assert translated(tmp_path, {"output_dir": "out"}, "a.json")[0] == translated(tmp_path, written, "a.json")[0]


def test_parts_of_lightning_become_objects_in_placeholders(tmp_path: Path) -> None:
    file = """\
# lightning.pytorch==2.5.1
seed_everything: 3
trainer: {accelerator: cpu, devices: 2, max_epochs: 2, enable_progress_bar: no}
model:
  class_path: my.Lit
  init_args:
    width: ${data.init_args.batch_size}
    rate: 1e-4
    layer: {class_path: torch.nn.Linear, init_args: {in_features: 4, out_features: 2}}
    name: "1e-4"
    costs: a${b}
  dict_kwargs: {depth: 2}
data: {class_path: my.Data, init_args: {batch_size: 16, folder: ~}}
optimizer: {class_path: AdamW, init_args: {lr: 1e-3, betas: [0.9, 0.99]}}
lr_scheduler: {class_path: lightning.pytorch.cli.ReduceLROnPlateau, init_args: {monitor: val_loss, patience: 1}}
"""
    args, made = translated(tmp_path, file)
    layer = {"__type": "torch.nn.Linear", "in_features": 4, "out_features": 2}
    module = {
        "__type": "my.Lit",
        "width": 16,
        "rate": 1e-4,
        "layer": layer,
        "name": "1e-4",
        "costs": "a${b}",
        "depth": 2,
    }
    assert args.model.type == "adapter.Model" and args.model.args == {"module": module}
    data = {"__type": "my.Data", "batch_size": 16, "folder": None}
    assert args.dataset.train_args == {"data": data, "stage": "train"}
    assert args.dataset.val_args == {"data": data, "stage": "val"}
    assert (args.optimizer.type, args.optimizer.args) == ("torch.optim.AdamW", {"lr": 1e-3, "betas": [0.9, 0.99]})
    assert args.lr_scheduler is not None and args.lr_scheduler.type == "torch.optim.lr_scheduler.ReduceLROnPlateau"
    assert (args.lr_scheduler.args, args.lr_scheduler.interval) == ({"patience": 1}, "epoch")
    assert (args.seed, args.rows_per_step, args.enable_progress_bar) == (3, 32, False)
    assert keys_to_do(made) == {"model", "data", "${b}"}


@pytest.mark.parametrize(
    "parts", [{}, {"model": {"width": 3}}, {"model": {"class_path": "Lit"}, "optimizer": {"lr": 0.1}}]
)
def test_file_without_classes_names_placeholders(parts: dict[str, Any], tmp_path: Path) -> None:
    args, made = of_lightning(tmp_path, parts=parts)
    assert args.model.args["module"]["__type"] in ("adapter.Module", "Lit")
    assert args.optimizer.type == "adapter.make_optimizer"
    assert {"model", "data", "optimizer"} <= keys_to_do(made)


def test_optimizers_that_a_model_calls_are_left_out_and_listed(tmp_path: Path) -> None:
    optimizer = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.1}}
    model = {"class_path": "my.Lit", "init_args": {"optimizer": optimizer, "others": [optimizer], "width": 3}}
    args, made = of_lightning(tmp_path, parts={"model": model, "data": PARTS["data"]})
    assert args.model.args["module"] == {"__type": "my.Lit", "others": [], "width": 3}
    assert {"model.optimizer", "model.others.0", "optimizer"} <= keys_to_do(made)


def test_callbacks_and_loggers_of_lightning(tmp_path: Path) -> None:
    prefix = "lightning.pytorch"
    args, made = of_lightning(
        tmp_path,
        default_root_dir="root",
        callbacks=[
            {
                "class_path": f"{prefix}.callbacks.ModelCheckpoint",
                "init_args": {
                    "monitor": "val_loss",
                    "dirpath": "best",
                    "every_n_train_steps": 20,
                    "filename": "{step}",
                },
            },
            {"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss", "patience": 5, "min_delta": 0.01}},
            {"class_path": f"{prefix}.callbacks.LearningRateMonitor", "init_args": {"logging_interval": "epoch"}},
        ],
        logger=[
            {"class_path": f"{prefix}.loggers.TensorBoardLogger", "init_args": {"save_dir": "tb", "name": "mine"}},
            {"class_path": "WandbLogger", "init_args": {"project": "p", "offline": True, "log_model": "all"}},
        ],
    )
    assert dataclasses.asdict(args.checkpoint) | {"resume_from": None} == dataclasses.asdict(args.checkpoint)
    checkpoint = args.checkpoint
    assert (checkpoint.save_dir, checkpoint.save_best, checkpoint.every_n_train_steps) == ("best", True, 20)
    assert {log.type: log.args for log in args.log} == {
        "TensorBoardLogger": {"name": "mine"},
        "WandbLogger": {"project": "p", "mode": "offline"},
        "raysgd.callbacks.EarlyStoppingCallback": {"metric": "val_loss", "patience": 5, "min_delta": 0.01},
    }
    assert keys_to_do(made) == {"model", "data", "trainer.logger.1.log_model"}


@pytest.mark.parametrize(
    ("given", "expected", "to_do"),
    [
        ({}, {"micro_batch_size": 8, "max_epochs": 3, "seed": 42, "optimizer.clip_gnorm": 1.0}, {"lr_scheduler_type"}),
        ({"num_train_epochs": 2.5, "lr_scheduler_type": "constant"}, {"max_epochs": 3}, {"num_train_epochs"}),
        ({"max_steps": 9, "max_grad_norm": 0}, {"max_train_steps": 9, "max_epochs": None, "optimizer.clip_gnorm": 0.0}, set()),
        ({"max_steps": 9, "eval_strategy": "epoch"}, {"val_every_n_epochs": 1, "dataset.val_args": {"stage": "val"}}, set()),
        ({"max_steps": 9, "eval_strategy": "steps", "eval_steps": 3}, {"val_every_n_train_steps": 3}, set()),
        ({"max_steps": 90, "evaluation_strategy": "steps", "logging_steps": 0.1}, {"val_every_n_train_steps": 9}, set()),
        ({"max_steps": 9, "save_strategy": "no"}, {"checkpoint.no_save": True}, set()),
        ({"max_steps": 9, "save_strategy": "epoch", "save_total_limit": 2}, {"checkpoint.every_n_epochs": 1}, set()),
        ({"max_steps": 9, "save_steps": 4}, {"checkpoint.every_n_train_steps": 4}, set()),
        ({"max_steps": 9, "bf16": True}, {"engine": {"precision": "bf16"}}, set()),
        ({"max_steps": 9, "gradient_checkpointing": True}, {"engine": {"activation_checkpointing": "full"}}, set()),
        ({"max_steps": 9, "fsdp": "full_shard auto_wrap offload"}, {"engine": {"zero_stage": 3, "cpu_offload": True}}, set()),
        ({"max_steps": 9, "fsdp": ["shard_grad_op"]}, {"engine": {"zero_stage": 2}}, set()),
        ({"max_steps": 9, "deepspeed": {"zero_optimization": {"stage": 2}}}, {"engine": {"zero_stage": 2}}, set()),
        (
            {"max_steps": 9, "bf16": True, "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}},
            {"engine": {"precision": "bf16-true", "zero_stage": 3}},
            set(),
        ),
        ({"max_steps": 9, "deepspeed": "ds.json"}, {"engine": {}}, {"deepspeed"}),
        ({"max_steps": 9, "optim": "sgd", "learning_rate": 0.1}, {"optimizer.type": "torch.optim.SGD"}, set()),
        ({"max_steps": 9, "optim": "adamw_bnb_8bit"}, {"optimizer.type": "adapter.make_optimizer"}, {"optim"}),
        ({"max_steps": 9, "weight_decay": 0.1}, {}, {"weight_decay"}),
        ({"max_steps": 9, "label_smoothing_factor": 0.1}, {}, {"label_smoothing_factor"}),
        ({"max_steps": 9, "push_to_hub": True, "hub_strategy": "end"}, {}, {"push_to_hub"}),
        ({"max_steps": 9, "group_by_length": True}, {}, {"group_by_length"}),
        ({"max_steps": 9, "model_name_or_path": "gpt2"}, {}, {"model_name_or_path"}),
        ({"max_steps": 9, "dataloader_num_workers": 2}, {"dataloader.train_args": {"num_workers": 2}}, set()),
        ({"max_steps": 9, "report_to": ["wandb"], "run_name": "r"}, {}, set()),
    ],
    ids=str,
)  # fmt: skip
def test_training_arguments_keep_their_meaning(
    given: dict[str, Any], expected: dict[str, Any], to_do: set[str], tmp_path: Path
) -> None:
    args, made = translated(tmp_path, {"output_dir": "out", **given}, "args.json")
    for name, value in expected.items():
        found: Any = args
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value, name
    assert keys_to_do(made) - {"model", "local_rank", "average_tokens_across_devices"} == to_do


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"max_steps": 100, "warmup_steps": 7}, {"num_warmup_steps": 7, "num_training_steps": 100}),
        ({"max_steps": 100, "warmup_steps": 0.05}, {"num_warmup_steps": 5, "num_training_steps": 100}),
        ({"max_steps": 90, "warmup_ratio": 0.125}, {"num_warmup_steps": 12, "num_training_steps": 90}),
        ({"warmup_steps": 7}, {"num_warmup_steps": 7}),
        ({"warmup_ratio": 0.1}, {}),
    ],
)
def test_schedule_has_the_steps_that_are_known(given: dict[str, Any], steps: dict[str, Any], tmp_path: Path) -> None:
    args, _ = translated(tmp_path, {"output_dir": "out", "lr_scheduler_type": "cosine", **given}, "args.json")
    assert args.lr_scheduler is not None and args.lr_scheduler.interval == "step"
    assert args.lr_scheduler.args == steps, "a schedule that lacks a count does not start"


def test_written_training_arguments_are_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    given = transformers.TrainingArguments(output_dir="out", max_steps=9, use_cpu=True, weight_decay=0.0)
    args, made = translated(tmp_path, given.to_json_string(), "args.json")
    assert (args.max_train_steps, args.checkpoint.save_dir) == (9, "out")
    assert keys_to_do(made) == {"model", "local_rank", "average_tokens_across_devices"}


def test_file_of_nnscaler_stays_but_for_what_is_refused(tmp_path: Path) -> None:
    file = {
        "compute_config": {"runtime_ngpus": 2, "use_end2end": True}, "micro_batch_size": 4, "no_such_field": 1, "max_epochs": 2,
        "model": {"type": "my.Model", "args": {"width": 3}}, "optimizer": {"type": "torch.optim.Adam", "clip_gnrm": 3},
        "dataset": {"type": "my.Data", "train_args": {"size": "${micro_batch_size}"}}, "gen_reuse": "auto",
    }  # fmt: skip
    args, made = translated(tmp_path, file)
    assert (args.rows_per_step, args.max_epochs, args.dataset.train_args["size"]) == (8, 2, "${micro_batch_size}" and 4)
    assert keys_to_do(made) == {"no_such_field", "optimizer.clip_gnrm"}
    assert set(made.unused) == {"compute_config.use_end2end", "gen_reuse"}


# -- any valid file ------------------------------------------------------------------------------------------------------

COUNTS = st.integers(1, 9)
TRAINERS = st.fixed_dictionaries(
    {"devices": COUNTS, "accelerator": st.sampled_from(["cpu", "gpu"])},
    optional={
        "num_nodes": COUNTS,
        "strategy": st.sampled_from(["auto", "ddp", "fsdp", "deepspeed_stage_1", "ddp_find_unused_parameters_true", "xla"]),
        "precision": st.sampled_from([None, 16, "16", 32, "bf16", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]),
        "max_epochs": st.none() | st.integers(-1, 5),
        "max_steps": st.integers(-1, 5),
        "accumulate_grad_batches": COUNTS,
        "gradient_clip_val": st.none() | st.floats(0, 5),
        "gradient_clip_algorithm": st.sampled_from([None, "norm", "value"]),
        "limit_val_batches": st.none() | COUNTS | st.floats(0, 1),
        "val_check_interval": st.none() | COUNTS | st.floats(0.1, 1),
        "check_val_every_n_epoch": st.none() | COUNTS,
        "enable_checkpointing": st.booleans(),
        "deterministic": st.booleans() | st.just("warn"),
        "logger": st.booleans() | st.just({"class_path": "CSVLogger", "init_args": {"save_dir": "a"}}),
        "callbacks": st.none() | st.lists(st.sampled_from([
            {"class_path": "ModelCheckpoint", "init_args": {"save_top_k": 0}},
            {"class_path": "ModelCheckpoint", "init_args": {"every_n_epochs": 2, "every_n_train_steps": 0}},
            {"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss", "patience": 0}},
            {"class_path": "my.Callback"},
        ])),
    },
)  # fmt: skip
TEXTS = st.sampled_from(
    [
        "1e-4",
        "yes",
        "${a}",
        "$(a)",
        "$${a}",
        "null",
        "a: b",
        "[1]",
        "",
        "010",
        "2024-01-01",
        "é",
        " a",
        "#",
        "'",
        "a\nb",
        "|",
    ]
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["a", "b", "width"]),
    st.recursive(TEXTS | st.integers() | st.none(), lambda one: st.lists(one), max_leaves=3),
)


@hypothesis.settings(max_examples=50)
@hypothesis.given(given=TRAINERS, arguments=ARGUMENTS, batch=COUNTS)
def test_any_file_of_lightning_loads_with_its_effective_batch(
    given: dict[str, Any], arguments: dict[str, Any], batch: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = {"class_path": "my.Lit", "init_args": arguments}
    data = {"class_path": "my.Data", "init_args": {"batch_size": batch}}
    args, made = translated(tmp_path_factory.mktemp("any"), {"model": model, "data": data, "trainer": given})
    replicas = given["devices"] * given.get("num_nodes", 1)
    assert args.num_workers == replicas
    assert args.rows_per_step == batch * replicas * given.get("accumulate_grad_batches", 1)
    assert args.model.args["module"] == {"__type": "my.Lit", **arguments}
    assert not [text for _, text in made.remarks if "refuses" in text]


@hypothesis.settings(max_examples=50)
@hypothesis.given(
    given=st.fixed_dictionaries(
        {"output_dir": st.sampled_from(["out", "runs/a-b", "1", "null"])},
        optional={
            "per_device_train_batch_size": COUNTS,
            "gradient_accumulation_steps": COUNTS,
            "num_train_epochs": st.floats(0.1, 9),
            "max_steps": st.integers(-1, 99),
            "warmup_steps": st.integers(0, 9) | st.floats(0, 0.99),
            "lr_scheduler_type": st.sampled_from(["linear", "cosine", "constant", "greedy", "reduce_lr_on_plateau"]),
            "optim": st.sampled_from(["adamw_torch", "adafactor", "sgd", "lomo"]),
            "bf16": st.booleans(),
            "eval_strategy": st.sampled_from(["no", "steps", "epoch"]),
            "eval_steps": st.none() | COUNTS | st.floats(0.01, 0.99),
            "save_strategy": st.sampled_from(["no", "steps", "epoch", "best"]),
            "save_steps": COUNTS | st.floats(0.01, 0.99),
            "save_total_limit": st.none() | COUNTS,
            "load_best_model_at_end": st.booleans(),
            "fsdp": st.sampled_from(["", "full_shard", "shard_grad_op offload", "hybrid_shard", True, None]),
        },
    ),
    workers=COUNTS,
)
def test_any_training_arguments_load_with_their_effective_batch(
    given: dict[str, Any], workers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = (f"--compute_config.runtime_ngpus={workers}",)
    args, made = translated(tmp_path_factory.mktemp("any"), given, "args.json", *words)
    of_worker = given.get("per_device_train_batch_size", 8) * given.get("gradient_accumulation_steps", 1)
    assert args.rows_per_step == of_worker * workers
    assert (args.max_train_steps or 0) == max(0, given.get("max_steps", 0))
    assert not [text for _, text in made.remarks if "refuses" in text]


# -- the command ---------------------------------------------------------------------------------------------------------


def test_command_writes_the_file_and_lists_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "peer.yaml", tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**PARTS, "trainer": {"max_epochs": 2, "devices": 2, "log_every_n_steps": 5}}))
    assert main(["import-config", str(path)]) == 0
    printed = capsys.readouterr()
    assert main(["import-config", str(path), "-o", str(output), "--strict"]) == 1
    assert output.read_text() == printed.out and capsys.readouterr().out == ""
    assert load_args(output).num_workers == 2
    assert "trainer.accelerator: " in printed.err and "model: write adapter.Model" in printed.err
    assert "not needed: trainer.log_every_n_steps: every step is reported." in printed.err
    assert main(["import-config", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"]["max_epochs"] == 2


def test_command_without_anything_left_succeeds_with_strict(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    small = {"model": "my.Model", "optimizer": "torch.optim.SGD", "dataset": {"type": "my.Data"}, "max_epochs": 1}
    path.write_text(yaml.safe_dump(small))
    assert main(["import-config", str(path), "--strict"]) == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "x: 1", "give --from with one of lightning, hf, nnscaler"),
        ("a.yaml", "- 1", "has no names with values"),
        ("a.yaml", "a: [", "cannot be read"),
        ("a.json", "{", "cannot be read"),
        ("a.yaml", "a: !!python/object:os.system {}", "cannot be read"),
    ],
)
def test_unknown_files_are_refused(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["import-config", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
    assert main(["import-config", str(tmp_path / "none.yaml")]) == 2


def test_command_imports_neither_torch_nor_ray(tmp_path: Path) -> None:
    path = tmp_path / "peer.yaml"
    path.write_text(yaml.safe_dump(PARTS))
    code = (
        "import sys; from raysgd.cli.main import main; "
        f"assert main(['import-config', {str(path)!r}]) == 0; assert not {{'torch', 'ray', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
