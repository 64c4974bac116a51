"""An optimizer with two groups, for declarative trainings of tests."""

from __future__ import annotations

from typing import Any

import torch


def two_groups(parameters: Any, lr: float) -> torch.optim.Optimizer:
    first, *others = list(parameters)
    return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": 2 * lr}], lr=lr)
