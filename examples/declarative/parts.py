"""The parts that digits.yaml names: a network whose `forward` returns the loss, and a dataset of handwritten digits."""

# test: tests/docs/test_scripts.py

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from raysgd.declarative import TrainHook


class Network(nn.Module):
    """A small network for images of 8 x 8 pixels; after each validation it says how many digits were right."""

    def __init__(self, width: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10)
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.layers(batch["image"])
        return nn.functional.cross_entropy(logits, batch["digit"]), logits.argmax(-1) == batch["digit"]


class Digits(Dataset):
    """The handwritten digits of scikit-learn: every fifth is kept for validation."""

    def __init__(self, *, is_training: bool) -> None:
        images, digits = load_digits(return_X_y=True)
        chosen = [place for place in range(len(images)) if (place % 5 != 0) == is_training]
        self.images = torch.tensor(images[chosen] / 16, dtype=torch.float32)
        self.digits = torch.tensor(digits[chosen])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[place], "digit": self.digits[place]}


class Accuracy(TrainHook):
    """Counts the digits that were recognised in a validation, on this worker."""

    def on_val_start(self, trainer) -> None:
        self.right = self.seen = 0

    def on_val_step_end(self, trainer, outputs, batches, idx) -> None:
        for _, is_right in outputs:  # one for each micro-batch of the step
            self.right += int(is_right.sum())
            self.seen += len(is_right)

    def on_val_end(self, trainer, val_loss) -> None:
        if trainer.rank == 0:
            print(f"epoch {trainer.train_status.epoch}: {self.right} of {self.seen} digits of rank 0 are right")
