"""`TrainerArgs`: names and defaults of the document, YAML with places, overrides, references, and refusals that say where."""

from __future__ import annotations

import dataclasses
import pickle
import re
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml

from raysgd.declarative import CheckpointConfig, ModelConfig, TrainerArgs, load_args
from raysgd.declarative import args as args_module
from raysgd.declarative.args import HookConfig, LogConfig, LRSchedulerConfig, SearchConfig, as_values
from raysgd.declarative.fields import FieldError
from raysgd.declarative.reading import Tree, args_of, merge
from raysgd.declarative.searching import _best_of, _space_of, check_search
from raysgd.errors import ConfigError, TrainFuncError

DOCUMENT = """\
compute_config:
  plan_ngpus: 4
  runtime_ngpus: 100
  constant_folding: true
  use_zero: true
  use_end2end: true

run_mode: run
pas_policy: autodist
micro_batch_size: 2
global_batch_size: 8
max_epochs: 4
max_train_steps: 10

model:
  type: tests.cli.common.MLP
  args:
    dim: 16
    nlayers: 16

optimizer:
  type: torch.optim.Adam
  args:
    lr: 0.01

dataset:
  type: tests.cli.common.SimpleDataset
  train_args:
    dim: 16
    size: 100
  val_args:
    dim: 16
    size: 10

checkpoint:
  keep_last_n_checkpoints: 30
  every_n_train_steps: 1
  save_type: deduped
"""
SMALL = {
    "model": {"type": "my.Model"},
    "optimizer": {"type": "torch.optim.SGD"},
    "dataset": {"type": "my.Data", "train_args": {"size": 3}},
    "max_epochs": 1,
}
#: The fields of the document, in its order, with their defaults; components are compared by their own defaults.
FIELDS = {
    "init_module": None,
    "vars": {},
    "compute_config": None,
    "gen_savedir": "./.nnscaler",
    "pas_policy": "autodist",
    "run_mode": "run",
    "tracing_from_weights": None,
    "model": {"type": "my.Model", "args": {}},
    "optimizer": {
        "type": "torch.optim.SGD",
        "args": {},
        "clip_gnorm": 0.0,
        "loss_reduction": "mean",
        "grad_reduction": "mean",
        "aggregate_outputs_fn": None,
    },
    "dataset": {"type": "my.Data", "train_args": {"size": 3}, "val_args": {}, "test_args": {}},
    "dataloader": {"type": "torch.utils.data.DataLoader", "train_args": {}, "val_args": {}, "test_args": {}},
    "dataset_sampler": {
        "type": "torch.utils.data.DistributedSampler",
        "train_args": {},
        "val_args": {},
        "test_args": {},
    },
    "lr_scheduler": None,
    "checkpoint": {
        "save_dir": "./checkpoints",
        "no_save": False,
        "save_type": "sharded",
        "save_last": True,
        "save_best": True,
        "symlink_best_and_last": True,
        "every_n_train_steps": None,
        "every_n_epochs": None,
        "keep_last_n_checkpoints": None,
        "resume_from": None,
    },
    "log": [],
    "hook": None,
    "precision": None,
    "micro_batch_size": 1,
    "global_batch_size": None,
    "grad_accumulation_steps": None,
    "max_epochs": 1,
    "max_train_steps": None,
    "max_val_steps": None,
    "val_every_n_train_steps": None,
    "val_every_n_epochs": 1,
    "enable_progress_bar": True,
    "seed": None,
    "init_env_fn": None,
}


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(DOCUMENT)
    return path


def refusal(path: Path, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_args(path, words)
    return str(caught.value).replace(str(path), "job.yaml")


def test_fields_have_the_names_and_defaults_of_the_document() -> None:
    values = as_values(args_of(SMALL))
    assert dict(list(values.items())[:28]) == FIELDS
    assert list(values)[28:] == ["trainer", "engine", "search"]


@pytest.mark.parametrize("component", [LRSchedulerConfig, LogConfig, HookConfig, ModelConfig])
def test_component_without_a_type_is_refused(component: Any) -> None:
    with pytest.raises(FieldError, match="type is missing; give the full name of a class or function") as caught:
        component()
    assert caught.value.path == ("type",)


def test_all_settings_are_given_by_name() -> None:
    kinds: list[Any] = [
        each for each in vars(args_module).values() if getattr(each, "__module__", "") == args_module.__name__
    ]
    kinds = [each for each in kinds if dataclasses.is_dataclass(each)]
    assert len(kinds) >= 10
    assert [kind for kind in kinds if not all(each.kw_only for each in dataclasses.fields(kind))] == []


def test_hooks_are_given_as_functions_or_a_class() -> None:
    assert args_of({**SMALL, "hook": {"on_epoch_end": "my.fn"}}).hook == {"on_epoch_end": "my.fn"}
    assert args_of({**SMALL, "hook": {"type": "my.Hook"}}).hook == HookConfig(type="my.Hook")


def test_the_documents_example_is_refused_with_its_arithmetic(document: Path) -> None:
    text = refusal(document)
    assert text.startswith("job.yaml, line 11, global_batch_size: micro_batch_size 2 x (100 / 4) = 50 does not divide")


def test_with_four_workers_the_documents_example_is_accepted(document: Path) -> None:
    args = load_args(document, ["--compute_config.runtime_ngpus", "4"])
    assert (args.accumulation(), args.rows_per_step, args.compute.num_replicas) == (4, 8, 1)


def test_a_file_and_python_make_the_same(document: Path) -> None:
    text = DOCUMENT.replace("100\n  constant", "4\n  constant")
    document.write_text(text)
    read = load_args(document)
    assert read == args_of(yaml.safe_load(text))
    assert args_of(as_values(read)) == read
    assert dataclasses.replace(read, model=ModelConfig(type="my.Other")).model.args == {}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max_epochs", "2"], {"max_epochs": 2}),
        (["--max-epochs=2"], {"max_epochs": 2}),
        (["--max_epochs!"], {"max_epochs": None}),
        (
            ["--model.args.dim", "32"],
            {"model": ModelConfig(type="tests.cli.common.MLP", args={"dim": "32", "nlayers": 16})},
        ),
        (["--enable_progress_bar=false"], {"enable_progress_bar": False}),
        (["--checkpoint.no_save"], {}),
        (["--precision.param=bf16", "--precision.input", "fp32"], {"precision": {"param": "bf16", "input": "fp32"}}),
        (["--checkpoint.resume-from", "last"], {}),
        (["--trainer.num_workers", "[2, 4]"], {"trainer": {"num_workers": [2, 4]}}),
        (["--gen_savedir", "12"], {"gen_savedir": "12"}),
        (["--seed", "none"], {"seed": None}),
        (
            ["--search.space.optimizer.args.lr", "[0.1, 0.2]", "--search.space.model.args.dim.randint=[4, 8]"],
            {"search": SearchConfig(space={"optimizer.args.lr": [0.1, 0.2], "model.args.dim": {"randint": [4, 8]}})},
        ),
        (
            [
                *("--search.space.optimizer.args.lr", "[1]", "--search.space.micro_batch_size", "[1, 2]"),
                *("--search.space.optimizer.args.lr.uniform", "[0, 1]", "--search.space.micro-batch-size!"),
                "--search.num_samples=3",
            ],
            {"search": SearchConfig(space={"optimizer.args.lr": {"uniform": [0, 1]}}, num_samples=3)},
        ),
    ],
)
def test_words_of_the_command_line_override(document: Path, words: list[str], expected: dict[str, Any]) -> None:
    args = load_args(document, ["--compute_config.runtime_ngpus=4", *words])
    assert {name: getattr(args, name) for name in expected} == expected


def test_entries_of_a_list_are_overridden_by_number(document: Path) -> None:
    args = load_args(
        document, ["--compute_config.runtime_ngpus=4", "--log.0.type", "TensorBoardLogger", "--log.1.type", "my.L"]
    )
    assert [log.type for log in args.log] == ["TensorBoardLogger", "my.L"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--modle.args.dim", "3"], r"the command line \(--modle.args.dim 3\), modle: .*did you mean 'model'"),
        (["--checkpoint.save_typ", "x"], r"checkpoint.save_typ: there is no such field \(did you mean 'save_type'"),
        (
            ["--checkpoint.save_type", "x"],
            r"--checkpoint.save_type x\), checkpoint.save_type: save_type='x' is not known",
        ),
        (["--micro_batch_size", "two"], r"micro_batch_size: micro_batch_size='two' is a str; give an int"),
        (["--max_epochs!", "--max_train_steps!"], "max_epochs: neither max_epochs nor max_train_steps"),
        (["--max_epoch!"], r"--max_epoch!: max_epoch is not set, .*did you mean 'max_epochs'"),
        (["junk"], "'junk' is neither a flag nor the value of one"),
        (
            ["--grad_accumulation_steps", "3"],
            "does not agree with global_batch_size=8: that is 2 rows x 1 replicas x 4",
        ),
        (["--compute_config.plan_ngpus", "3"], r"runtime_ngpus=4 is not a multiple of plan_ngpus=3"),
        (["--checkpoint.every_n_epochs", "1"], "every_n_train_steps and every_n_epochs are both given"),
        (["--optimizer.loss_reduction", "median"], "loss_reduction='median' is not known"),
        (["--dataloader.train_args.batch_size", "2"], "batch_size cannot be set: give micro_batch_size"),
        (["--precision", "fp8"], "precision='fp8' is not known"),
        (["--precision.weight=bf16"], "precision='weight' is not known"),
        (["--precision", "3"], "precision: precision='3' is not known"),
        (["--search", "3"], r"--search 3\), search: '3' is not a mapping of names to values"),
        (
            ["--search.space.max_epoch", "[1]"],
            r"search.space.max_epoch: there is no such field \(did you mean 'max_epochs'",
        ),
        (
            ["--search.space.max_epochs", "3"],
            r"--search.space.max_epochs 3\), search.space.max_epochs: 3 is an int; give a",
        ),
        (
            ["--search.space.optimizer.args.lr.unifrm", "[0, 1]"],
            r"optimizer.args.lr is 0.01, which has no field 'unifrm' \(did you mean 'uniform'",
        ),
        (
            ["--search.space.optimizer.args.lr", "[1]", "--search.metric", "val_los"],
            r"search.metric: a training reports no 'val_los' \(did you mean 'val_loss'",
        ),
        (["--search.spaces.max_epochs", "[3]"], r"search.spaces: there is no such field \(did you mean 'space'"),
        (["--dataloader.type="], "dataloader.type: type is empty; give a value, or leave it out"),
        (["--checkpoint.save_dir", ""], "checkpoint.save_dir: save_dir is empty"),
        (["--model.type", "Net"], r"--model.type Net\), model.type: type='Net' is not the full name of a class"),
        (["--dataset.type", "a-b.C"], "dataset.type: type='a-b.C' is not the full name"),
        (["--log.0.type", "CsvLogger"], "log.0.type: type='CsvLogger' is not the full name"),
        (["--hook.on_epoch_end", "say"], "hook.on_epoch_end: on_epoch_end='say' is not the full name"),
        (["--init_env_fn", "start"], "init_env_fn: init_env_fn='start' is not the full name"),
        (["--pas_policy", "dpp"], "pas_policy='dpp' is not known"),
        (["--model!"], "model: model is missing; give the full name of a class or function, such as my.model"),
        (
            ["--trainer.num_worker", "2"],
            r"trainer.num_worker: trainer has no argument 'num_worker' \(did you mean 'num_workers'",
        ),
        (
            ["--trainer.cpus_per_worker", "none"],
            r"trainer.cpus_per_worker: cpus_per_worker='none' is a str; give a number",
        ),
        (
            ["--trainer.failure_config.max_failure", "2"],
            r"line \(--tr.*\), trainer.failure_config.max_failure: FailureConfig has no .*did you mean 'max_failures'",
        ),
        (["--engine.zero_stag", "1"], r"engine.zero_stag: EngineConfig has no .*did you mean 'zero_stage'"),
        (["--engine.zero-stage", "7"], r"engine.zero_stage: zero_stage=7 is not known; give 0, 1, 2 or 3"),
        (["--log.0.type", "WandbLogger", "--log.0.args.projct", "x"], "log.0.args.projct: .*did you mean 'project'"),
        (["--hook.on_epoch_ends", "my.fn"], r"hook.on_epoch_ends: there is no such hook \(did you mean 'on_epoch_end'"),
        (["--checkpoint.no_save", "2"], "checkpoint.no_save: no_save=2 is not a bool; give true or false"),
        (["--optimizer.clip_gnorm", "nan"], "clip_gnorm='nan' is a str; give a number"),
        (["--optimizer.clip_gnorm", "-1"], "clip_gnorm=-1 is too small; give 0.0 or more"),
        (["--seed", "-1"], "seed: seed=-1 is too small; give 0 or more"),
        (["--log.1.type", "x"], "log has no entry '1'; it is empty: give 0, which appends one"),
        (["--model.args.dim", "$(model.args.nlayer)"], r"refers to model.args.nlayer, .*did you mean 'nlayers'"),
        (
            ["--model.args.dim", "$(model.args.nlayers)", "--model.args.nlayers", "$(model.args.dim)"],
            "references form a cycle: model.args.nlayers -> model.args.dim -> model.args.nlayers",
        ),
    ],
)
def test_a_mistake_is_refused_with_its_place(document: Path, words: list[str], text: str) -> None:
    assert re.search(text, refusal(document, "--compute_config.runtime_ngpus=4", *words))


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("max_epochs: 4", "max_epoch: 4", r"job.yaml, line 12, max_epoch: .*did you mean 'max_epochs'"),
        ("    lr: 0.01", "    lr: 0.01\n    lr: 0.02", "job.yaml, line 25: optimizer.args.lr is given twice"),
        ("pas_policy: autodist", "pas_policy:", "line 9, pas_policy: pas_policy is empty; give a value"),
        ("max_epochs: 4", "precision: [fp32]", r"line 12, precision: precision=\['fp32'\] is not known; give"),
        ("    lr: 0.01", "    lr: [0.01", "job.yaml, line 2[0-9]: "),
        (
            "    lr: 0.01",
            "    lr: !!python/name:os.system",
            "line 24: could not determine a .*tem'; only plain values can",
        ),
        ("    lr: 0.01", "    lr: !!int x", "line 24: invalid literal for int.*; only plain values can be read"),
        ("micro_batch_size: 2", "3: 2", "job.yaml, line 10: 3 is not a name"),
        ("  save_type: deduped", "  save_type: *x", "job.yaml, line 3[0-9]: found undefined alias"),
    ],
)
def test_a_mistake_in_the_file_is_refused_with_its_line(document: Path, old: str, new: str, text: str) -> None:
    document.write_text(DOCUMENT.replace(old, new).replace("runtime_ngpus: 100", "runtime_ngpus: 4"))
    assert re.search(text, refusal(document))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_args(tmp_path / "nothing.yaml")
    (tmp_path / "two.yaml").write_text("max_epochs: 1\n---\nmax_epochs: 2\n")
    with pytest.raises(
        ConfigError, match=r"two.yaml, line 2: expected a single document in the stream, but found another"
    ):
        load_args(tmp_path / "two.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="is not a mapping of names to values"):
        load_args(tmp_path / "list.yaml")


def test_a_file_of_endless_aliases_or_levels_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"job\.yaml, line .*: the file has more than 100,000 values"):
        load_args(path)
    path.write_text("a: " + "[" * 3000 + "]" * 3000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_args(path)


def test_references_give_the_value_with_its_type() -> None:
    values = {**SMALL, "micro_batch_size": "$(dataset.train_args.size)", "gen_savedir": "of-$(max_epochs)"}
    args = args_of(values)
    assert (args.micro_batch_size, args.gen_savedir) == (3, "of-1")


def test_anchors_and_merges_of_yaml_are_read(tmp_path: Path) -> None:
    text = yaml.safe_dump({key: value for key, value in SMALL.items() if key != "dataset"})
    text += "dataset:\n  type: my.Data\n  train_args: &a\n    size: 3\n  val_args:\n    <<: *a\n    more: 1\n"
    (tmp_path / "job.yaml").write_text(text)
    assert load_args(tmp_path / "job.yaml").dataset.val_args == {"size": 3, "more": 1}


def test_changes_are_merged_by_dotted_names() -> None:
    merged = merge({"a": {"b": 1, "c": 2}, "l": [{"x": 1}]}, {"a.b": 3, "l.0.x": 4, "d": 5, "a": {"e": 6}})
    assert merged == {"a": {"b": 3, "c": 2, "e": 6}, "l": [{"x": 4}], "d": 5}
    assert merge({"a": None}, {"a.b": 3}) == {"a": {"b": 3}}


def test_fields_that_are_not_needed_are_read_with_one_note(document: Path, caplog: pytest.LogCaptureFixture) -> None:
    document.write_text("gen_reuse: moo\n" + DOCUMENT)
    args = load_args(
        document, ["--compute_config.runtime_ngpus=4", "--instance_name", "x", "--gen_savedir", "of-$(instance_name)"]
    )
    assert args.gen_savedir == "of-x"
    (note,) = caplog.messages
    assert note.startswith(
        "these fields are not needed, and are not used: gen_reuse (no code is generated), instance_name (a run"
    )
    assert "compute_config.use_end2end (the model's forward always takes a batch and returns the loss)" in note
    caplog.clear()
    assert args_of(as_values(args)) == args
    assert caplog.messages == []


def test_epochs_between_checkpoints_default_to_one() -> None:
    assert CheckpointConfig().epochs_between == 1
    assert CheckpointConfig(every_n_train_steps=3).epochs_between is None
    assert TrainerArgs(**{**_objects(), "max_epochs": 2}).checkpoint.epochs_between == 1


def _objects() -> dict[str, Any]:
    args = args_of(SMALL)
    return {each.name: getattr(args, each.name) for each in dataclasses.fields(args)}


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (3, "search.space: space=3 is not a mapping"),
        ({}, "search.space: space is empty; give a value"),
        ({"max_epoch": [1]}, r"there is no such field \(did you mean 'max_epochs'"),
        ({"max_epochs.x": [1]}, r"max_epochs is 1, which has no field 'x'"),
        (
            {"model.type": ["my.Model", "my.Other"]},
            "my.Other is another class than my.Model, .* would get: width. Give model.args",
        ),
        (
            {"model.type": {"grid_search": ["my.Other"]}, "model.args.depth": [1]},
            r"^search.space.model.type: .* would get: width",
        ),
    ],
)
def test_a_space_that_cannot_work_is_refused(space: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text), Tree().naming_places():
        check_search(
            args_of({**SMALL, "model": {"type": "my.Model", "args": {"width": 3}}, "search": {"space": space}})
        )


def test_classes_whose_arguments_are_all_tried_can_be_searched() -> None:
    space = {"model.type": ["my.Model", "my.Other"], "model.args.width": [1, 2], "model.args.depth": [1]}
    check_search(args_of({**SMALL, "model": {"type": "my.Model", "args": {"width": 3}}, "search": {"space": space}}))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"uniform": 3}, r"ray.tune.uniform cannot be made with 3"),
        ({"uniform": [1]}, r"ray.tune.uniform cannot be made with \[1\]: .*missing 1 required"),
        ({"choice": 3}, "ray.tune.choice cannot be made with 3"),
    ],
)
def test_a_space_that_ray_cannot_make_is_refused(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _space_of("optimizer.args.lr", value)


def test_a_space_of_the_file_is_changed_by_the_command_line(tmp_path: Path) -> None:
    space = {"optimizer.args.lr": {"loguniform": [0.1, 1]}, "model.args.choice": [1, 2]}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**SMALL, "search": {"space": space}}))
    words = ["--search.space.optimizer.args.lr.uniform", "[0, 1]", "--search.space.model.args.choice", "[3]"]
    search = load_args(tmp_path / "job.yaml", words).search
    assert search == SearchConfig(space={"optimizer.args.lr": {"uniform": [0, 1]}, "model.args.choice": [3]})


def test_keys_of_an_argument_that_is_a_dict_may_be_numbers(tmp_path: Path) -> None:
    text = yaml.safe_dump({**SMALL, "model": {"type": "my.Model", "args": {"id2label": {0: "a", 1: "b"}}}})
    (tmp_path / "job.yaml").write_text(text)
    assert load_args(tmp_path / "job.yaml").model.args == {"id2label": {0: "a", 1: "b"}}


def test_reduced_inputs_need_reduced_parameters() -> None:
    with pytest.raises(ConfigError, match="inputs in bf16 do not go with parameters in fp32; give param: bf16 too"):
        args_of({**SMALL, "precision": {"input": "bf16"}})


def test_mistake_keeps_its_place_on_the_way_from_a_worker() -> None:
    error = pickle.loads(pickle.dumps(FieldError(("dataset", "type"), "there is no such class")))
    assert isinstance(error, FieldError)
    assert error.path == ("dataset", "type") and str(error) == "there is no such class"


def trial(values: list[float], *, error: Exception | None = None, saved: tuple[int, ...] = (), **config: Any) -> Any:
    """Return a trial with one value for each step, as Ray Tune has it."""
    rows = pd.DataFrame({"step": range(1, len(values) + 1), "val_loss": values, "rows": 8})
    kept = [(SimpleNamespace(path=f"checkpoint_{step}"), {"step": step}) for step in saved]
    return SimpleNamespace(error=error, metrics_dataframe=rows, best_checkpoints=kept, config=config)


def test_best_of_a_search_is_the_best_step_of_all_trials() -> None:
    results = [
        trial([0.5, 0.2, 0.9], saved=(1, 2), lr=0.1),
        trial([0.8, 0.6, 0.4], lr=0.2),
        trial([0.1, nan], error=RuntimeError("out of memory"), lr=0.3),
        trial([nan, nan], lr=0.4),
        trial([-inf, 0.7], lr=0.5),
        SimpleNamespace(error=None, metrics_dataframe=None, best_checkpoints=[], config={}),
        SimpleNamespace(error=None, metrics_dataframe=pd.DataFrame({"step": [1]}), best_checkpoints=[], config={}),
    ]
    assert _best_of(results, "val_loss", "min") == (
        {"step": 2, "val_loss": 0.2, "last": 0.9, "checkpoint": "checkpoint_2"},
        {"lr": 0.1},
    )
    assert _best_of(results, "val_loss", "max") == (
        {"step": 3, "val_loss": 0.9, "last": 0.9, "checkpoint": None},
        {"lr": 0.1},
    )
    with pytest.raises(TrainFuncError, match="no trial of the search has reported a finite 'val_loss'"):
        _best_of(results[2:4], "val_loss", "min")
