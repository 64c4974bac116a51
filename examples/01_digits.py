"""Train a small convolutional network on scikit-learn's handwritten digits, on two workers.

    python examples/01_digits.py [--workers 2] [--epochs 12]

A live table shows the loss and accuracy of each epoch. Each epoch saves a checkpoint; the three best and the newest are kept.
"""

# test: tests/docs/test_digits.py

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raysgd


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """1,797 scans of 8 x 8 pixels, a fifth of them for testing."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    x_train, x_test, y_train, y_test = (torch.from_numpy(part) for part in parts)

    def shaped(x: torch.Tensor, y: torch.Tensor) -> TensorDataset:
        return TensorDataset(x.float().reshape(-1, 1, 8, 8) / 16, y)

    return shaped(x_train, y_train), shaped(x_test, y_test)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    x, y = data.tensors
    device = raysgd.device()
    return float((model(x.to(device)).argmax(1) == y.to(device)).float().mean())


def train_func(config: dict) -> nn.Module:
    train_set, test_set = make_data()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    start = 0
    if state := raysgd.load_checkpoint():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    model = raysgd.torch.prepare_model(model)
    loader = raysgd.torch.prepare_data_loader(DataLoader(train_set, batch_size=config["batch_size"], shuffle=True))
    loader.set_epoch(start)

    for epoch in range(start, config["epochs"]):
        model.train()
        losses = []
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        test_accuracy = accuracy(model, test_set)
        raysgd.report(epoch=epoch, loss=torch.stack(losses).mean(), accuracy=test_accuracy)
        raysgd.save_checkpoint({"epoch": epoch, "model": model, "optimizer": optimizer})
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()

    config = {"lr": 4e-3, "batch_size": 32, "epochs": args.epochs}
    keep_best = raysgd.CheckpointConfig(num_to_keep=3, score_attribute="accuracy")
    with raysgd.Trainer(num_workers=args.workers, backend="torch", seed=0, checkpoint_config=keep_best) as trainer:
        print(trainer)
        callbacks = [raysgd.callbacks.TensorBoardCallback()]
        model = trainer.run(train_func, config, callbacks=callbacks, reduce={"loss": "mean"})
        best = trainer.get_best_checkpoint()
        print(f"test accuracy of the returned model: {accuracy(model, make_data()[1]):.4f}")
        print(f"best checkpoint: {best.path} (accuracy {best.metrics['accuracy']:.4f})")
        print(f"run directory:   {trainer.run_dir}")
        print(f"to look at it:   tensorboard --logdir {trainer.run_dir}/tensorboard")
        print(f"in Python:       raysgd.load_run({str(trainer.run_dir)!r}).metrics")


if __name__ == "__main__":
    main()
