"""Train a small convolutional network on scikit-learn's handwritten digits by Keras's fit, on two workers.

    python examples/backends/keras_fit.py [--workers 2] [--epochs 8]

Each worker trains on its own shard. A live table shows the loss and accuracy of each epoch, and each epoch saves a checkpoint.
It needs TensorFlow and Keras 2: pip install raysgd[tensorflow]
"""

# test: tests/docs/test_backend_examples.py

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import raysgd


def make_data() -> dict:
    """1,797 scans of 8 x 8 pixels, a fifth of them for validation."""
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images, np.float32).reshape(-1, 8, 8, 1) / 16
    x_train, x_val, y_train, y_val = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return {"train": {"image": x_train, "label": y_train}, "validation": {"image": x_val, "label": y_val}}


def make_model(lr: float):
    import tensorflow as tf  # in the workers, whose backend chooses the Keras

    layers = tf.keras.layers
    model = tf.keras.Sequential([
        layers.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPooling2D(2),
        layers.Flatten(), layers.Dropout(0.25), layers.Dense(10),
    ])  # fmt: skip
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(lr), loss, metrics=["accuracy"])
    return model


def train_func(config: dict) -> float:
    strategy = raysgd.tensorflow.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model(config["lr"])

    def pairs(batch):
        return batch["image"], batch["label"]

    train, validation = raysgd.get_dataset("train"), raysgd.get_dataset("validation")
    callback = raysgd.tensorflow.KerasCallback()
    history = model.fit(
        train.get_split().to_tf(global_batch_size=32, collate_fn=pairs, shuffle="full", drop_last=True),
        validation_data=validation.get_split().to_tf(global_batch_size=validation.num_rows, collate_fn=pairs),
        epochs=config["epochs"],
        initial_epoch=callback.restore(model),
        callbacks=[callback],
        verbose=0,
    )
    return history.history["val_accuracy"][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    config = {"lr": 1e-2, "epochs": args.epochs}
    keep_best = raysgd.CheckpointConfig(num_to_keep=3, score_attribute="val_accuracy")
    with raysgd.Trainer(num_workers=args.workers, backend="tensorflow", seed=0, checkpoint_config=keep_best) as trainer:
        print(trainer)
        accuracy = trainer.run(train_func, config, dataset=make_data())
        best = trainer.get_best_checkpoint()
        print(f"validation accuracy: {accuracy:.4f}")
        print(f"best checkpoint: {best.path} (accuracy {best.metrics['val_accuracy']:.4f})")
        print(f"run directory: {trainer.run_dir}")


if __name__ == "__main__":
    main()
