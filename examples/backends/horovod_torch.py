"""Handwritten digits with Horovod and PyTorch, on two workers.

    python examples/backends/horovod_torch.py [--workers 2] [--epochs 8]

``hvd.init()`` is not needed: raysgd calls it before train_func.
"""

# test: tests/docs/test_backend_examples.py

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

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
    import horovod.torch as hvd  # imported here: the driver does not need it

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    start = 0
    if state := raysgd.load_checkpoint():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    batches = raysgd.get_dataset("train").get_split().to_torch(global_batch_size=32, shuffle="full", drop_last=True)
    (validation,) = raysgd.get_dataset("validation").get_split().to_torch(global_batch_size=360)  # this shard
    for epoch in range(start, config["epochs"]):
        optimizer.param_groups[0]["lr"] = config["lr"] * (1 - epoch / config["epochs"])
        losses = []
        for batch in batches:
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        with torch.no_grad():
            right = model(validation["image"]).argmax(1) == validation["label"]
        raysgd.report(epoch=epoch, loss=torch.stack(losses).mean(), accuracy=right.float().mean())
        raysgd.save_checkpoint({"epoch": epoch, "model": model, "optimizer": optimizer})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    config = {"lr": 1e-2, "epochs": args.epochs}
    with raysgd.Trainer(num_workers=args.workers, backend="horovod", seed=0) as trainer:
        trainer.run(train_func, config, dataset=make_data(), reduce={"loss": "mean", "accuracy": "mean"})
        print(f"validation accuracy: {trainer.get_last_checkpoint().metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
