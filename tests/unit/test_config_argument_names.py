"""An argument that does not exist is refused with the right one, and the visible signatures stay as they are written."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest

import raysgd
from raysgd.backends.registry import resolve_backend
from raysgd.config.argument_names import (
    CHECKPOINT_CONFIG_HINTS,
    FAILURE_CONFIG_HINTS,
    RUN_CONFIG_HINTS,
    RUN_HINTS,
    TRAINER_HINTS,
)
from raysgd.config.run import BackendName, Reduction, Returns
from raysgd.controller.rounds import REDUCTIONS
from raysgd.errors import ConfigError, UnknownArgumentError
from raysgd.trainer.arguments import check_returns
from raysgd.trainer.spec import ARGUMENTS, make_spec


def train_func() -> None: ...


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("num_worker", "did you mean 'num_workers'?"),
        ("gpus_per_workers", "did you mean 'gpus_per_worker'?"),
        ("workers", "use num_workers="),
        ("gpu_per_worker", "use gpus_per_worker="),
        ("use_gpu", "use gpus_per_worker=1"),
        ("scaling_config", "there is no ScalingConfig; give num_workers="),
        ("ScalingConfig", "there is no ScalingConfig"),
        ("torch_config", "use backend_args="),
        ("train_loop_per_worker", "give train_func= to Trainer.run(...)"),
        ("max_failures", "failure_config=raysgd.FailureConfig(max_failures=...)"),
        ("zzz", "its arguments are backend, backend_args, checkpoint_config"),
    ],
)
def test_trainer_names_the_right_argument(name: str, advice: str) -> None:
    with pytest.raises(UnknownArgumentError) as caught:
        raysgd.Trainer(1, "none", **{name: 1})  # type: ignore[arg-type]
    assert f"Trainer has no argument {name!r}" in str(caught.value) and advice in str(caught.value)


@pytest.mark.parametrize("method", ["run", "run_generator", "to_trainable"])
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("checkpoint", "use resume_from="),
        ("resume_from_checkpoint", "use resume_from="),
        ("datasets", "use dataset="),
        ("callback", "use callbacks="),
        ("train_loop_config", "use config="),
        ("num_workers", "give num_workers= to raysgd.Trainer(...)"),
        ("resume_form", "did you mean 'resume_from'?"),
    ],
)
def test_methods_that_run_name_the_right_argument(method: str, name: str, advice: str) -> None:
    trainer = raysgd.Trainer(1, "none")
    with pytest.raises(UnknownArgumentError) as caught:
        getattr(trainer, method)(train_func, **{name: 1})
    assert f"Trainer.{method} has no argument {name!r}" in str(caught.value) and advice in str(caught.value)


@pytest.mark.parametrize(
    ("config", "name", "advice"),
    [
        (raysgd.RunConfig, "local_dir", "use storage_path="),
        (raysgd.RunConfig, "failure_config", "give failure_config= to raysgd.Trainer(...)"),
        (raysgd.FailureConfig, "fail_fast", "use max_failures=0"),
        (raysgd.FailureConfig, "max_failure", "did you mean 'max_failures'?"),
        (raysgd.CheckpointConfig, "checkpoint_score_attribute", "use score_attribute="),
        (raysgd.TorchConfig, "timeout", "did you mean 'timeout_s'?"),
        (raysgd.CheckpointConfig, "num_to_kepp", "did you mean 'num_to_keep'?"),
    ],
)
def test_configs_name_the_right_field(config: Any, name: str, advice: str) -> None:
    with pytest.raises(UnknownArgumentError) as caught:
        config(**{name: 1})
    assert f"{config.__name__} has no argument {name!r}" in str(caught.value) and advice in str(caught.value)


def test_the_error_is_caught_as_a_type_error_and_as_a_config_error() -> None:
    assert issubclass(UnknownArgumentError, TypeError) and issubclass(UnknownArgumentError, ConfigError)


@pytest.mark.parametrize(
    ("function", "hints"),
    [
        (raysgd.Trainer, TRAINER_HINTS),
        (raysgd.Trainer.run, RUN_HINTS),
        (raysgd.Trainer.run_generator, RUN_HINTS),
        (raysgd.RunConfig, RUN_CONFIG_HINTS),
        (raysgd.FailureConfig, FAILURE_CONFIG_HINTS),
        (raysgd.CheckpointConfig, CHECKPOINT_CONFIG_HINTS),
    ],
)
def test_signatures_are_visible_and_no_hint_is_about_an_argument_that_exists(function: Any, hints: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    assert len(parameters) >= 3 and not parameters.keys() & hints.keys()


def test_settings_know_exactly_the_arguments_of_a_trainer() -> None:
    assert set(ARGUMENTS) == set(inspect.signature(raysgd.Trainer).parameters)
    with pytest.raises(UnknownArgumentError, match="Trainer has no argument 'use_gpu': use gpus_per_worker=1"):
        make_spec(use_gpu=True)


def test_literal_types_name_the_values_that_are_accepted() -> None:
    assert set(get_args(Reduction)) == REDUCTIONS.keys()
    assert [check_returns(value) for value in get_args(Returns)] == ["first", "all"]
    assert all(resolve_backend(name, None) for name in get_args(BackendName))
