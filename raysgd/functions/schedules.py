"""Schedules of the learning rate. Any process; imports optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from raysgd.config.checks import check_choice, check_count
from raysgd.errors import ConfigError


def make_schedule(
    kind: str, num_updates: int, num_warmup: int, rates: tuple[float, float, float]
) -> Callable[[Any], Any]:
    """Make a schedule with a linear warm-up and a decay.

    Args:
        kind: The decay, ``"linear"`` or ``"cosine"``.
        num_updates: All updates.
        num_warmup: Those that warm up.
        rates: The first, the highest and the last learning rate.

    Raises:
        ConfigError: The decay is not known, or the warm-up is longer than the training.
    """
    check_choice("schedule_type", kind, ("linear", "cosine"))
    check_count("n_epochs * train_size", num_updates, minimum=1)
    check_count("warmup_steps", num_warmup, minimum=0)
    if num_warmup > num_updates:
        raise ConfigError(
            f"warmup_steps={num_warmup} is more than the {num_updates} updates of the training; give fewer."
        )
    first, highest, last = rates
    length = max(1, num_updates - num_warmup)
    if kind == "linear":
        decay = optax.linear_schedule(highest, last, length)
    else:
        decay = optax.cosine_decay_schedule(highest, length, alpha=last / highest if highest else 0.0)
    warmup = optax.linear_schedule(first, highest, num_warmup)
    return optax.join_schedules([warmup, decay], [num_warmup]) if num_warmup else decay  # type: ignore[no-any-return]
