"""What users of other libraries write first is refused, before Ray is started, by a text that says what to write here."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import ray

import raysgd
from raysgd.config import argument_names as names
from raysgd.errors import ConfigError, MetricError, UnknownArgumentError
from raysgd.trainer.arguments import check_train_func

#: So that mypy allows what is wrong.
R: Any = raysgd


def train_func(config: dict[str, Any]) -> None:
    """Stands for a user's function."""


def of_keywords(**kwargs: Any) -> None:
    """Written for libraries that call it with the entries of the config."""


def of_two(config: dict[str, Any], model: Any) -> None:
    """Needs more than the config."""


async def awaited(config: dict[str, Any]) -> None:
    """Asynchronous, which nothing awaits."""


def run(*args: Any, **kwargs: Any) -> Any:
    return R.Trainer(1, "none").run(*args, **kwargs)


def of_table(owner: str, call: Callable[..., Any], hints: Mapping[str, str]) -> list[Any]:
    return [pytest.param(owner, call, name, advice, id=f"{owner}({name}=)") for name, advice in hints.items()]


@pytest.mark.parametrize(
    ("owner", "call", "name", "advice"),
    [
        *of_table("Trainer", R.Trainer, names.TRAINER_HINTS),
        *of_table("Trainer.run", functools.partial(run, train_func), names.RUN_HINTS),
        *of_table("RunConfig", R.RunConfig, names.RUN_CONFIG_HINTS),
        *of_table("FailureConfig", R.FailureConfig, names.FAILURE_CONFIG_HINTS),
        *of_table("CheckpointConfig", R.CheckpointConfig, names.CHECKPOINT_CONFIG_HINTS),
    ],
)
def test_argument_of_another_library_is_answered_with_the_one_here(
    owner: str, call: Callable[..., Any], name: str, advice: str
) -> None:
    with pytest.raises(UnknownArgumentError) as caught:
        call(**{name: 1})
    assert str(caught.value) == f"{owner} has no argument {name!r}: {advice}."


@pytest.mark.parametrize(
    ("of", "name", "advice"),
    [
        *(("raysgd", name, advice) for name, advice in raysgd._HINTS.items()),
        ("raysgd", "get_world_rank", "did you mean 'world_rank'?"),
        *(("Trainer", name, f"{advice}.") for name, advice in names.METHOD_HINTS.items()),
    ],
)
def test_name_of_another_library_is_answered_with_the_one_here(of: str, name: str, advice: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(R if of == "raysgd" else R.Trainer(1, "none"), name)
    assert str(caught.value).endswith(f"has no attribute {name!r}; {advice}")


@pytest.mark.parametrize(
    ("written", "error", "text"),
    [
        (
            lambda: R.Trainer(train_func),
            ConfigError,
            "give the number of workers to Trainer(...), and train_func to Tr",
        ),
        (lambda: R.Trainer(0), ConfigError, "num_workers=0 is too small; give an int >= 1."),
        (lambda: R.Trainer("auto"), ConfigError, "num_workers='auto' is a str; give an int >= 1."),
        (lambda: R.Trainer(2, "nccl"), ConfigError, "give backend='torch', backend_args={'backend': 'nccl'}."),
        (lambda: R.Trainer(2, "ddp"), ConfigError, "give backend='torch' and call raysgd.torch.prepare_model in train"),
        (lambda: R.Trainer(2, "tf"), ConfigError, "backend='tf' is not known: give backend='tensorflow'."),
        (lambda: R.Trainer(2, "toch"), ConfigError, "backend='toch' is not known (did you mean 'torch'?); give one of"),
        (lambda: R.Trainer(resources_per_worker={"GPU": 1}), ConfigError, "did you mean gpus_per_worker=1?"),
        (lambda: R.Trainer(run_config={"name": "x"}), ConfigError, "is a dict; give a RunConfig(...)."),
        (lambda: run(), TypeError, "Trainer.run() missing 1 required positional argument: 'train_func'"),
        (lambda: run(None), ConfigError, "train_func=None is not a function; give a function train_func(config)."),
        (lambda: run(train_func, lr=0.1), UnknownArgumentError, "train_func gets its values in one dict, config={'lr'"),
        (lambda: run(train_func, num_workers=2), UnknownArgumentError, "give num_workers= to raysgd.Trainer(...)"),
        (lambda: run(train_func, [0.1]), ConfigError, "config=[0.1] is a list; give a dict."),
        (lambda: run(of_keywords), ConfigError, "write def of_keywords(config), and config['lr'] for a value."),
        (lambda: run(of_two), ConfigError, "put the others into the config, or bind them with functools.partial."),
        (lambda: run(awaited), ConfigError, "is async; give a plain function (it may use asyncio.run inside)."),
        (
            lambda: run(train_func, callbacks=[raysgd.callbacks.ProgressCallback]),
            ConfigError,
            "callbacks[0] is the class ProgressCallback; give an instance, ProgressCallback(...).",
        ),
        (lambda: run(train_func, reduce="mean"), ConfigError, "give {'loss': 'mean', ...} with mean, sum, min, max"),
        (lambda: R.RunConfig("name"), UnknownArgumentError, "write RunConfig(name=..., storage_path=..., detached=..."),
        (lambda: R.report(0.5), MetricError, "write report(loss=0.5) or report({'loss': 0.5})."),
        (lambda: R.report(loss=np.zeros(3)), MetricError, "report a number made of it (.mean(), .item()), or keep it"),
    ],
    ids=itertools.count(),
)
def test_value_that_cannot_work_is_answered_with_what_to_write(
    written: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        written()
    assert type(caught.value) is error and text in str(caught.value)


def test_mistakes_start_no_cluster() -> None:
    """Arguments are checked before Ray is started for a run."""
    assert not ray.is_initialized()


def test_bound_function_of_keywords_is_allowed() -> None:
    assert check_train_func(functools.partial(of_keywords, lr=0.1))
