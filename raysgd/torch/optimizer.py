"""`prepare_optimizer`. Worker side."""

from __future__ import annotations

from typing import Any

import torch

from raysgd._util.wording import with_article
from raysgd.errors import ConfigError
from raysgd.torch.transfer import to_device


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make an optimizer ready for training. Today that is one thing: its state goes where its parameters are.

    That matters where state was loaded while the model was still on the CPU and `prepare_model` moved the model after
    that; in all other cases there is nothing to do. Gradients are averaged by the model, so the optimizer itself is the
    same for any number of workers. Call it after `prepare_model`, so that precision and gradient accumulation, which
    will attach here, find both.

    Args:
        optimizer: Any optimizer that keeps its state by parameter in ``state``, as those of torch do.

    Returns:
        The same object.

    Raises:
        ConfigError: It is no optimizer.
    """
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise ConfigError(f"prepare_optimizer takes a torch optimizer, not {with_article(type(optimizer).__name__)}.")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                _place(optimizer.state[parameter], group, parameter.device)
    return optimizer


def _place(state: Any, group: dict[str, Any], device: torch.device) -> None:
    # torch keeps step counts on the CPU, unless the step itself runs as one kernel: then they are read on the device.
    step_stays = not (group.get("capturable") or group.get("fused"))
    for name, value in state.items():
        if not (name == "step" and step_stays):
            state[name] = to_device(value, device)
