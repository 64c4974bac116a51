"""Handwritten digits with Horovod and TensorFlow, on two workers.

    python examples/backends/horovod_tensorflow.py [--workers 2] [--epochs 8]

``hvd.init()`` is not needed: raysgd calls it before train_func.
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
    import horovod.tensorflow as hvd
    import tensorflow as tf  # imported here: the driver does not need it

    model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(256, "relu"), tf.keras.layers.Dense(10)])
    optimizer = tf.keras.optimizers.Adam(config["lr"])
    optimizer.build(model.trainable_variables)
    start = 0
    if state := raysgd.load_checkpoint():
        for variable, value in zip([*model.variables, *optimizer.variables], state["values"], strict=True):
            variable.assign(value)
        start = state["epoch"] + 1
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

    @tf.function
    def train_step(batch):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            logits = model(batch["image"], training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

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
    backend = raysgd.HorovodConfig(framework="tensorflow")
    with raysgd.Trainer(num_workers=args.workers, backend=backend, seed=0) as trainer:
        trainer.run(train_func, config, dataset=make_data(), reduce={"loss": "mean", "accuracy": "mean"})
        print(f"validation accuracy: {trainer.get_last_checkpoint().metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
