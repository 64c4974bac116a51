"""Handwritten digits with a custom loop under TensorFlow's MultiWorkerMirroredStrategy, on two workers.

    python examples/backends/tensorflow_loop.py [--workers 2] [--epochs 8]

raysgd sets ``TF_CONFIG``, from which TensorFlow knows the workers. train_func creates the strategy before any tensor.
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
        return {"image": x.astype(np.float32) / 16, "label": y}

    return {"train": columns(x_train, y_train), "validation": columns(x_val, y_val)}


def train_func(config: dict) -> None:
    import tensorflow as tf  # imported here: the driver does not need it

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential(
            [tf.keras.Input((64,)), tf.keras.layers.Dense(256, "relu"), tf.keras.layers.Dense(10)]
        )
        optimizer = tf.keras.optimizers.Adam(config["lr"])
        optimizer.build(model.trainable_variables)
    start = 0
    if state := raysgd.load_checkpoint():
        for variable, value in zip([*model.variables, *optimizer.variables], state["values"], strict=True):
            variable.assign(value)
        start = state["epoch"] + 1

    def train_replica(batch):
        with tf.GradientTape() as tape:
            logits = model(batch["image"], training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=32)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))  # added over the workers
        return loss

    @tf.function
    def train_step(batch):
        return strategy.reduce("sum", strategy.run(train_replica, (batch,)), axis=None)

    # A worker has one replica, which takes the worker's batch as it is.
    batches = raysgd.get_dataset("train").get_split().to_tf(global_batch_size=32, shuffle="full", drop_last=True)
    (validation,) = raysgd.get_dataset("validation").get_split().to_tf(global_batch_size=360)  # this shard
    for epoch in range(start, config["epochs"]):
        optimizer.learning_rate.assign(config["lr"] * (1 - epoch / config["epochs"]))
        losses = [train_step(batch) for batch in batches]
        right = tf.argmax(model(validation["image"]), 1) == validation["label"]
        raysgd.report(epoch=epoch, loss=tf.reduce_mean(losses), accuracy=tf.reduce_mean(tf.cast(right, tf.float32)))
        values = [variable.numpy() for variable in [*model.variables, *optimizer.variables]]
        raysgd.save_checkpoint({"epoch": epoch, "values": values})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    config = {"lr": 1e-2, "epochs": args.epochs}
    with raysgd.Trainer(num_workers=args.workers, backend="tensorflow", seed=0) as trainer:
        trainer.run(train_func, config, dataset=make_data(), reduce={"loss": "mean", "accuracy": "mean"})
        print(f"validation accuracy: {trainer.get_last_checkpoint().metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
