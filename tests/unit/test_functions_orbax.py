"""Checkpoints of orbax, and arrays of safetensors files, in `raysgd.functions`, in this process in place of workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.errors import CheckpointError, CheckpointNotFoundError
from raysgd.functions import Deployer, Predictor, Trainer
from raysgd.functions.stored_arrays import StoredArray, open_safetensors

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
nnx = pytest.importorskip("flax.nnx")
ocp = pytest.importorskip("orbax.checkpoint")
safetensors_numpy = pytest.importorskip("safetensors.numpy")
pytestmark = pytest.mark.jax

from support.functions_local import LocalRuns  # noqa: E402
from support.jax_devices import cpu_devices  # noqa: E402

RANDOM = np.random.default_rng(0)
PARAMS = {
    "up": {"kernel": RANDOM.normal(size=(8, 16)).astype(np.float32), "bias": np.zeros(16, np.float32)},
    "layers": [{"kernel": RANDOM.normal(size=(16, 16)).astype(np.float32)} for _ in range(2)],
}
EXAMPLES = [{"x": RANDOM.normal(size=8).astype(np.float32)} for _ in range(12)]
OPTIMIZER = optax.adamw(1e-2)


@pytest.fixture(scope="module", autouse=True)
def four_devices() -> Iterator[None]:
    with cpu_devices(4):
        yield


@pytest.fixture
def deployer(tmp_path: Path) -> Deployer:
    deployer = Deployer(3, n_model_shards=2, workdir=tmp_path / "work", verbose=False, devices_per_worker=4)
    deployer.runs = LocalRuns(tmp_path / "work")  # type: ignore[assignment]
    return deployer


def collate_fn(examples: list[dict[str, Any]]) -> dict[str, Any]:
    x = np.stack([each["x"] for each in examples])
    return {"x": x, "y": x.sum(axis=1)}


def outputs_of(params: Any, x: Any) -> Any:
    x = jax.numpy.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    for layer in params["layers"]:
        x = jax.numpy.tanh(x @ layer["kernel"])
    return x.sum(axis=1)


def loss_fn(params: Any, batch: Any) -> Any:
    return ((outputs_of(params, batch["x"]) - batch["y"]) ** 2).mean()


def pred_fn(params: Any, batch: Any) -> Any:
    return outputs_of(params, batch["x"])


def make_trainer(deployer: Deployer, params: Any = PARAMS, **settings: Any) -> Trainer:
    return Trainer(deployer, collate_fn, loss_fn=loss_fn, params=params, optimizer=OPTIMIZER, **settings)


def write(folder: Path, how: str, tree: Any) -> None:
    if how == "manager":
        with ocp.CheckpointManager(folder) as manager:
            for step in (3, 12):
                changed = jax.tree.map(lambda leaf, step=step: leaf if step == 12 else 0 * leaf, tree)
                manager.save(step, args=ocp.args.StandardSave(changed))
    elif how == "items":
        with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(step_prefix="model")) as manager:
            items = {"state": ocp.args.StandardSave(tree), "extra": ocp.args.JsonSave({"tokens": 7})}
            manager.save(12, args=ocp.args.Composite(**items))
    elif how == "files":
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(folder, tree)
    elif how == "zarr3":
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)).save(folder, tree)
    elif how == "redco":
        for name in ("params", "opt_state"):
            ocp.PyTreeCheckpointer().save(folder / name, tree[name])
        (folder / "info.json").write_text(json.dumps({"step": 12, "epoch_idx": 1, "rng": [0, 5]}))
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, tree)


@pytest.mark.parametrize("how", ["standard", "manager", "items", "files", "zarr3", "redco"])
def test_checkpoint_that_orbax_wrote_is_loaded(deployer: Deployer, tmp_path: Path, how: str) -> None:
    gradients = jax.tree.map(np.ones_like, PARAMS)
    _, opt_state = OPTIMIZER.update(gradients, OPTIMIZER.init(PARAMS), PARAMS)
    write(tmp_path / "orbax", how, {"params": PARAMS, "opt_state": opt_state, "step": np.int32(12)})
    found, info = deployer.load_ckpt(tmp_path / "orbax", optimizer=OPTIMIZER, like=PARAMS)
    assert info["step"] == 12 and info.get("tokens") == (7 if how == "items" else None)
    assert all(isinstance(leaf, StoredArray) for leaf in jax.tree.leaves(found["params"]))
    jax.tree.map(np.testing.assert_array_equal, found, {"params": PARAMS, "opt_state": opt_state})
    expected = make_trainer(deployer, opt_state=opt_state).eval_loss(EXAMPLES, 2)
    assert make_trainer(deployer, found["params"], opt_state=found["opt_state"]).eval_loss(EXAMPLES, 2) == expected


def test_training_continues_from_a_checkpoint_of_orbax(deployer: Deployer, tmp_path: Path) -> None:
    trainer = make_trainer(deployer)
    trainer.train(EXAMPLES, 6)
    state = trainer.state
    write(tmp_path / "orbax", "standard", {"params": state.params, "opt_state": state.opt_state, "step": state.step})
    expected = trainer.train(EXAMPLES, 6)
    found, info = deployer.load_ckpt(tmp_path / "orbax", optimizer=OPTIMIZER, like=PARAMS)
    other = make_trainer(deployer, **found, last_ckpt_info={**info, "epoch_idx": 0})
    more = other.fit(EXAMPLES, 6, 2)
    assert more.num_steps == expected.num_steps
    assert more.metrics["train_loss"] == pytest.approx(expected.metrics["train_loss"], rel=1e-6)
    jax.tree.map(np.testing.assert_allclose, more.params, expected.params)


def test_exported_checkpoint_is_read_by_orbax_and_loaded_again(deployer: Deployer, tmp_path: Path) -> None:
    trainer = make_trainer(deployer)
    result = trainer.fit(EXAMPLES, 6, 1, save_last_ckpt=True)
    trainer.export_ckpt(tmp_path / "orbax")
    state = trainer.state
    expected = {"params": state.params, "opt_state": state.opt_state}
    like = {**expected, "step": np.int32(0), "rng": np.zeros(2, np.uint32)}
    with ocp.StandardCheckpointer() as checkpointer:
        shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings), like)
        restored = checkpointer.restore(tmp_path / "orbax", wanted)
    assert restored["step"] == result.num_steps
    jax.tree.map(np.testing.assert_array_equal, {name: restored[name] for name in expected}, expected)
    found, info = deployer.load_ckpt(tmp_path / "orbax", optimizer=OPTIMIZER, like=PARAMS, update_rng=True)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert info["step"] == result.num_steps and info["rng"].tolist() == restored["rng"].tolist()
    trainer.export_ckpt(tmp_path / "steps" / "4" / "default", result.checkpoints["last"])
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        assert manager.latest_step() == 4
        assert manager.restore(4, args=ocp.args.StandardRestore(wanted))["step"] == result.num_steps
    with pytest.raises(CheckpointError, match="orbax exists already"):
        trainer.export_ckpt(tmp_path / "orbax")


def test_tree_of_odd_names_and_values_is_read(deployer: Deployer, tmp_path: Path) -> None:
    weights = {"linear/~/a": {"w": np.ones((4, 2), np.float32)}, "a.b": {"w": np.zeros(3, np.float32)}}
    tree = {"params": {**weights, "empty": {}}, "step": 5, "name": "a text", "none": None}
    ocp.PyTreeCheckpointer().save(tmp_path / "orbax", tree)
    found, info = deployer.load_ckpt(tmp_path / "orbax")
    jax.tree.map(np.testing.assert_array_equal, found["params"], weights)
    assert info == {"step": 5}


def test_predictor_takes_the_folder_of_orbax(deployer: Deployer, tmp_path: Path) -> None:
    write(tmp_path / "orbax", "standard", PARAMS)
    expected = Predictor(deployer, collate_fn, pred_fn).predict(EXAMPLES, 2, PARAMS)
    predictor = make_trainer(deployer, jax.tree.map(np.zeros_like, PARAMS)).get_default_predictor(pred_fn)
    assert predictor.predict(EXAMPLES, 2, tmp_path / "orbax") == expected


@pytest.mark.parametrize("is_pure", [False, True])
def test_module_of_nnx_is_loaded_with_its_statistics(deployer: Deployer, tmp_path: Path, is_pure: bool) -> None:
    def make() -> Any:
        layers = [
            nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(8, rngs=nnx.Rngs(0)),
            nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
        ]
        return nnx.Sequential(*layers)

    model = make()
    model(jax.numpy.ones((4, 8)))
    state = nnx.state(model, nnx.Not(nnx.RngState))
    write(tmp_path / "orbax", "standard", nnx.to_pure_dict(state) if is_pure else state)
    found, _ = deployer.load_ckpt(tmp_path / "orbax", like=nnx.eval_shape(make))
    model.eval()
    ones = jax.numpy.ones((4, 8))
    np.testing.assert_array_equal(found["params"](ones), model(ones))
    deployer.save_ckpt(tmp_path / "own", found["params"])
    found, _ = deployer.load_ckpt(tmp_path / "own", like=nnx.eval_shape(make))
    np.testing.assert_array_equal(found["params"](ones), model(ones))


def test_folders_that_are_no_checkpoint_are_refused(deployer: Deployer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        deployer.load_ckpt(tmp_path)
    for name in ("one", "other"):
        write(tmp_path / "two" / name, "standard", PARAMS)
    with pytest.raises(CheckpointError, match="items one, other, and none is called params: give the folder of one"):
        deployer.load_ckpt(tmp_path / "two")
    with pytest.raises(CheckpointNotFoundError, match=r"no safetensors file .*model\.safetensors"):
        open_safetensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        open_safetensors(tmp_path)


# ------------------------------------------------------------------------------------------------------- safetensors


def test_worker_reads_only_the_slices_of_its_devices(tmp_path: Path, deployer: Deployer) -> None:
    kernel = PARAMS["up"]["kernel"]
    safetensors_numpy.save_file({"weight": np.ascontiguousarray(kernel.T)}, tmp_path / "model.safetensors")
    stored = open_safetensors(tmp_path)["weight"].T
    read: list[Any] = []

    def noting(slices: Any) -> Any:
        read.append(slices)
        return stored.read_stored(slices)

    from raysgd.functions.sharding import plan_sharding
    from raysgd.functions.worker.steps import Steps, mesh_of

    tree = {"up": {"kernel": StoredArray(stored.shape, stored.dtype, noting, stored.is_transposed)}}
    plan = plan_sharding(tree, {"data": 2, "model": 2})
    placed = Steps(mesh_of(2), plan).place_params(tree)
    assert sorted((rows.start, rows.stop) for rows, _ in read) == [(0, 8), (8, 16)]  # of outputs, each once
    np.testing.assert_array_equal(placed["up"]["kernel"], kernel)


@given(st.data())
def test_slices_of_a_stored_array_are_those_of_the_array(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    stored = StoredArray(shape, array.dtype, lambda slices: array[slices])
    if data.draw(st.booleans()):
        array_t, stored = array.T, stored.T
    else:
        array_t = array
    bound = st.one_of(st.none(), st.integers(-5, 5))
    key = tuple(slice(data.draw(bound), data.draw(bound)) for _ in range(data.draw(st.integers(0, len(shape)))))
    np.testing.assert_array_equal(stored[key], array_t[key])
    np.testing.assert_array_equal(stored.astype(np.float64) * 2, array_t.astype(np.float64) * 2)
    assert stored.astype(np.float64)[key].dtype == np.float64 and (stored.ndim, stored.size) == (
        array_t.ndim,
        array_t.size,
    )
