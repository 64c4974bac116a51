"""The names of redco 0.4.23: those that `raysgd.functions` has take redco's arguments in its order, the others say what to write.

The page of the reference has the same table.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np
import pytest

from raysgd.errors import ConfigError
from raysgd.functions import Deployer, Predictor, Trainer
from raysgd.functions.left_out import LEFT_OUT
from support.project import ROOT

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytestmark = pytest.mark.jax

PAGE = ROOT / "doc" / "reference" / "redco.md"
#: By class: each public name, and for a method its arguments.
REDCO = {
    "Deployer": {
        "__init__": "jax_seed n_model_shards verbose workdir n_processes host0_address host0_port process_id n_local_devices "
        "run_tensorboard wandb_init_kwargs",
        "gen_model_step_rng": "",
        "gen_rng": "",
        "get_accumulate_grad_batches": "global_batch_size per_device_batch_size",
        "get_local_global_micro_batch_size": "per_device_batch_size",
        "get_lr_schedule_fn": "train_size per_device_batch_size n_epochs learning_rate schedule_type warmup_ratio warmup_steps "
        "init_learning_rate end_learning_rate",
        "get_model_input_batches": "examples per_device_batch_size collate_fn shuffle shuffle_rng desc is_train "
        "accumulate_grad_batches",
        "get_opt_state_spec": "params_shape_or_params params_spec optimizer",
        "get_params_spec": "params_shape_or_params params_sharding_rules",
        "get_sharding_rules": "params_shape_or_params",
        "load_ckpt": "ckpt_dir params_sharding_rules optimizer float_dtype load_params load_opt_state update_rng",
        "load_last_ckpt": "optimizer params_sharding_rules float_dtype load_params load_opt_state update_rng",
        "load_params_shape": "ckpt_dir",
        "log_info": "info title step",
        "log_metrics": "metrics step",
        "mesh": None,
        "process_batch_size": "per_device_batch_size",
        "run_model_step": "step_fn input_args",
        "save_ckpt": "ckpt_dir params opt_state float_dtype",
        "save_outputs": "outputs desc step",
        "shard_params": "params params_spec desc",
        "workdir": None,
    },
    "Trainer": {
        "__init__": "deployer collate_fn apply_fn loss_fn params optimizer opt_state params_sharded opt_state_sharded "
        "compute_dtype last_ckpt_info lr_schedule_fn accumulate_grad_batches params_sharding_rules train_step_fn",
        "eval_loss": "examples per_device_batch_size desc",
        "fit": "train_examples per_device_batch_size n_epochs eval_examples eval_per_device_batch_size eval_loss eval_predictor "
        "eval_metric_fn eval_sanity_check save_ckpt_every_k_epochs save_last_ckpt save_argmin_ckpt_by_metrics "
        "save_argmax_ckpt_by_metrics save_opt_states save_float_dtype",
        "get_default_predictor": "pred_fn output_fn",
        "get_params_to_save": "state_params",
        "mesh": None,
        "params": None,
        "save_ckpt": "epoch_idx ckpt_name save_opt_state float_dtype",
        "set_train_state": "apply_fn optimizer step params opt_state params_sharded opt_state_sharded",
        "setup_running_step": "dummy_batch",
        "state": None,
        "step": None,
        "train": "examples per_device_batch_size desc",
        "workdir": None,
    },
    "Predictor": {
        "__init__": "deployer collate_fn pred_fn output_fn params_sharding_rules",
        "mesh": None,
        "predict": "examples per_device_batch_size params params_replicated params_sharded desc",
        "setup_running_step": "dummy_batch params_shape_or_params",
    },
}
PARAMS = {"model": {"kernel": np.ones((8, 4), np.float32)}, "lora": {"a": np.ones((8, 2), np.float32)}}


def anything(*args: Any) -> Any:
    return args


def make(kind: str) -> Any:
    deployer = Deployer(0, n_model_shards=2, devices_per_worker=4, num_workers=2)
    if kind == "Deployer":
        return deployer
    if kind == "Predictor":
        return Predictor(deployer, anything, anything)
    return Trainer(deployer, anything, None, anything, PARAMS, optax.sgd(0.1))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in REDCO.items() for name in names])
def test_name_of_redco_takes_its_arguments_in_order_or_says_what_to_write(kind: str, name: str) -> None:
    owner, arguments = make(kind), REDCO[kind][name]
    if advice := LEFT_OUT[kind].get(name):
        with pytest.raises(AttributeError) as caught:
            getattr(owner, name)
        assert advice in str(caught.value)
    elif arguments is None:
        getattr(owner, name)
    else:
        parameters = inspect.signature(getattr(owner, name)).parameters.values()
        positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        assert positional[: len(arguments.split())] == arguments.split()


def test_page_has_the_table_of_redcos_names() -> None:
    rows = ["| redco | here |", "|---|---|"]
    for kind, names in REDCO.items():
        for name in names:
            shown = f"`{kind}`" if name == "__init__" else f"`{kind}.{name}`"
            advice = LEFT_OUT[kind].get(name)
            rows.append(f"| {shown} | {'the same' if advice is None else f'left out: {advice}'} |")
    table = "\n".join(rows)
    assert table in PAGE.read_text(), f"the table of {PAGE.name} is this:\n{table}"


def test_name_that_no_one_has_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'Trainer' object has no attribute 'stepp'$"):
        make("Trainer").stepp  # noqa: B018


def test_arguments_that_are_not_needed_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "raysgd"):
        deployer = Deployer(0, host0_address="10.0.0.1")
        Trainer(deployer, anything, None, anything, PARAMS, optax.sgd(0.1), params_sharded=True)
        deployer.log_info(3, title="num_labels", step=4)
        Deployer(0, verbose=False).log_info("nothing")
    assert [record.getMessage() for record in caplog.records] == [
        "host0_address='10.0.0.1' is not used: Ray places the workers on its nodes.",
        "params_sharded=True is not used: arrays are placed in the workers.",
        "num_labels: 3 (step 4)",
    ]


def test_deployer_counts_the_rows_of_all_devices() -> None:
    deployer = make("Deployer")
    assert dict(deployer.mesh.shape) == {"data": 4, "model": 2}
    assert deployer.get_local_global_micro_batch_size(3) == (6, 12)
    assert deployer.get_accumulate_grad_batches(24, 3) == 2
    with pytest.raises(ConfigError, match="global_batch_size=20 is not a multiple of the 12 rows"):
        deployer.get_accumulate_grad_batches(20, 3)
    schedule = deployer.get_lr_schedule_fn(48, 3, 2, 0.1, accumulate_grad_batches=2)  # 2 epochs of 2 updates
    assert [float(schedule(step)) for step in (0, 2, 4)] == pytest.approx([0.1, 0.05, 0.0])


def test_keys_of_the_script_are_those_of_redco() -> None:
    rng, first = jax.random.split(jax.random.PRNGKey(7))
    _, second = jax.random.split(rng)
    deployer = Deployer(7)
    assert (deployer.gen_rng() == first).all() and (deployer.gen_rng() == second).all()


def test_rules_may_be_for_submodules() -> None:
    deployer = make("Deployer")
    rules = {"model": deployer.get_sharding_rules(PARAMS["model"]), "lora": [("^a$", ("mp", None))]}
    Trainer(deployer, anything, None, anything, PARAMS, optax.sgd(0.1), params_sharding_rules=rules)
    from raysgd.functions.sharding import own_rules, plan_sharding

    plan = plan_sharding(PARAMS, deployer.axis_sizes, own_rules(rules))
    assert plan.specs["lora"]["a"] == jax.sharding.PartitionSpec("model", None)
    assert plan.specs["model"]["kernel"] == plan_sharding(PARAMS, deployer.axis_sizes).specs["model"]["kernel"]
    with pytest.raises(ConfigError, match=r"does not fit a of shape"):
        plan_sharding(PARAMS, deployer.axis_sizes, {"lora": [("a", (None, None, "mp"))]})


@pytest.mark.parametrize("kinds", [("dict", "FrozenDict"), ("FrozenDict", "dict")])
def test_labels_and_masks_may_be_of_the_other_kind_of_dict(kinds: tuple[str, str], tmp_path: Any) -> None:
    core = pytest.importorskip("flax.core")
    params, labels = ({"dict": core.unfreeze, "FrozenDict": core.freeze}[kind](PARAMS) for kind in kinds)
    labels = jax.tree_util.tree_map_with_path(lambda path, _: path[0].key, labels)
    mask = jax.tree.map(lambda label: label == "lora", labels)
    optimizer = optax.chain(
        optax.multi_transform({"model": optax.set_to_zero(), "lora": optax.adam(0.1)}, labels),
        optax.masked(optax.scale(2.0), mask),
    )
    trainer = Trainer(Deployer(0), anything, None, anything, params, optimizer)
    tx = trainer.state.tx
    grads = jax.tree.map(np.ones_like, params)
    updates, opt_state = tx.update(grads, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    np.testing.assert_allclose(updates["lora"]["a"], -0.2, rtol=1e-5)
    np.testing.assert_array_equal(updates["model"]["kernel"], 0)
    trainer.deployer.save_ckpt(tmp_path, params, opt_state)
    restored, _ = trainer.deployer.load_ckpt(tmp_path, optimizer=optimizer)
    jax.tree.map(np.testing.assert_array_equal, restored["opt_state"], opt_state)
