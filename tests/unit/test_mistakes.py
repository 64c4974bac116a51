"""The table of mistakes: what users of other libraries write first, and the exact text that says what to write here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import raysgd
from raysgd.errors import ConfigError, MetricError, UnknownArgumentError


def train_func(config: dict[str, Any]) -> None:
    """Stands for a user's function."""


def of_keywords(**kwargs: Any) -> None:
    """Written for libraries that call it with the entries of the config."""


def of_two(config: dict[str, Any], model: Any) -> None:
    """Needs more than the config."""


async def awaited(config: dict[str, Any]) -> None:
    """Asynchronous, which nothing awaits."""


def trainer() -> Any:
    return raysgd.Trainer(1, "none")


class Mistake(NamedTuple):
    written: str
    makes: Callable[[], Any]
    error: type[Exception]
    text: str


def _none(name: str, advice: str) -> str:
    return f"module 'raysgd' has no attribute {name!r}; {advice}"


def _unknown(owner: str, name: str, advice: str) -> str:
    return f"{owner} has no argument {name!r}: {advice}."


#: So that mypy allows what is wrong.
R: Any = raysgd

MISTAKES = [
    # Names that are not there.
    Mistake(
        "raysgd.ScalingConfig(num_workers=2)",
        lambda: R.ScalingConfig(num_workers=2),
        AttributeError,
        _none(
            "ScalingConfig",
            "give num_workers=, cpus_per_worker=, gpus_per_worker= and resources_per_worker= to raysgd.Trainer itself",
        ),
    ),
    Mistake(
        "raysgd.TorchTrainer(f)",
        lambda: R.TorchTrainer(train_func),
        AttributeError,
        _none("TorchTrainer", "write raysgd.Trainer(num_workers, backend='torch')"),
    ),
    Mistake(
        "raysgd.init()", lambda: R.init(), AttributeError, _none("init", "raysgd.Trainer connects to Ray by itself")
    ),
    Mistake(
        "raysgd.get_context()",
        lambda: R.get_context(),
        AttributeError,
        _none("get_context", "call raysgd.world_rank(), raysgd.world_size() and so on"),
    ),
    Mistake("raysgd.rank()", lambda: R.rank(), AttributeError, _none("rank", "call raysgd.world_rank()")),
    Mistake(
        "raysgd.get_world_rank()",
        lambda: R.get_world_rank(),
        AttributeError,
        _none("get_world_rank", "did you mean 'world_rank'?"),
    ),
    Mistake(
        "raysgd.get_dataset_shard('train')",
        lambda: R.get_dataset_shard("train"),
        AttributeError,
        _none("get_dataset_shard", "call raysgd.get_dataset(name).get_split()"),
    ),
    Mistake(
        "raysgd.get_checkpoint()",
        lambda: R.get_checkpoint(),
        AttributeError,
        _none("get_checkpoint", "call raysgd.load_checkpoint(), which returns the state or None"),
    ),
    Mistake("raysgd.log(loss=1)", lambda: R.log(loss=1), AttributeError, _none("log", "call raysgd.report(loss=...)")),
    Mistake(
        "raysgd.prepare_model(m)",
        lambda: R.prepare_model(None),
        AttributeError,
        _none("prepare_model", "call raysgd.torch.prepare_model(model)"),
    ),
    # Arguments of a Trainer.
    Mistake(
        "Trainer(workers=2)",
        lambda: R.Trainer(workers=2),
        UnknownArgumentError,
        _unknown("Trainer", "workers", "use num_workers="),
    ),
    Mistake(
        "Trainer(devices=2)",
        lambda: R.Trainer(devices=2),
        UnknownArgumentError,
        _unknown("Trainer", "devices", "use num_workers="),
    ),
    Mistake(
        "Trainer(nproc_per_node=2)",
        lambda: R.Trainer(nproc_per_node=2),
        UnknownArgumentError,
        _unknown("Trainer", "nproc_per_node", "use num_workers="),
    ),
    Mistake(
        "Trainer(num_nodes=2)",
        lambda: R.Trainer(num_nodes=2),
        UnknownArgumentError,
        _unknown(
            "Trainer", "num_nodes", "give the number of all workers as num_workers=; Ray places them on its nodes"
        ),
    ),
    Mistake(
        "Trainer(2, use_gpu=True)",
        lambda: R.Trainer(2, use_gpu=True),
        UnknownArgumentError,
        _unknown("Trainer", "use_gpu", "use gpus_per_worker=1"),
    ),
    Mistake(
        "Trainer(accelerator='gpu')",
        lambda: R.Trainer(accelerator="gpu"),
        UnknownArgumentError,
        _unknown("Trainer", "accelerator", "use gpus_per_worker=1"),
    ),
    Mistake(
        "Trainer(strategy='ddp')",
        lambda: R.Trainer(strategy="ddp"),
        UnknownArgumentError,
        _unknown("Trainer", "strategy", "call raysgd.torch.prepare_model in train_func, which wraps the model"),
    ),
    Mistake(
        "Trainer(scaling_config=...)",
        lambda: R.Trainer(scaling_config=1),
        UnknownArgumentError,
        _unknown(
            "Trainer",
            "scaling_config",
            "there is no ScalingConfig; give num_workers=, cpus_per_worker=, gpus_per_worker=, resources_per_worker= and "
            "placement_strategy= to raysgd.Trainer(...) itself",
        ),
    ),
    Mistake(
        "Trainer(train_loop_per_worker=f)",
        lambda: R.Trainer(train_loop_per_worker=train_func),
        UnknownArgumentError,
        _unknown("Trainer", "train_loop_per_worker", "give train_func= to Trainer.run(...)"),
    ),
    Mistake(
        "Trainer(max_epochs=3)",
        lambda: R.Trainer(max_epochs=3),
        UnknownArgumentError,
        _unknown("Trainer", "max_epochs", "give it to train_func, by Trainer.run(train_func, {'max_epochs': ...})"),
    ),
    Mistake(
        "Trainer(max_failures=3)",
        lambda: R.Trainer(max_failures=3),
        UnknownArgumentError,
        _unknown("Trainer", "max_failures", "give failure_config=raysgd.FailureConfig(max_failures=...)"),
    ),
    Mistake(
        "Trainer(f)",
        lambda: R.Trainer(train_func),
        ConfigError,
        "num_workers=train_func is callable; give the number of workers to Trainer(...), and train_func to Trainer.run(...).",
    ),
    Mistake("Trainer(0)", lambda: R.Trainer(0), ConfigError, "num_workers=0 is too small; give an int >= 1."),
    Mistake(
        "Trainer('auto')", lambda: R.Trainer("auto"), ConfigError, "num_workers='auto' is a str; give an int >= 1."
    ),
    Mistake(
        "Trainer(2, 'nccl')",
        lambda: R.Trainer(2, "nccl"),
        ConfigError,
        "backend='nccl' is not known: nccl is a library of torch's process groups; give backend='torch', "
        "backend_args={'backend': 'nccl'}. Without backend_args it is nccl with GPUs and gloo without.",
    ),
    Mistake(
        "Trainer(2, 'ddp')",
        lambda: R.Trainer(2, "ddp"),
        ConfigError,
        "backend='ddp' is not known: give backend='torch' and call raysgd.torch.prepare_model in train_func, which wraps the "
        "model for all ranks.",
    ),
    Mistake(
        "Trainer(2, 'tf')",
        lambda: R.Trainer(2, "tf"),
        ConfigError,
        "backend='tf' is not known: give backend='tensorflow'.",
    ),
    Mistake(
        "Trainer(2, 'toch')",
        lambda: R.Trainer(2, "toch"),
        ConfigError,
        "backend='toch' is not known (did you mean 'torch'?); give one of 'torch', 'horovod', 'tensorflow', 'jax', 'env', 'none' "
        "or a BackendConfig.",
    ),
    Mistake(
        "Trainer(resources_per_worker={'GPU': 1})",
        lambda: R.Trainer(resources_per_worker={"GPU": 1}),
        ConfigError,
        "resources_per_worker has 'GPU'=1; did you mean gpus_per_worker=1?",
    ),
    Mistake(
        "Trainer(run_config={'name': 'x'})",
        lambda: R.Trainer(run_config={"name": "x"}),
        ConfigError,
        "run_config={'name': 'x'} is a dict; give a RunConfig(...).",
    ),
    # Its methods.
    Mistake(
        "trainer.fit()",
        lambda: trainer().fit(),
        AttributeError,
        "'Trainer' object has no attribute 'fit'; call trainer.run(train_func, config), which returns what train_func returned.",
    ),
    Mistake(
        "trainer.run()",
        lambda: trainer().run(),
        TypeError,
        "Trainer.run() missing 1 required positional argument: 'train_func'",
    ),
    Mistake(
        "trainer.run(f())",
        lambda: trainer().run(train_func({})),  # type: ignore[func-returns-value]
        ConfigError,
        "train_func=None is not a function; give a function train_func(config).",
    ),
    Mistake(
        "trainer.run(f, lr=0.1)",
        lambda: trainer().run(train_func, lr=0.1),
        UnknownArgumentError,
        _unknown("Trainer.run", "lr", "train_func gets its values in one dict, config={'lr': ...}"),
    ),
    Mistake(
        "trainer.run(f, train_loop_config={})",
        lambda: trainer().run(train_func, train_loop_config={}),
        UnknownArgumentError,
        _unknown("Trainer.run", "train_loop_config", "use config="),
    ),
    Mistake(
        "trainer.run(f, datasets={})",
        lambda: trainer().run(train_func, datasets={}),
        UnknownArgumentError,
        _unknown("Trainer.run", "datasets", "use dataset="),
    ),
    Mistake(
        "trainer.run(f, num_workers=2)",
        lambda: trainer().run(train_func, num_workers=2),
        UnknownArgumentError,
        _unknown("Trainer.run", "num_workers", "give num_workers= to raysgd.Trainer(...)"),
    ),
    Mistake(
        "trainer.run(f, [0.1])",
        lambda: trainer().run(train_func, [0.1]),
        ConfigError,
        "config=[0.1] is a list; give a dict.",
    ),
    Mistake(
        "trainer.run(f(**kwargs))",
        lambda: trainer().run(of_keywords),
        ConfigError,
        "train_func of_keywords(**kwargs: 'Any') -> 'None' gets its config as one dict, not as keywords; write "
        "def of_keywords(config), and config['lr'] for a value.",
    ),
    Mistake(
        "trainer.run(f(config, model))",
        lambda: trainer().run(of_two),
        ConfigError,
        "train_func of_two(config: 'dict[str, Any]', model: 'Any') -> 'None' needs config, model, but it gets one argument, the "
        "config; put the others into the config, or bind them with functools.partial.",
    ),
    Mistake(
        "trainer.run(async f)",
        lambda: trainer().run(awaited),
        ConfigError,
        "train_func awaited is async; give a plain function (it may use asyncio.run inside).",
    ),
    Mistake(
        "trainer.run(f, callbacks=[Callback])",
        lambda: trainer().run(train_func, callbacks=[raysgd.callbacks.ProgressCallback]),
        ConfigError,
        "callbacks[0] is the class ProgressCallback; give an instance, ProgressCallback(...).",
    ),
    Mistake(
        "trainer.run(f, reduce='mean')",
        lambda: trainer().run(train_func, reduce="mean"),
        ConfigError,
        "reduce='mean' is not a dict; give {'loss': 'mean', ...} with mean, sum, min, max, last, first.",
    ),
    # Configs.
    Mistake(
        "RunConfig('name')",
        lambda: R.RunConfig("name"),
        UnknownArgumentError,
        "RunConfig('name') gives a value without its name; write RunConfig(name=..., storage_path=..., detached=..., "
        "ray_address=...), with those that you need.",
    ),
    Mistake(
        "RunConfig(local_dir='x')",
        lambda: R.RunConfig(local_dir="x"),
        UnknownArgumentError,
        _unknown("RunConfig", "local_dir", "use storage_path="),
    ),
    Mistake(
        "CheckpointConfig(checkpoint_frequency=1)",
        lambda: R.CheckpointConfig(checkpoint_frequency=1),
        UnknownArgumentError,
        _unknown(
            "CheckpointConfig", "checkpoint_frequency", "call raysgd.save_checkpoint in train_func as often as wanted"
        ),
    ),
    Mistake(
        "CheckpointConfig(save_total_limit=2)",
        lambda: R.CheckpointConfig(save_total_limit=2),
        UnknownArgumentError,
        _unknown("CheckpointConfig", "save_total_limit", "use num_to_keep="),
    ),
    # In train_func.
    Mistake(
        "raysgd.report(0.5)",
        lambda: R.report(0.5),
        MetricError,
        "report() got a float without a name; write report(loss=0.5) or report({'loss': 0.5}).",
    ),
    Mistake(
        "raysgd.report(loss=array)",
        lambda: R.report(loss=np.zeros(3)),
        MetricError,
        "report(loss=...) got a numpy.ndarray of shape (3,), not a metric; report a number made of it (.mean(), .item()), or "
        "keep it with raysgd.save_checkpoint.",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.written)
def test_mistake_is_answered_with_what_to_write(mistake: Mistake) -> None:
    with pytest.raises(mistake.error) as caught:
        mistake.makes()
    assert type(caught.value) is mistake.error and str(caught.value) == mistake.text


def test_mistakes_start_no_cluster() -> None:
    """Arguments are checked before Ray is started for a run."""
    import ray

    assert not ray.is_initialized()


def test_bound_function_of_keywords_is_allowed() -> None:
    import functools

    from raysgd.trainer.arguments import check_train_func

    assert check_train_func(functools.partial(of_keywords, lr=0.1))
