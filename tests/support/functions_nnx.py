"""A program that trains a module of nnx by functions on workers, and exports for orbax; ``found.json`` gets what it found.

Arguments: a folder, the number of workers, of devices of each, of model shards, and whether a worker is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from raysgd.functions import Deployer, Trainer

RANDOM = np.random.default_rng(0)
EXAMPLES = [{"id": number, "x": RANDOM.normal(size=8).astype(np.float32)} for number in range(40)]
OPTIMIZER = optax.adam(0.01)


class Network(nnx.Module):  # type: ignore[misc]
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))[:, 0]


def collate_fn(examples: list[dict[str, Any]], mark: Path | None) -> dict[str, Any]:
    if mark is not None and jax.process_index() == 1 and any(each["id"] == EXAMPLES[-1]["id"] for each in examples):
        if mark.exists() and not (killed := mark.with_name("killed")).exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        mark.touch()
    x = np.stack([each["x"] for each in examples])
    return {"x": x, "y": x.sum(axis=1)}


def loss_fn(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def pred_fn(model: Any, batch: Any) -> Any:
    return model(batch["x"])


def main() -> None:
    folder = Path(sys.argv[1])
    workers, devices, shards, is_killed = map(int, sys.argv[2:])
    collate = partial(collate_fn, mark=folder / "seen" if is_killed else None)
    with Deployer(
        3, shards, num_workers=workers, devices_per_worker=devices, workdir=folder / "work", verbose=False
    ) as deployer:
        trainer = Trainer(deployer, collate, loss_fn=loss_fn, params=Network(nnx.Rngs(0)), optimizer=OPTIMIZER)
        per_device = 8 * shards // (workers * devices)
        result = trainer.fit(EXAMPLES, per_device, 3, eval_examples=EXAMPLES[:10], save_last_ckpt=True)
        predictions = trainer.get_default_predictor(pred_fn).predict(EXAMPLES[:10], per_device)
        trainer.export_ckpt(folder / "orbax")
        with ocp.PyTreeCheckpointer() as checkpointer:
            saved = checkpointer.metadata(folder / "orbax").item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
            restored = checkpointer.restore(folder / "orbax", restore_args=as_numpy)
        mean = np.asarray(result.params.norm.mean.get_value())
        np.testing.assert_array_equal(restored["model_state"]["norm"]["mean"]["value"], mean)
        abstract = nnx.eval_shape(lambda: Network(nnx.Rngs(0)))
        loaded, info = deployer.load_ckpt(folder / "orbax", optimizer=OPTIMIZER, like=abstract)
        again = Trainer(
            deployer,
            collate,
            loss_fn=loss_fn,
            params=loaded["params"],
            optimizer=OPTIMIZER,
            opt_state=loaded["opt_state"],
        )
        eval_loss = again.eval_loss(EXAMPLES[:10], per_device)
    jax.tree.map(np.testing.assert_array_equal, loaded["opt_state"], trainer.state.opt_state)
    (folder / "found.json").write_text(
        json.dumps(
            {
                "losses": [each["train_loss"] for each in result.history],
                "eval_losses": [result.metrics["eval_loss"], eval_loss],
                "mean": mean.tolist(),
                "predictions": [float(each) for each in predictions],
                "steps": info["step"],
                "was_killed": (folder / "killed").exists(),
            }
        )
    )


if __name__ == "__main__":
    main()
