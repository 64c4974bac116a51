"""Handwritten digits with JAX, on two workers: one mesh of the devices of both.

    python examples/backends/jax_loop.py [--workers 2] [--epochs 8]

Each worker makes its part of a batch. Jitted functions see one array, and XLA inserts the reductions.
"""

# test: tests/docs/test_backend_examples.py

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import raysgd


def make_data() -> dict[str, dict[str, np.ndarray]]:
    """1,797 scans of 8 x 8 pixels, a fifth of them for validation."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    x_train, x_val, y_train, y_val = parts

    def columns(x, y) -> dict[str, np.ndarray]:
        return {"image": x.astype(np.float32) / 16, "label": y.astype(np.int32)}

    return {"train": columns(x_train, y_train), "validation": columns(x_val, y_val)}


def make_params() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)  # the same on all workers
    return {
        "w1": random.normal(0, 0.2, (64, 256)).astype(np.float32), "b1": np.zeros(256, np.float32),
        "w2": random.normal(0, 0.1, (256, 10)).astype(np.float32), "b2": np.zeros(10, np.float32),
    }  # fmt: skip


def train_func(config: dict) -> None:
    import jax  # imported here: the driver does not need it
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    by_rows = NamedSharding(raysgd.jax.mesh(), PartitionSpec("data"))  # over the devices of all workers

    def logits_of(params: dict, batch: dict) -> jax.Array:
        return jax.nn.relu(batch["image"] @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]

    def loss_of(params: dict, batch: dict) -> jax.Array:
        of_labels = jnp.take_along_axis(jax.nn.log_softmax(logits_of(params, batch)), batch["label"][:, None], axis=1)
        return -of_labels.mean()

    @jax.jit
    def train_step(params: dict, momentum: dict, batch: dict, lr: float) -> tuple[dict, dict, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        momentum = jax.tree.map(lambda old, new: 0.9 * old + new, momentum, gradients)
        return jax.tree.map(lambda weight, step: weight - lr * step, params, momentum), momentum, loss

    @jax.jit
    def accuracy_of(params: dict, batch: dict) -> jax.Array:
        return (logits_of(params, batch).argmax(1) == batch["label"]).mean()

    start, params = 0, make_params()
    momentum = jax.tree.map(np.zeros_like, params)
    if state := raysgd.load_checkpoint():
        start, params, momentum = state["epoch"] + 1, state["params"], state["momentum"]
    train, validation = (raysgd.get_dataset(name).get_split() for name in ("train", "validation"))
    batches = train.to_jax(global_batch_size=32, shuffle="full", drop_last=True, device=by_rows)
    (whole,) = validation.to_jax(global_batch_size=360, drop_last=True, device=by_rows)
    for epoch in range(start, config["epochs"]):
        lr = config["lr"] * (1 - epoch / config["epochs"])
        losses = []
        for batch in batches:
            params, momentum, loss = train_step(params, momentum, batch, lr)
            losses.append(loss)
        raysgd.report(epoch=epoch, loss=np.mean(losses), accuracy=accuracy_of(params, whole))
        raysgd.save_checkpoint({"epoch": epoch} | jax.device_get({"params": params, "momentum": momentum}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    config = {"lr": 0.1, "epochs": args.epochs}
    with raysgd.Trainer(num_workers=args.workers, backend="jax", seed=0) as trainer:
        trainer.run(train_func, config, dataset=make_data(), reduce={"loss": "mean", "accuracy": "mean"})
        print(f"validation accuracy: {trainer.get_last_checkpoint().metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
