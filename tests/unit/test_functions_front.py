"""The driver's side of `raysgd.functions` without workers: arguments, examples, metrics, rules, schedules, its imports."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.callbacks import ProgressCallback, TensorBoardCallback, WandbCallback
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.config import CheckpointConfig, RunConfig
from raysgd.errors import ConfigError, UnknownArgumentError
from raysgd.functions import Deployer, Predictor, Trainer
from raysgd.functions.examples import check_examples
from raysgd.functions.kept_checkpoints import KeptCheckpoints
from raysgd.functions.metrics import as_metrics, check_wanted, reported_name
from raysgd.functions.runs import RunCallbacks
from raysgd.workers.pickling import dumps, loads

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytestmark = pytest.mark.jax

from raysgd.functions.schedules import make_schedule  # noqa: E402
from raysgd.functions.trees import as_nested_dict, as_numpy, from_nested_dict, shapes_of  # noqa: E402
from raysgd.functions.worker.train_state import set_schedule_step  # noqa: E402

PARAMS = {"up": {"kernel": np.ones((8, 16))}, "down": {"kernel": np.ones((16, 4), np.float32)}}
EXAMPLES = [{"x": 1}, {"x": 2}]


def anything(*args: Any) -> Any:
    return args


def make_trainer(deployer: Deployer | None = None, **settings: Any) -> Trainer:
    given_settings = {"collate_fn": anything, "loss_fn": anything, "params": PARAMS, "optimizer": optax.sgd(0.1)}
    return Trainer(deployer or Deployer(0), **{**given_settings, **settings})


# -------------------------------------------------------------------------------------------------------- deployer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_model_shards": 4, "devices_per_worker": 2}, "n_model_shards=4 is more than the 2 devices of 1 worker"),
        ({"n_model_shards": 3, "num_workers": 4}, "n_model_shards=3 does not divide the 4 devices of 4 workers"),
        ({"n_processes": 2, "num_workers": 3}, "n_processes=2 and num_workers=3"),
        ({"n_processes": 0}, "n_processes=0 is too small"),
        ({"n_local_devices": 2, "devices_per_worker": 4}, "n_local_devices=2 and devices_per_worker=4 are two numbers"),
        ({"n_local_devices": 2, "gpus_per_worker": 1}, "n_local_devices=2 and gpus_per_worker=1 are two numbers"),
        ({"jax_seed": -1}, "jax_seed=-1"),
        ({"run_tensorboard": "yes"}, "run_tensorboard='yes' is not a bool"),
        ({"devices_per_worker": 2, "backend_args": {"timeout_s": 10}}, "exclude each other"),
        ({"workdir": "a", "run_config": RunConfig(name="b")}, "workdir and run_config"),
        ({"n_model_shard": 2}, "did you mean 'n_model_shards'"),
    ],
)
def test_arguments_of_a_deployer_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Deployer(**{"jax_seed": 0, **settings})


@pytest.mark.parametrize(
    ("settings", "workers", "replica", "sizes"),
    [
        ({}, 1, 1, {"data": 1, "model": 1}),
        ({"n_processes": 2, "devices_per_worker": 2, "n_model_shards": 2}, 2, 1, {"data": 2, "model": 2}),
        ({"num_workers": 2, "n_model_shards": 2}, 2, 2, {"data": 1, "model": 2}),
        ({"n_processes": 2, "n_local_devices": 4, "n_model_shards": 2}, 2, 1, {"data": 4, "model": 2}),
        ({"n_processes": 2, "n_local_devices": 2, "gpus_per_worker": 2}, 2, 1, {"data": 4, "model": 1}),
        ({"num_workers": 6, "devices_per_worker": 2, "n_model_shards": 3}, 6, 3, {"data": 4, "model": 3}),
        ({"num_workers": (2, 4)}, 4, 1, {"data": 4, "model": 1}),
        ({"num_workers": (2, float("inf"))}, 2, 1, {"data": 2, "model": 1}),
    ],
)
def test_deployer_counts_copies_of_the_model(
    settings: dict[str, Any], workers: int, replica: int, sizes: dict[str, int]
) -> None:
    deployer = Deployer(0, **settings)
    assert (deployer.num_workers, deployer.axis_sizes) == (workers, sizes)
    assert deployer.runs.trainer._spec.scaling.workers_per_replica == replica


def test_address_of_the_first_host_is_answered_by_a_message(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="raysgd"):
        Deployer(0, host0_address="111.222.333.444", host0_port=11111, process_id=0, n_processes=2)
    assert [record.getMessage() for record in caplog.records] == [
        f"{given} is not used: Ray places the workers on its nodes."
        for given in ("host0_address='111.222.333.444'", "host0_port=11111", "process_id=0")
    ]


def test_flags_choose_the_loggers_of_a_training() -> None:
    callbacks = RunCallbacks(True, False, {"mode": "offline"}, False)
    assert [type(each) for each in callbacks.make(with_loggers=True)] == [
        TensorBoardCallback,
        WandbCallback,
        ProgressCallback,
    ]
    assert [type(each) for each in callbacks.make(with_loggers=False)] == [ProgressCallback]


def test_driver_initializes_no_device() -> None:
    code = """
import sys
import numpy as np
import raysgd.functions
deployer = raysgd.functions.Deployer(0, 2, devices_per_worker=2)
predictor = raysgd.functions.Predictor(deployer, len, len)
assert not {"jax", "optax", "torch"} & set(sys.modules), "a framework is imported too early"
import optax
params = {"up": {"kernel": np.ones((8, 16))}, "down": {"kernel": np.ones((16, 4))}}
rules = deployer.get_sharding_rules(params)
trainer = raysgd.functions.Trainer(deployer, len, len, len, params, optax.adam(1e-3), params_sharding_rules=rules)
deployer.get_lr_schedule_fn(100, 4, 2, 0.1)
assert trainer.params["up"]["kernel"].dtype == np.float32
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_fn": 3}, "loss_fn=3 is not callable"),
        ({"optimizer": 0.1}, "is not an optimizer of optax"),
        ({"params": {}}, "params has no arrays"),
        ({"params": {"ids": np.ones(3, np.int32)}}, "has no gradient"),
        ({"deployer": None, "collate_fn": None}, "collate_fn=None is not callable"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0"),
        ({"params_sharding_rules": [("nothing", ())]}, "matches no parameter"),
        ({"params_sharding_rules": "up"}, "params_sharding_rules is a str"),
        ({"params_sharding_rules": {"middle": None}}, "has rules for 'middle', and params has down, up"),
        ({"train_step_fn": 3}, "train_step_fn=3 is not callable"),
    ],
)
def test_arguments_of_a_trainer_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_examples": []}, "train_examples is empty"),
        ({"train_examples": iter([1])}, "train_examples is a list_iterator"),
        (
            {"train_examples": [{"x": 1}, {"y": 1}]},
            r"train_examples\[1\] and train_examples\[0\] have different keys: x, y",
        ),
        ({"eval_examples": [{"x": 1}, 2]}, r"eval_examples\[1\] is an int"),
        ({"n_epochs": 0}, "n_epochs=0"),
        ({"per_device_batch_size": 2.0}, "per_device_batch_size=2.0"),
        ({"eval_metric_fn": anything}, "eval_metric_fn needs eval_predictor"),
        ({"eval_predictor": anything}, "is not a Predictor"),
        ({"save_argmax_ckpt_by_metrics": ["rougeL"]}, "'rougeL' needs eval_examples"),
        ({"save_argmax_ckpt_by_metrics": "rougeL"}, "give a list of names"),
        ({"save_last_ckpt": "yes"}, "save_last_ckpt='yes' is not a bool"),
        ({"save_float_dtype": "int8"}, "save_float_dtype='int8'"),
        ({"resume_from": "last"}, "needs Deployer"),
        ({"epochs": 2}, "use n_epochs="),
    ],
)
def test_arguments_of_fit_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    given_settings = {"train_examples": EXAMPLES, "per_device_batch_size": 1, "n_epochs": 1}
    with pytest.raises(ConfigError, match=message):
        make_trainer().fit(**{**given_settings, **settings})


def test_predictor_needs_parameters_and_examples() -> None:
    predictor = Predictor(Deployer(0), anything, anything)
    with pytest.raises(ConfigError, match="needs params="):
        predictor.predict(EXAMPLES)
    with pytest.raises(ConfigError, match="examples is empty"):
        predictor.predict([], 1, PARAMS)
    with pytest.raises(ConfigError, match=r"not a raysgd\.functions\.Deployer"):
        Predictor(None, anything, anything)  # type: ignore[arg-type]
    assert issubclass(UnknownArgumentError, ConfigError)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r"pip install 'raysgd\[functions\]'"):
        make_trainer()


@given(
    st.integers(0, 40), st.sampled_from([{"x": 1, "z": 2}, {"x": 1}, {"x": 1, "y": 2, "z": 3}, OrderedDict(x=1), [1]])
)
def test_first_example_with_other_keys_is_named(row: int, odd: Any) -> None:
    examples: list[Any] = [{"x": 1, "y": 2} if number % 2 else {"y": 2, "x": 1} for number in range(60)]
    examples[1 + row] = examples[50] = odd
    with pytest.raises(ConfigError, match=rf"train_examples\[{1 + row}\] "):
        check_examples("train_examples", examples)


def test_keys_of_a_million_examples_are_compared_fast() -> None:
    examples = [{"id": number, "text": "a", "label": 1} for number in range(200_000)]
    examples[-1] = {"id": 1, "text": "a", "lable": 1}
    begin = time.thread_time()
    with pytest.raises(ConfigError, match=r"train_examples\[199999\] .* label, lable are in one"):
        check_examples("train_examples", examples)
    assert time.thread_time() - begin < 0.15  # five times as much as it takes


def test_examples_stay_the_objects_that_they_are() -> None:
    ragged = [[1], [1, [2]], "text"]
    examples = check_examples("examples", ragged)
    assert [examples[row].load() for row in range(len(examples))] == ragged
    assert all(examples[row].load() is ragged[row] for row in range(len(examples)))


# --------------------------------------------------------------------------------------------------------- metrics


def test_metrics_become_plain_values() -> None:
    found = as_metrics({"a": np.float32(0.5), "b": {"c": 1}, "d": "text"})
    assert found == {"a": 0.5, "b": {"c": 1}, "d": "text"}
    for bad, message in (({"a": np.ones(2)}, "'a', which is not a metric"), ([1], "returned a list"), ({1: 2}, "'1'")):
        with pytest.raises(ConfigError, match=message):
            as_metrics(bad)


def test_wanted_metrics_that_are_missing_are_answered_with_the_nearest_name() -> None:
    metrics = {"train_loss": 1.0, "eval_loss": 2.0, "eval_rouge": {"L": 0.5}, "eval_text": "a"}
    check_wanted("save", ["loss", "eval_loss", "train_loss", "rouge/L"], metrics)
    with pytest.raises(ConfigError, match=r"'rouge-L'.*\(did you mean 'rouge/L'\?\); it gives train_loss, loss"):
        check_wanted("save", ["rouge-L"], metrics)
    with pytest.raises(ConfigError, match="names 'text', which is 'a', not a number"):
        check_wanted("save", ["text"], metrics)
    assert [*map(reported_name, ("loss", "eval_loss", "train_loss"))] == ["eval_loss", "eval_loss", "train_loss"]


def checkpoints_of(*losses: float) -> list[Checkpoint]:
    return [Checkpoint(f"/{number}", {"epoch": number, "eval_loss": loss}) for number, loss in enumerate(losses)]


def test_kept_checkpoints_have_names() -> None:
    found = checkpoints_of(3.0, 1.0, 2.0)
    assert KeptCheckpoints.of(False, False, None, None).name(found) == {}
    assert KeptCheckpoints.of(False, True, ["loss"], None).name(found) == {"last": found[2], "min_loss": found[1]}
    every = KeptCheckpoints.of(True, False, None, ["loss"]).name(found)
    assert every == {
        "epoch_0": found[0],
        "epoch_1": found[1],
        "epoch_2": found[2],
        "last": found[2],
        "max_loss": found[0],
    }
    assert KeptCheckpoints.of(False, True, None, None).name([]) == {}


def test_settings_of_checkpoints_follow_the_arguments_of_fit() -> None:
    given_config = CheckpointConfig(on_write_error="warn")
    last = KeptCheckpoints.of(False, True, ["loss"], ["a/b"]).config(given_config)
    assert (last.num_to_keep, last.keep_best, last.links) == (1, {"eval_loss": "min", "eval_a/b": "max"}, True)
    assert (last.on_write_error, last.storage_interval) == ("warn", 1)
    assert KeptCheckpoints.of(True, False, None, None).config(given_config).num_to_keep is None
    assert KeptCheckpoints.of(False, False, None, None).config(given_config).storage_interval > 10**9
    with pytest.raises(ConfigError, match=r"num_to_keep=\.\.\.\)\) is decided"):
        KeptCheckpoints.of(True, False, None, None).config(CheckpointConfig(num_to_keep=2))
    with pytest.raises(ConfigError, match="'eval_loss' is in"):
        KeptCheckpoints.of(False, False, ["loss"], ["eval_loss"]).check(has_eval=True)


# ----------------------------------------------------------------------------------------------------------- trees

leaf = st.just(None).map(lambda _: np.ones((2, 3)))
trees = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.dictionaries(st.text(min_size=1, max_size=3), inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from("ab"), inner, min_size=1).map(OrderedDict),
    ),
    max_leaves=8,
).filter(lambda tree: not isinstance(tree, np.ndarray))


@given(trees)
def test_trees_survive_nested_dicts(tree: Any) -> None:
    tree = jax.tree.unflatten(
        jax.tree.structure(tree), [np.full((2,), number) for number in range(len(jax.tree.leaves(tree)))]
    )
    again = from_nested_dict(as_nested_dict(tree), shapes_of(tree))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert [leaf[0] for leaf in jax.tree.leaves(again)] == [leaf[0] for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_trees_of_flax_are_rebuilt_from_their_shapes_in_another_process(kind: str) -> None:
    flax = pytest.importorskip("flax")
    from flax import nnx

    from support import functions_models as models

    if kind == "linen":
        shapes = flax.core.freeze(models.shapes(models.Mlp(), np.zeros((1, 4), np.float32)))
    else:
        shapes = nnx.state(nnx.eval_shape(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0))), nnx.Param)
    params = as_numpy(jax.tree.map(lambda each: np.random.default_rng(0).normal(size=each.shape), shapes))
    like = loads(dumps(shapes_of(params)))
    again = from_nested_dict(as_nested_dict(params), like)
    assert type(again) is type(params) and jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_parameters_become_numpy_arrays_of_the_types_of_jax() -> None:
    found = as_numpy({"a": np.ones(2, np.float64), "b": np.ones(2, jax.numpy.bfloat16)})
    assert [str(each.dtype) for each in found.values()] == ["float32", "bfloat16"]


def test_rules_are_a_table_and_changed_ones_are_own_rules() -> None:
    deployer = Deployer(0, 2, devices_per_worker=2)
    rules = deployer.get_sharding_rules(PARAMS)
    assert "up/kernel" in str(rules) and len(rules) == 2 and rules.own == []
    rules[0] = (rules[0][0], ())
    assert rules.own == [rules[0]]
    make_trainer(deployer, params_sharding_rules=rules)


# ------------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_schedule_warms_up_and_decays_over_all_updates(kind: str) -> None:
    schedule = make_schedule(kind, 20, 5, (0.1, 1.0, 0.2))
    found = [float(schedule(step)) for step in range(21)]
    assert (found[0], found[5], found[20]) == pytest.approx((0.1, 1.0, 0.2))
    assert np.all(np.diff(found[:6]) > 0) and np.all(np.diff(found[5:]) < 0)
    with pytest.raises(ConfigError, match="warmup_steps=21 is more than the 20 updates"):
        make_schedule(kind, 20, 21, (0, 1, 0))


def test_schedule_of_a_deployer_counts_the_last_short_batch() -> None:
    deployer = Deployer(0, num_workers=2, devices_per_worker=2)
    schedule = deployer.get_lr_schedule_fn(75, 4, 2, 1.0)
    assert float(schedule(9)) > 0 and float(schedule(10)) == 0


@pytest.mark.parametrize("injects", [False, True])
def test_new_state_of_an_optimizer_continues_its_schedule(injects: bool) -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule) if injects else optax.sgd(schedule)
    params = {"w": np.zeros(1, np.float32)}
    state = set_schedule_step(optimizer.init(params), 4)
    updates, _ = optimizer.update({"w": np.ones(1, np.float32)}, state, params)
    assert float(updates["w"][0]) == pytest.approx(-0.6)


def test_workdir_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    deployer = Deployer(0, workdir="work")
    assert deployer.workdir == str(tmp_path / "work")
    assert deployer.runs.trainer._spec.run_config.storage_path == str(tmp_path)
