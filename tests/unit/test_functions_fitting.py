"""Fits in this process, in place of workers: examples by epoch, own steps and types, loops and checkpoints of a user's own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysgd.errors import CheckpointError, CheckpointNotFoundError, ConfigError, UnknownArgumentError
from raysgd.functions import Deployer, Predictor, Trainer

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytestmark = pytest.mark.jax

from raysgd.functions.examples import call_by_name  # noqa: E402
from raysgd.functions.worker.predicting import rows_on_all_devices  # noqa: E402
from raysgd.functions.worker.steps import Steps  # noqa: E402
from raysgd.functions.worker.train_state import restore_arrays  # noqa: E402
from raysgd.session import api  # noqa: E402
from support.functions_local import LocalRuns  # noqa: E402
from support.jax_devices import cpu_devices  # noqa: E402

RANDOM = np.random.default_rng(0)
EXAMPLES = [{"id": number, "x": RANDOM.normal(size=3).astype(np.float32)} for number in range(10)]
PARAMS = {"up": {"kernel": np.ones((3, 4), np.float32)}, "down": {"kernel": np.full((4, 1), 0.5, np.float32)}}


@pytest.fixture(scope="module", autouse=True)
def one_device() -> Iterator[None]:
    with cpu_devices(1):
        yield


@pytest.fixture
def deployer(tmp_path: Path) -> Deployer:
    deployer = Deployer(3, workdir=tmp_path / "work", verbose=False)
    deployer.runs = LocalRuns(tmp_path / "work")  # type: ignore[assignment]
    return deployer


def collate_fn(examples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": np.stack([each["x"] for each in examples]), "id": np.array([each["id"] for each in examples])}


def outputs_of(params: Any, batch: Any) -> Any:
    return (jax.numpy.tanh(batch["x"] @ params["up"]["kernel"]) @ params["down"]["kernel"])[:, 0]


def loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    return ((outputs_of(params, batch) - batch["x"].sum(axis=1)) ** 2).mean()


def id_loss(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    return batch["id"].mean() + 0 * params["up"]["kernel"].sum()


def make_trainer(deployer: Deployer, **settings: Any) -> Trainer:
    given = {"collate_fn": collate_fn, "loss_fn": loss_fn, "params": PARAMS, "optimizer": optax.adam(0.05)}
    return Trainer(deployer, **{**given, **settings})


def check_equal(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, other)


# ------------------------------------------------------------------------------------------------- examples by epoch


def examples_of(epoch_idx: int, calls: list[int]) -> list[dict[str, Any]]:
    calls.append(epoch_idx)
    return [{**each, "id": each["id"] + 100 * epoch_idx} for each in EXAMPLES[: 10 - 3 * epoch_idx]]


def test_examples_may_be_a_function_of_the_epoch(deployer: Deployer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("raysgd.functions.tasks.loads", keep_lists(calls))
    trainer = make_trainer(deployer, loss_fn=id_loss)
    result = trainer.fit(partial(examples_of, calls=calls), 4, 2)
    assert calls == [0, 1]  # once for each epoch
    assert [each["train_loss"] for each in result.history] == pytest.approx([4.5, 103.0])  # each example once
    assert result.num_steps == 3 + 2
    more = trainer.fit(partial(examples_of, calls=calls), 4, 1)
    assert calls == [0, 1, 2] and more.metrics["train_loss"] == pytest.approx(201.5)


def keep_lists(calls: list[int]) -> Callable[[bytes], Any]:
    """Unpickle as a worker does, but make its calls visible."""
    from raysgd.workers.pickling import loads

    def load(data: bytes) -> Any:
        found = loads(data)
        if isinstance(found, dict) and isinstance(found.get("train_examples"), partial):
            found["train_examples"] = partial(examples_of, calls=calls)
        return found

    return load


def failing_collate(examples: list[dict[str, Any]], at: int) -> dict[str, Any]:
    if any(each["id"] == at for each in examples):
        raise FloatingPointError("a mistake of the user")
    return collate_fn(examples)


def test_fit_resumes_within_an_epoch_of_examples_by_epoch(deployer: Deployer) -> None:
    by_epoch = partial(examples_of, calls=[])
    expected = make_trainer(deployer).fit(by_epoch, 2, 2)
    broken = make_trainer(deployer, collate_fn=partial(failing_collate, at=104))
    with pytest.raises(FloatingPointError):
        broken.fit(by_epoch, 2, 2, save_every_n_steps=1)
    saved = deployer.find_checkpoint("last", None).checkpoint
    assert saved is not None and saved.load()["progress"]["train_position"]["epoch"] == 1
    result = make_trainer(deployer).fit(by_epoch, 2, 2, resume_from="last")
    assert (result.num_steps, len(result.history)) == (5 + 4, 2)
    assert result.history == expected.history
    check_equal(result.params, expected.params)
    with pytest.raises(CheckpointError, match="train_examples is not a function, and was one when"):
        make_trainer(deployer).fit(EXAMPLES, 2, 2, resume_from=saved)


def test_fit_resumes_after_each_step_and_epoch(deployer: Deployer) -> None:
    """Also after the last step of an epoch, whose evaluation and checkpoint then follow."""
    by_epoch: Any = partial(examples_of, calls=[])
    options: dict[str, Any] = {"eval_examples": EXAMPLES[:3], "save_every_n_steps": 1, "save_last_ckpt": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalRuns, "delete_checkpoint", lambda *_: None)
        expected = make_trainer(deployer).fit(by_epoch, 4, 2, **options)
        saved = deployer.runs.trainer.list_checkpoints()
    assert [each.load()["progress"]["position"]["steps"] for each in saved] == [1, 2, 3, 3, 4, 5, 5]
    for each in saved:
        result = make_trainer(deployer).fit(by_epoch, 4, 2, resume_from=each, **options)
        assert (result.history, result.num_steps) == (expected.history, expected.num_steps)
        check_equal(result.params, expected.params)


def noisy_collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = collate_fn(examples)
    return {**batch, "x": batch["x"] + np.float32(np.random.normal() + random.random())}


def test_collate_fn_draws_the_numbers_of_its_batch_whatever_was_drawn_before(deployer: Deployer) -> None:
    histories = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        histories.append(make_trainer(deployer, collate_fn=noisy_collate).fit(EXAMPLES, 4, 2).history)
    first, second = ([each["train_loss"] for each in history] for history in histories)
    assert first == second


def test_function_of_the_epoch_that_returns_no_examples_is_refused(deployer: Deployer) -> None:
    with pytest.raises(ConfigError, match=r"train_examples\(epoch_idx=0\) is a dict; give a list"):
        make_trainer(deployer).fit(lambda epoch_idx: {}, 2, 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"train_examples\(epoch_idx=0\) is empty"):
        make_trainer(deployer).fit(lambda epoch: [], 2, 1)


# ------------------------------------------------------------------------------------------------------- own steps


def own_step(rng: Any, state: Any, batch: Any, loss_fn: Any, lr_schedule_fn: Any, mesh: Any, compute_dtype: Any) -> Any:
    loss, grads = jax.value_and_grad(
        lambda params: loss_fn(rng=rng, state=state, params=params, batch=batch, is_training=True)
    )(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "first": loss_fn(rng, state, state.params, batch, True)}


def test_own_step_replaces_loss_gradient_and_update(deployer: Deployer) -> None:
    expected = make_trainer(deployer).fit(EXAMPLES, 4, 2)
    result = make_trainer(deployer, train_step_fn=own_step).fit(EXAMPLES, 4, 2, save_last_ckpt=True)
    assert [each["train_loss"] for each in result.history] == pytest.approx(
        [each["train_loss"] for each in expected.history], rel=1e-5
    )
    check_equal(result.params, expected.params)
    assert int(result.checkpoints["last"].load()["train_state"]["step"]) == result.num_steps == 6


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda rng, state, **_: state, "train_step_fn returned a StepState, not a pair. Return"),
        (lambda rng, state, **_: (state.params, {"loss": 1.0}), "returned a dict as the state"),
        (lambda rng, state, **_: (state, {"lr": 1.0}), r"returned \['lr'\] as the metrics, without a 'loss'"),
        (lambda rng, state, **_: (state, {"loss": state.params["up"]["kernel"]}), r"'loss' of shape \(3, 4\)"),
        (lambda rng, state, **_: (state.replace(params={}), {"loss": 1.0}), "whose params have other shapes"),
    ],
)
def test_own_step_that_returns_something_else_is_refused(deployer: Deployer, step: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(deployer, train_step_fn=step).fit(EXAMPLES, 4, 1)
    with pytest.raises(ConfigError, match="accumulate_grad_batches and train_step_fn exclude"):
        make_trainer(deployer, train_step_fn=step, accumulate_grad_batches=2)


def test_update_takes_the_rows_of_all_batches_that_it_accumulates(deployer: Deployer) -> None:
    whole = make_trainer(deployer).fit(EXAMPLES, 10, 2)
    given = {"accumulate_grad_batches": 2}
    parts = make_trainer(deployer, **given).fit(EXAMPLES, 5, 2)
    multi = make_trainer(deployer, optimizer=optax.MultiSteps(optax.adam(0.05), 2), **given).fit(EXAMPLES, 5, 2)
    assert (whole.num_steps, parts.num_steps, multi.num_steps) == (2, 2, 4)
    check_near(parts.params, whole.params)
    check_near(multi.params, whole.params)


def loss_of_rows(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    noise = jax.random.normal(rng, batch["id"].shape) if is_training else 0.0
    return (outputs_of(params, batch) - batch["x"].sum(axis=1) + noise) ** 2


def weighted_loss_of_rows(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    weight = batch["id"] + 1
    return loss_of_rows(rng, state, params, batch, is_training) * weight, weight


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("of_rows", [loss_of_rows, weighted_loss_of_rows])
def test_last_batch_is_padded_where_the_loss_is_one_of_rows_and_gives_the_same_numbers(
    deployer: Deployer, of_rows: Any, accumulate: int
) -> None:
    def of_batch(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        found = of_rows(rng, state, params, batch, is_training)
        return found.mean() if of_rows is loss_of_rows else tuple(each.sum() for each in found)

    padded, compiled = (
        make_trainer(deployer, loss_fn=loss_fn, accumulate_grad_batches=accumulate).fit(
            EXAMPLES, 4 // accumulate, 3, EXAMPLES[:7], eval_per_device_batch_size=4
        )
        for loss_fn in (of_rows, of_batch)
    )
    assert padded.num_compilations == {"train": 1, "eval_loss": 1, "predict": 0}
    assert compiled.num_compilations == {"train": 2, "eval_loss": 2, "predict": 0}
    check_near(padded.params, compiled.params)
    check_near(padded.history, compiled.history)


def test_only_batch_of_an_epoch_is_compiled_at_its_own_size(deployer: Deployer) -> None:
    fitted = make_trainer(deployer, loss_fn=loss_of_rows).fit(EXAMPLES[:3], 4, 2)
    assert (fitted.num_steps, fitted.num_compilations["train"]) == (2, 1)


def test_steps_for_which_the_device_compiles_are_reported(deployer: Deployer, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[dict[str, Any]] = []
    monkeypatch.setattr(api, "report", reports.append)
    make_trainer(deployer, optimizer=optax.adam(0.06)).fit(EXAMPLES, 4, 2)  # no other test compiles it
    found = {each["step"]: each["compilations"] for each in reports if "compilations" in each}
    assert found == {1: 1, 3: 2}  # a full batch, and the last one of an epoch


class Number:
    """Stands for a scalar on a device: notes when it is read."""

    def __init__(self, name: str, value: Any, events: list[str]) -> None:
        self._name, self._value, self._events = name, value, events

    def __float__(self) -> float:
        self._events.append(f"read {self._name}")
        return float(self._value)


def test_no_step_waits_for_its_own_metrics(deployer: Deployer, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    train = Steps.train

    def recorded(self: Steps, *args: Any) -> Any:
        state, metrics = train(self, *args)
        number = sum(each.startswith("step") for each in events) + 1
        events.append(f"step {number}")
        return state, {name: Number(f"{name} of {number}", value, events) for name, value in metrics.items()}

    monkeypatch.setattr(Steps, "train", recorded)
    monkeypatch.setattr(api, "report", lambda metrics: None)
    make_trainer(deployer).fit(EXAMPLES, 4, 1)
    losses = [each for each in events if each.startswith(("step", "read loss"))]
    assert losses == ["step 1", "step 2", "read loss of 1", "step 3", "read loss of 2", "read loss of 3"]


def check_near(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, other)


def test_schedule_inside_multi_steps_continues_without_a_saved_optimizer(deployer: Deployer) -> None:
    optimizer = optax.MultiSteps(optax.sgd(optax.linear_schedule(0.1, 0.0, 8)), 2)
    settings = {"save_opt_states": False, "save_last_ckpt": True}
    first = make_trainer(deployer, optimizer=optimizer, accumulate_grad_batches=2).fit(EXAMPLES, 5, 2, **settings)
    saved = first.checkpoints["last"]
    resumed = make_trainer(deployer, optimizer=optimizer, accumulate_grad_batches=2)
    resumed.fit(EXAMPLES, 5, 3, save_last_ckpt=True, resume_from=saved)
    counts = [leaf for leaf in jax.tree.leaves(resumed.state.opt_state.inner_opt_state) if leaf.dtype == np.int32]
    assert counts == [3]  # of 6 steps
    with pytest.raises(ConfigError, match=r"give Trainer\(accumulate_grad_batches=k\) with the k of MultiSteps"):
        make_trainer(deployer, optimizer=optimizer).fit(EXAMPLES, 5, 3, resume_from=saved)


def test_training_continues_from_a_state_that_the_script_sets(deployer: Deployer) -> None:
    trainer = make_trainer(deployer, optimizer=optax.adam(0.0))
    assert (trainer.step, trainer.state.opt_state) == (0, None)
    trainer.set_train_state(None, optax.adam(0.05), 0, PARAMS)
    result = trainer.fit(EXAMPLES, 4, 1)
    other = make_trainer(deployer)
    check_equal(result.params, other.fit(EXAMPLES, 4, 1).params)
    state = trainer.state
    assert trainer.step == state.step == 3 and int(state.opt_state[0].count) == 3
    trainer.set_train_state(None, state.tx, state.step, state.params, state.opt_state)
    check_equal(trainer.fit(EXAMPLES, 4, 1).params, other.fit(EXAMPLES, 4, 1).params)
    assert trainer.step == 6


def test_narrow_parameters_are_computed_with_in_float32(deployer: Deployer) -> None:
    def sizes(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        return params["up"]["kernel"].dtype.itemsize + 0 * loss_fn(rng, state, params, batch, is_training)

    narrow = jax.tree.map(lambda leaf: leaf.astype(jax.numpy.bfloat16), PARAMS)
    assert make_trainer(deployer, params=narrow, loss_fn=sizes).fit(EXAMPLES, 4, 1).metrics["train_loss"] == 4
    assert make_trainer(deployer, params=narrow).fit(EXAMPLES, 4, 1).params["up"]["kernel"].dtype == jax.numpy.bfloat16


def test_loss_gets_parameters_of_the_type_to_compute_with(deployer: Deployer) -> None:
    def half_loss(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        types = {leaf.dtype for leaf in jax.tree.leaves(params)}
        assert types == {jax.numpy.dtype("bfloat16")}
        return loss_fn(rng, state, params, batch, is_training)

    whole = make_trainer(deployer).fit(EXAMPLES, 4, 1)
    half = make_trainer(deployer, loss_fn=half_loss, compute_dtype=jax.numpy.bfloat16).fit(EXAMPLES, 4, 1)
    assert half.metrics["train_loss"] == pytest.approx(whole.metrics["train_loss"], rel=0.02)
    assert half.metrics["train_loss"] != whole.metrics["train_loss"]
    assert half.params["up"]["kernel"].dtype == np.float32
    with pytest.raises(ConfigError, match="compute_dtype='int8' is not a type of floats: give one of float32"):
        make_trainer(deployer, compute_dtype="int8")


def test_functions_are_called_by_the_names_of_their_parameters() -> None:
    def reordered(model: str, batch: Any, params: Any, train_rng: Any) -> tuple[Any, ...]:
        return model, batch, params, train_rng

    values = {"rng": 1, "params": 2, "batch": 3}
    assert call_by_name(partial(reordered, model="m"), **values) == ("m", 3, 2, 1)
    assert call_by_name(lambda a, b, c: (a, b, c), **values) == (1, 2, 3)
    assert call_by_name(lambda *all_of_them: all_of_them, **values) == (1, 2, 3)
    assert call_by_name(max, **values) == 3


# ------------------------------------------------------------------------------------------------------- evaluation


def pred_fn(pred_rng: Any, params: Any, batch: Any) -> dict[str, Any]:
    out = outputs_of(params, batch)
    return {"out": out, "wide": jax.numpy.repeat(out[:, None], 1001, axis=1), "half": out.astype("bfloat16")}


def metrics_of(examples: list[Any], preds: list[Any]) -> dict[str, Any]:
    return {"ids": [each["id"] for each in examples], "last": float(preds[-1]["out"]), "num": len(preds)}


def test_evaluation_is_that_of_each_example_once(deployer: Deployer, tmp_path: Path) -> None:
    plain = make_trainer(deployer).fit(EXAMPLES, 4, 2)
    trainer = make_trainer(deployer)
    predictor = Predictor(deployer, collate_fn, pred_fn)
    examples = [{**each, "tags": ["a", (each["id"], None)]} for each in EXAMPLES[:7]]
    result = trainer.fit(EXAMPLES, 4, 2, examples, 3, eval_predictor=predictor, eval_metric_fn=metrics_of)
    check_equal(result.params, plain.params)
    batch = collate_fn(EXAMPLES[:7])
    out = np.asarray(outputs_of(result.params, batch))
    newest = result.history[-1]
    assert newest["eval_loss"] == pytest.approx(float(((out - batch["x"].sum(axis=1)) ** 2).mean()), rel=1e-5)
    assert (newest["eval_ids"], newest["eval_num"]) == (list(range(7)), 7)
    assert newest["eval_last"] == pytest.approx(float(out[-1]), rel=1e-5)
    folder = Path(deployer.evaluations_folder)
    assert sorted(each.name for each in folder.iterdir()) == ["epoch_0", "epoch_1"]
    assert json.loads((folder / "epoch_1" / "results.json").read_text())["num"] == 7
    written = json.loads((folder / "epoch_1" / "outputs.json").read_text())
    assert [each["example"]["id"] for each in written] == list(range(7))
    assert [each["pred"]["out"] for each in written] == pytest.approx(out.tolist(), rel=1e-5)
    assert [each["pred"]["half"] for each in written] == pytest.approx(out.tolist(), rel=1e-2)
    assert written[0]["pred"]["wide"] == "array of shape (1001,) and dtype float32"
    assert [each["example"]["tags"] for each in written] == [["a", [number, None]] for number in range(7)]
    assert written[0]["example"]["x"] == pytest.approx(EXAMPLES[0]["x"].tolist())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"eval_metric_fn": lambda examples, preds: {"loss": 1.0}},
            "a metric 'loss', which eval_loss=True gives already",
        ),
        ({"output_fn": lambda rows: "text"}, "output_fn returned a str; return a list"),
        ({"output_fn": lambda rows: 5}, "output_fn returned an int; return a list"),
        ({"output_fn": lambda rows: [0]}, "output_fn returned 1 outputs for 3 rows"),
        ({"pred_fn": lambda rng, params, batch: batch["x"].sum()}, r"array of shape \(\) for a batch of 3 rows"),
        ({"pred_fn": lambda rng, params, batch: batch["x"][:2]}, r"array of shape \(2, 3\) for a batch of 3 rows"),
    ],
)
def test_wrong_evaluation_is_refused_before_the_first_step(
    deployer: Deployer, settings: dict[str, Any], message: str
) -> None:
    given = {"pred_fn": pred_fn, "output_fn": None, **settings}
    metric_fn = given.pop("eval_metric_fn", metrics_of)
    predictor, trainer = Predictor(deployer, collate_fn, **given), make_trainer(deployer)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(EXAMPLES, 4, 1, EXAMPLES[:7], 3, eval_predictor=predictor, eval_metric_fn=metric_fn)
    assert deployer.find_checkpoint("last", None).checkpoint is None
    if "eval_metric_fn" in settings:
        found = trainer.fit(EXAMPLES, 4, 1, EXAMPLES[:7], 3, False, predictor, metric_fn)
        assert found.history[-1]["eval_loss"] == 1.0


@pytest.mark.parametrize(("shards", "rows"), [(1, 60), (2, 30), (4, 15)])
def test_each_replica_takes_the_rows_of_a_device(shards: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    settings: Any = SimpleNamespace(n_model_shards=shards)
    assert rows_on_all_devices(3, settings, 5) == rows


# --------------------------------------------------------------------------------------- loops and checkpoints of a user


def test_own_loop_trains_and_evaluates_as_fit_does(deployer: Deployer) -> None:
    whole = make_trainer(deployer).fit(EXAMPLES, 4, 2, eval_examples=EXAMPLES[:7])
    trainer = make_trainer(deployer)
    losses = []
    for _ in range(2):
        trainer.train(EXAMPLES, per_device_batch_size=4)
        losses.append(trainer.eval_loss(examples=EXAMPLES[:7], per_device_batch_size=4))
    assert losses == pytest.approx([each["eval_loss"] for each in whole.history], rel=1e-6)
    check_equal(trainer.params, whole.params)
    with pytest.raises(ConfigError, match="examples is empty"):
        trainer.eval_loss([], 4)


@pytest.mark.parametrize(("k", "kept"), [(2, ["epoch_1", "epoch_3", "last"]), (3, ["epoch_2", "last"])])
def test_checkpoint_of_every_kth_epoch_is_kept(deployer: Deployer, k: int, kept: list[str]) -> None:
    result = make_trainer(deployer).fit(EXAMPLES, 4, 5, save_ckpt_every_k_epochs=k, save_every_n_steps=1)
    assert sorted(result.checkpoints) == kept
    saved = deployer.runs.trainer.list_checkpoints()
    assert sorted(str(each.path) for each in saved) == sorted(str(each.path) for each in result.checkpoints.values())
    assert result.checkpoints["last"].metrics["epoch"] == 4
    with pytest.raises(ConfigError, match="save_ckpt_every_k_epochs=0"):
        make_trainer(deployer).fit(EXAMPLES, 4, 1, save_ckpt_every_k_epochs=0)


def test_checkpoint_has_the_optimizer_and_the_types_that_were_asked_for(deployer: Deployer) -> None:
    def saved(**settings: Any) -> Any:
        result = make_trainer(deployer).fit(EXAMPLES, 4, 1, save_last_ckpt=True, **settings)
        return result.checkpoints["last"].load()["train_state"]

    whole, small = saved(), saved(save_opt_states=False, save_float_dtype="bfloat16")
    assert whole.keys() - small.keys() == {"opt_state"} and int(small["step"]) == 3
    assert (whole["params"]["up"]["kernel"].dtype, small["params"]["up"]["kernel"].dtype) == ("float32", "bfloat16")


@pytest.mark.parametrize(("saved", "like"), [("float32", "int32"), ("int32", "float32")])
def test_numbers_of_another_kind_are_not_converted(saved: str, like: str) -> None:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted, short = ({"a": jax.ShapeDtypeStruct((2,), each, sharding=place)} for each in (like, "bfloat16"))
    with pytest.raises(CheckpointError, match=f"saved as {saved} of shape .* has {like}"):
        restore_arrays({"a": np.ones(2, saved)}, wanted)
    assert restore_arrays({"a": np.full(2, 1.5, np.float32)}, short)["a"].tolist() == [1.5, 1.5]


def test_training_continues_from_a_loaded_checkpoint(deployer: Deployer) -> None:
    optimizer = optax.adam(0.05)
    assert deployer.load_last_ckpt() == (None, None)
    expected = make_trainer(deployer).fit(EXAMPLES, 4, 3)
    make_trainer(deployer).fit(EXAMPLES, 4, 2, save_last_ckpt=True)
    ckpt, info = deployer.load_last_ckpt(optimizer=optimizer)
    assert ckpt is not None and info is not None
    assert (info["step"], info["epoch_idx"]) == (6, 1)
    assert type(ckpt["opt_state"]) is type(optimizer.init(PARAMS))
    trainer = make_trainer(deployer, params=ckpt["params"], opt_state=ckpt["opt_state"], last_ckpt_info=info)
    result = trainer.fit(EXAMPLES, 4, 3)  # epochs in all
    assert [each["epoch"] for each in result.history] == [2] and result.num_steps == 9
    check_equal(result.params, expected.params)
    assert trainer.fit(EXAMPLES, 4, 1).history[-1]["epoch"] == 3
    with pytest.raises(ConfigError, match="last_ckpt_info has step='a'; give a whole number"):
        make_trainer(deployer, last_ckpt_info={"step": "a"})
    with pytest.raises(ConfigError, match="last_ckpt_info is a tuple"):
        make_trainer(deployer, last_ckpt_info=(ckpt, info))


def test_saved_parameters_are_loaded_and_predicted_with(deployer: Deployer, tmp_path: Path) -> None:
    optimizer = optax.adam(0.1)
    folder = tmp_path / "own"
    deployer.save_ckpt(folder, {"up": {"kernel": np.zeros((3, 4))}}, step=0)
    saved = deployer.save_ckpt(
        ckpt_dir=str(folder), params=PARAMS, opt_state=optimizer.init(PARAMS), float_dtype="bfloat16", step=7, note="a"
    )
    assert len([*folder.iterdir()]) == 1  # in place of the first
    ckpt, info = deployer.load_ckpt(str(folder), optimizer=optimizer, float_dtype=np.float32)
    assert info == {"step": 7, "note": "a"}
    check_equal(ckpt["params"], PARAMS)
    assert ckpt["opt_state"][0].count.dtype == np.int32
    assert deployer.load_ckpt(saved, load_params=False)[0] == {"params": None, "opt_state": None}
    shapes = deployer.load_params_shape(folder)
    assert (shapes["up"]["kernel"].shape, shapes["up"]["kernel"].dtype.name) == ((3, 4), "bfloat16")
    assert [*deployer.get_sharding_rules(params_shape_or_params=shapes)]
    predictor = Predictor(deployer, collate_fn, lambda pred_rng, params, batch: outputs_of(params, batch))
    rows = predictor.predict(EXAMPLES, params=saved, per_device_batch_size=4)
    np.testing.assert_allclose(np.array(rows, np.float32), outputs_of(PARAMS, collate_fn(EXAMPLES)), rtol=0.02)
    with pytest.raises(CheckpointNotFoundError):
        deployer.load_ckpt(tmp_path / "nothing")
    with pytest.raises(UnknownArgumentError, match="no argument 'batch_size': use per_device_batch_size="):
        predictor.predict(EXAMPLES, params=saved, batch_size=4)  # type: ignore[call-arg]
