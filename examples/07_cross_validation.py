"""Cross-validate a classifier of the handwritten digits, for several strengths of its regularization.

    python examples/07_cross_validation.py [--folds 5] [--workers 2]

A trial is one strength: it trains once for each fold, one after another on the same workers, and reports mean and standard
deviation over the folds.
"""

# test: tests/docs/test_tune_examples.py

import argparse

import numpy as np
import torch
from ray import tune
from sklearn.datasets import load_digits
from torch import nn

import raysgd


def train_func(config: dict) -> None:
    model = raysgd.torch.prepare_model(nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=config["weight_decay"])
    train, validation = (raysgd.get_dataset(name).get_split() for name in ("train", "validation"))
    for _epoch in range(config["epochs"]):
        for batch in train.to_torch(batch_size=32, shuffle="full"):
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    right, rows = 0.0, 0
    with torch.no_grad():
        for batch in validation.to_torch(batch_size=100):
            right += float((model(batch["image"]).argmax(1) == batch["label"]).sum())
            rows += len(batch["label"])
    raysgd.report(accuracy=right / rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    rows = {"image": images.astype(np.float32) / 16, "label": labels}
    pairs = raysgd.data.to_cv(rows, splits=args.folds, stratify="label")
    trainer = raysgd.Trainer(args.workers, seed=0)
    tuner = tune.Tuner(
        trainer.to_trainable(train_func, pairs, cross_validate=True, reduce={"accuracy": "mean"}),
        param_space={"weight_decay": tune.grid_search([0.0, 0.1, 3.0]), "epochs": args.epochs},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", reuse_actors=True),
    )
    grid = tuner.fit()
    for result in grid:
        found = result.metrics
        print(
            f"weight decay {result.config['weight_decay']:<4}: accuracy {found['accuracy']:.4f} "
            f"+- {found['accuracy_std']:.4f} over {found['folds']} folds"
        )
    print(f"best: weight decay {grid.get_best_result().config['weight_decay']}")


if __name__ == "__main__":
    main()
