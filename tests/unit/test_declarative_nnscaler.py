"""Trainings that were written for nnScaler 0.8: its examples and tests with small parts, and each of its fields and hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

import raysgd
from raysgd.declarative import TrainerArgs, TrainHook, load_args
from raysgd.declarative.args import NOT_NEEDED, as_values
from raysgd.declarative.entry import _Job
from raysgd.declarative.hooks import HOOKS
from raysgd.declarative.reading import args_of
from raysgd.declarative.strategies import list_warnings
from raysgd.errors import ConfigError
from support import declared, nnscaler_names
from support.declared_runs import loop_of, numbers, run, training
from support.nnscaler_files import FILES

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    declared.CALLS.clear()
    yield
    declared.CALLS.clear()


def read(name: str, folder: Path, *flags: str) -> dict[str, Any]:
    text, small = FILES[name]
    (folder / "job.yaml").write_text(text)
    values: dict[str, Any] = as_values(load_args(folder / "job.yaml", [*small, *flags]))
    return values


# -- its files -------------------------------------------------------------------------------------------------------------


#: The optimizer steps of each file.
STEPS_OF = {
    "characters": 6,
    "images": 3 * 5,
    "variables": 15,
    "stream": 15,
    "f16": 10,
    "submodules": 2 * 25,
    "tokens": 3,
    "recomputation": 10,
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_nnscaler_train(name: str, tmp_path: Path) -> None:
    values = read(name, tmp_path)
    _Job.of(values, None)  # what is checked on the driver
    metrics, weights = run(values, tmp_path)
    assert metrics["finished_train_steps"] == STEPS_OF[name]
    assert all(torch.isfinite(each).all() for each in weights.values())


def test_hooks_of_the_characters_see_each_step(tmp_path: Path) -> None:
    run(read("characters", tmp_path, "--max_val_steps", "1"), tmp_path)
    of_training = [call[1] for call in declared.CALLS if call[0] == "train"]
    assert of_training == [*range(6)]
    assert [call[:2] for call in declared.CALLS if call[0] == "val"] == [("val", 5), ("val", 6)]


def test_scheduler_of_the_images_finds_the_steps_of_the_training(tmp_path: Path) -> None:
    run(read("images", tmp_path), tmp_path)
    assert declared.CALLS == [("max_train_steps", 15, 0)]


def test_files_that_cannot_work_say_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(FILES["variables"][0])
    with pytest.raises(
        ConfigError, match=r"job.yaml, line 7, global_batch_size: .*give a multiple of 50, or fewer workers"
    ):
        load_args(tmp_path / "job.yaml")
    with pytest.raises(ConfigError, match=r"log.0.args.layers: TensorBoardLogger has no argument 'layers'"):
        read("variables", tmp_path, "--log.0.type", "TensorBoardLogger", "--log.0.args.layers", "1")


# -- its fields ------------------------------------------------------------------------------------------------------------


def _fields(kind: Any, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(kind)
    for each in dataclasses.fields(kind):
        inner = [hints[each.name], *get_args(hints[each.name])]
        sections = [found for found in inner if dataclasses.is_dataclass(found)]
        yield from _fields(sections[0], f"{prefix}{each.name}.") if sections else [f"{prefix}{each.name}"]


def test_page_lists_every_field_and_hook() -> None:
    assert nnscaler_names.PAGE.read_text() == nnscaler_names.make_page(), (
        "run python -m support.nnscaler_names in tests/"
    )


def test_each_field_is_what_the_page_says() -> None:
    known = {name for name in _fields(TrainerArgs) if name.partition(".")[0] not in nnscaler_names.OWN}
    listed = set(nnscaler_names.list_names())
    listed = {name.rpartition(".")[0] if name.startswith("checkpoint.resume_from.") else name for name in listed}
    assert known == listed - set(NOT_NEEDED)
    with pytest.raises(ConfigError, match=r"convert_fn is not supported: .*give tracing_from_weights"):
        args_of(training(checkpoint__resume_from={"convert_fn": "my.fn"}))


def test_each_hook_and_attribute_is_there() -> None:
    assert set(nnscaler_names.OTHER_HOOKS) <= set(HOOKS) and len(HOOKS) == 29
    assert all(callable(getattr(TrainHook, name)) for name in HOOKS)
    with raysgd.local():
        loop = loop_of(numbers([1.0]))
        loop.train()
    assert [name for name in nnscaler_names.ATTRIBUTES if not hasattr(loop, name)] == []


# -- what some of them mean ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", ["last", {"checkpoint": "last"}, {"with_merged": True}, {"checkpoint": "last", "convert_fn": None}]
)
def test_checkpoint_to_resume_from_is_written_in_two_ways(given: Any) -> None:
    assert args_of(training(checkpoint__resume_from=given)).checkpoint.resume_from == "last"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"checkpoints": "last"}, r"checkpoints: there is no such field \(did you mean 'checkpoint'\?\)"),
        ({"checkpoint": {"__type": "my.find"}}, "resume_from.checkpoint is a mapping; give last, best or a path"),
    ],
)
def test_checkpoint_that_cannot_be_meant_is_refused(given: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        args_of(training(checkpoint__resume_from=given))


@pytest.mark.parametrize("stage", ["train_args", "val_args"])
def test_default_loader_does_not_shuffle_and_loaders_of_users_may(stage: str) -> None:
    for off in (False, "false", None):
        args_of(training(**{f"dataloader__{stage}": {"shuffle": off}}))
    for name, value in (("shuffle", "true"), ("batch_sampler", "my.Sampler")):
        with pytest.raises(ConfigError, match=rf"{stage}.{name} cannot be set: dataset_sampler decides"):
            args_of(training(**{f"dataloader__{stage}": {name: value}}))
        args_of(training(dataloader__type="my.Loader", **{f"dataloader__{stage}": {name: value}}))


@pytest.mark.parametrize("given", [{"shuffle": False, "drop_last": True}, {}])
def test_sampler_of_a_validation_has_the_arguments_of_the_training(given: dict[str, Any]) -> None:
    sampler = args_of(training(dataset_sampler__train_args=given)).dataset_sampler
    assert sampler.args_of("val") == sampler.args_of("test") == given
    own = args_of(training(dataset_sampler={"train_args": given, "val_args": {"seed": 1}})).dataset_sampler
    assert own.args_of("val") == {"seed": 1}


def test_loss_can_be_the_mean_over_tokens() -> None:
    values = numbers(
        [1.0, 3.0, 8.0],
        micro_batch_size=2,
        grad_accumulation_steps=2,
        model__type="support.declared.Total",
        optimizer__loss_reduction="per-token-mean",
        optimizer__aggregate_outputs_fn="support.declared.sum_tokens",
    )
    assert run(values)[0]["train_loss"] == 12 / 3
    counted_by_the_model = {**values, "optimizer": {**values["optimizer"], "aggregate_outputs_fn": None}}
    assert run(counted_by_the_model)[0]["train_loss"] == 12 / 3


def test_references_to_objects_are_the_same_object() -> None:
    values = training(
        vars={"size": 5, "rows": {"__type": "support.declared.Numbers", "values": [1.0, 2.0]}},
        model={
            "type": "support.declared.Referring",
            "args": {"rows": "$!(vars.rows)", "again": "$!{vars.rows}", "args": "$!(self)"},
        },
        max_train_steps=1,
    )
    run(values)
    assert declared.CALLS == [(True, 5)]
    with pytest.raises(ConfigError, match=r"model: \$!\(vars.row\) refers to vars.row, which is not set"):
        run(training(vars={"rows": 1}, model__args={"dim": "$!(vars.row)"}))
    with pytest.raises(ConfigError, match=r"refers to vars.b, which is not set"):
        run(training(vars={"a": "$!(vars.b)", "b": 1}, model__args={"dim": "$!(vars.a)"}))


def test_module_is_imported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registering_parts.py").write_text("from support import declared\ndeclared.CALLS.append('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run(training(init_module="registering_parts", init_env_fn="support.declared.note_environment", max_train_steps=1))
    assert declared.CALLS == ["imported", ("init_env", 0)]


def test_settings_of_a_policy_that_has_none_are_named() -> None:
    compute = {"pas_config": {"recompute_modules": "Layer"}}
    assert any("pas_config" in text for text in list_warnings(args_of(training(compute_config=compute))))
    assert not any(
        "pas_config" in text
        for text in list_warnings(args_of(training(compute_config=compute, pas_policy="my.policy")))
    )


@pytest.mark.parametrize("name", ["logs/tb", "tb"])
def test_logger_writes_to_a_folder_of_the_run(name: str) -> None:
    values = training(log=[{"type": "nnscaler.cli.loggers.TensorBoardLogger", "args": {"name": name, "root_dir": "."}}])
    assert len(_Job.of(values, None).callbacks) == 2
    for wrong in ("../tb", "/tb", "a//b"):
        values["log"][0]["args"]["name"] = wrong
        with pytest.raises(ConfigError, match=r"log.0.args.name: .*cannot name a folder"):
            args_of(values)
