"""Trainings without a cause of slowness, by all doors and backends, for benchmarks/why.py. Imported in workers.

Each step computes for about `STEP_S` with one thread, so that two workers have the two processors that they need.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import raysgd

#: What a step computes, in seconds, and the number of steps.
STEP_S, STEPS = 0.06, 60
ROWS = 16
WIDTH = 64


@dataclass(frozen=True)
class Healthy:
    """A training that has nothing to be named.

    Attributes:
        backend: The backend of the Trainer.
        train: The train_func.
        num_workers: The number of workers.
        uses_data: The run gets `data`, which raysgd divides.
    """

    backend: str
    train: Callable[[dict[str, Any]], None]
    num_workers: int = 2
    uses_data: bool = False


def data(num_workers: int = 2) -> dict[str, Any]:
    drawn = np.random.default_rng(0)
    return {"x": drawn.normal(size=(num_workers * ROWS * STEPS, WIDTH)).astype(np.float32)}


def compute() -> None:
    """Use the processor, as the forward and backward pass of a larger model does."""
    values = np.ones((64, 64), np.float32)
    end_s = time.thread_time() + STEP_S
    while time.thread_time() < end_s:
        values @ values


def make_model() -> Any:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))


def _loader() -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows = torch.from_numpy(data(raysgd.world_size())["x"])
    return raysgd.torch.prepare_data_loader(DataLoader(TensorDataset(rows), batch_size=ROWS))


def _batches(config: dict[str, Any]) -> Iterator[Any]:
    if config["uses_data"]:
        for batch in raysgd.get_dataset().get_split().to_torch(batch_size=ROWS):
            yield batch["x"]
    else:
        for (batch,) in _loader():
            yield batch


def _steps(
    config: dict[str, Any], model: Any, optimizer: Any, backward: Callable[[Any], None]
) -> Iterator[tuple[int, Any]]:
    """Make steps with torch; yield the number and the batch of each."""
    for step, x in enumerate(_batches(config)):
        compute()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        raysgd.report(step=step, loss=loss)
        yield step, x


def _train(config: dict[str, Any], model: Any, optimizer: Any = None) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters()) if optimizer is None else optimizer
    for _ in _steps(config, model, optimizer, torch.Tensor.backward):
        pass


def train_ddp(config: dict[str, Any]) -> None:
    """DDP, with an evaluation and a checkpoint every 20 steps."""
    import torch

    model = raysgd.torch.prepare_model(make_model())
    optimizer = torch.optim.AdamW(model.parameters())
    for step, x in _steps(config, model, optimizer, torch.Tensor.backward):
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            raysgd.save_checkpoint({"model": model, "optimizer": optimizer})


def train_fsdp(config: dict[str, Any]) -> None:
    """torch's fully_shard."""
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    _train(config, model)


def train_engine(config: dict[str, Any]) -> None:
    """The engine with ZeRO 2."""
    import torch

    engine, model = raysgd.Engine(zero_stage=2), make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, _, _, _ = engine.compose(model=model, optimizer=optimizer)
    for _ in _steps(config, model, optimizer, engine.backward):
        pass


def train_accelerated(config: dict[str, Any]) -> None:
    """`raysgd.accelerate` in a loop of one's own."""
    import torch

    model = make_model()
    model, optimizer = raysgd.accelerate(model, torch.nn.MSELoss(), optimizer=torch.optim.AdamW(model.parameters()))
    _train(config, model, optimizer)


def train_jax(config: dict[str, Any]) -> None:
    """A jitted step of JAX over the devices of all workers."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    by_rows = NamedSharding(raysgd.jax.mesh(), PartitionSpec("data"))
    step_of = jax.jit(lambda weights, x: weights - 1e-3 * jax.grad(lambda w: jnp.square(x @ w).mean())(weights))
    weights = np.ones((WIDTH, 1), np.float32)
    rows = ROWS * raysgd.world_size()
    split = raysgd.get_dataset().get_split()
    for step, batch in enumerate(split.to_jax(global_batch_size=rows, drop_last=True, device=by_rows)):
        compute()
        weights = step_of(weights, batch["x"])
        raysgd.report(step=step)


def train_tensorflow(config: dict[str, Any]) -> None:
    """A loop under MultiWorkerMirroredStrategy."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((WIDTH,)), tf.keras.layers.Dense(1)])
        optimizer = tf.keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)

    def train_replica(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(x: Any) -> Any:
        return strategy.reduce("sum", strategy.run(train_replica, (x,)), axis=None)

    rows = ROWS * raysgd.world_size()
    split = raysgd.get_dataset().get_split()
    for step, batch in enumerate(split.to_tf(global_batch_size=rows, drop_last=True)):
        compute()
        loss = train_step(batch["x"])
        raysgd.report(step=step, loss=loss)


def train_env(config: dict[str, Any]) -> None:
    """A process group and DDP of one's own, as with torchrun."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    _train(config, torch.nn.parallel.DistributedDataParallel(make_model()))
    dist.destroy_process_group()


def train_alone(config: dict[str, Any]) -> None:
    """No group at all: each worker computes by itself."""
    for step in range(STEPS):
        compute()
        raysgd.report(step=step)


HEALTHY: dict[str, Healthy] = {
    "DDP, dataset": Healthy("torch", train_ddp, uses_data=True),
    "DDP, DataLoader": Healthy("torch", train_ddp),
    "one worker": Healthy("torch", train_ddp, num_workers=1),
    "FSDP2": Healthy("torch", train_fsdp),
    "engine, ZeRO 2": Healthy("torch", train_engine),
    "accelerate": Healthy("torch", train_accelerated, uses_data=True),
    "JAX": Healthy("jax", train_jax, uses_data=True),
    "TensorFlow": Healthy("tensorflow", train_tensorflow, uses_data=True),
    "env": Healthy("env", train_env),
    "none": Healthy("none", train_alone),
}

# -- doors that are commands, or have a driver's API of their own --------------------------------------------------------

#: They start cold, so they make more steps: starting is a cause of its own in a short run.
COLD_STEPS = 450

_SCRIPT = f"""
import torch
import raysgd
from bench.why_healthy import compute, make_model, ROWS, WIDTH

model = raysgd.torch.prepare_model(make_model())
optimizer = torch.optim.AdamW(model.parameters())
for step in range({COLD_STEPS}):
    compute()
    loss = model(torch.ones(ROWS, WIDTH)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    raysgd.report(step=step, loss=loss)
"""


def run_script(folder: Path) -> Path:
    """Run a script by ``raysgd run``; return the run's folder."""
    (folder / "script.py").write_text(_SCRIPT, encoding="utf-8")
    _run_command(folder, ["run", "--num-workers", "2", "--storage-path", "runs", "script.py"])
    return _newest_run(folder / "runs")


_FILE = f"""
compute_config: {{runtime_ngpus: 2}}
micro_batch_size: {ROWS}
global_batch_size: {2 * ROWS}
max_epochs: 1
model: {{type: bench.why_healthy_parts.Network}}
optimizer: {{type: torch.optim.AdamW}}
dataset:
  type: bench.why_healthy_parts.Rows
  train_args: {{size: {2 * ROWS * COLD_STEPS}}}
  val_args: {{size: {2 * ROWS}}}
checkpoint: {{save_dir: trained}}
"""


def run_file(folder: Path) -> Path:
    """Train by a file with ``raysgd train``; return the run's folder."""
    (folder / "job.yaml").write_text(_FILE, encoding="utf-8")
    _run_command(folder, ["train", "-f", "job.yaml"])
    return _newest_run(folder)


def run_functions(folder: Path) -> Path:
    """Train JAX functions by `raysgd.functions`; return the run's folder."""
    code = f"""
import numpy as np, optax
import raysgd.functions
from bench import why_healthy

rows = why_healthy.data()["x"]
with raysgd.functions.Deployer(jax_seed=0, workdir="runs", num_workers=1, devices_per_worker=1) as deployer:
    trainer = raysgd.functions.Trainer(
        deployer=deployer, collate_fn=why_healthy.collate_rows, loss_fn=why_healthy.loss_of_rows,
        params={{"w": np.ones(({WIDTH}, 1), np.float32)}}, optimizer=optax.adam(0.01))
    trainer.fit(train_examples=list(rows), per_device_batch_size={ROWS}, n_epochs={COLD_STEPS // (2 * STEPS)})
"""
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    return _newest_run(folder / "runs")


def collate_rows(examples: list[Any]) -> dict[str, Any]:
    return {"x": np.stack(examples)}


def loss_of_rows(params: Any, batch: Any) -> Any:
    import jax
    import jax.numpy as jnp

    mixing = jnp.full((1024, 1024), 1e-3)  # some 50 ms on one processor
    hidden = jnp.pad(batch["x"] @ params["w"], ((0, 0), (0, 1023)))
    hidden, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ mixing), None), hidden, length=20)
    return jnp.square(hidden).mean()


def _run_command(folder: Path, arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "raysgd.cli", *arguments], cwd=folder, check=True, capture_output=True)


def _newest_run(folder: Path) -> Path:
    return max(folder.rglob("run.json"), key=lambda path: path.stat().st_mtime).parent


COMMANDS: dict[str, Callable[[Path], Path]] = {
    "raysgd run": run_script,
    "raysgd train": run_file,
    "functions": run_functions,
}
