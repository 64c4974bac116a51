"""Search for a learning rate and a width for the handwritten digits: trials of two workers each, stopped early by ASHA.

    python examples/06_tune_digits.py [--trials 8] [--workers 2] [--epochs 12]

Two lines turn a run into a search: ``trainer.to_trainable(train_func)`` instead of ``trainer.run(train_func, config)``, and a
Tuner.
"""

# test: tests/docs/test_tune_examples.py

import argparse

import numpy as np
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import raysgd


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * 4 * 4, 10),
    )  # fmt: skip


def make_data() -> dict[str, dict[str, np.ndarray]]:
    """1,797 scans of 8 x 8 pixels, a fifth of them for validation."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    x_train, x_val, y_train, y_val = parts

    def columns(x, y) -> dict[str, np.ndarray]:
        return {"image": x.astype(np.float32).reshape(-1, 1, 8, 8) / 16, "label": y}

    return {"train": columns(x_train, y_train), "validation": columns(x_val, y_val)}


def train_func(config: dict) -> None:
    model = make_model(config["width"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    start = 0
    if state := raysgd.load_checkpoint():  # an interrupted trial, or one that continues from another's checkpoint
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    model = raysgd.torch.prepare_model(model)
    batches = raysgd.get_dataset("train").get_split().to_torch(batch_size=32, shuffle="full")
    (validation,) = raysgd.get_dataset("validation").get_split().to_torch(global_batch_size=360)  # this shard

    for epoch in range(start, config["epochs"]):
        model.train()
        for batch in batches:
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(validation["image"]).argmax(1) == validation["label"]
        raysgd.save_checkpoint({"epoch": epoch, "model": model, "optimizer": optimizer})
        raysgd.report(epoch=epoch, accuracy=right.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()

    trainer = raysgd.Trainer(args.workers, seed=0)
    tuner = tune.Tuner(
        trainer.to_trainable(train_func, dataset=make_data(), reduce={"accuracy": "mean"}),
        param_space={
            "lr": tune.loguniform(1e-4, 1e-1),
            "width": tune.choice([4, 8, 16]),
            "epochs": args.epochs,
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=args.trials,
            search_alg=BasicVariantGenerator(random_state=0),  # the same trials each time
            scheduler=ASHAScheduler(max_t=args.epochs, grace_period=2),
            reuse_actors=True,  # a trial starts in the processes of one that has ended
        ),
    )
    grid = tuner.fit()
    best = grid.get_best_result()
    for result in grid:
        print(
            f"lr {result.config['lr']:.5f}, width {result.config['width']:2}: accuracy {result.metrics['accuracy']:.4f} "
            f"after {result.metrics['training_iteration']} epochs"
        )
    model = make_model(best.config["width"])
    model.load_state_dict(raysgd.load_checkpoint(best.checkpoint.path)["model"])
    print(f"best: accuracy {best.metrics['accuracy']:.4f}, lr {best.config['lr']:.5f}, {best.checkpoint.path}")


if __name__ == "__main__":
    main()
