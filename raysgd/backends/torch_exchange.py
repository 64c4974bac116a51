"""Finds a rank that trains a model which shares nothing with those of other ranks. Runs in the worker.

Two signs decide: an optimizer has made a step, and PyTorch's flight recorder has no collective that could have carried
gradients or parameters. The recorder keeps the last 2,000 collectives with their sizes, so nothing is counted while
training runs. For gloo it has no sends and receives, as between the stages of a pipeline; a group's number counts them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raysgd.backends.flight_recorder import read_collectives

#: Variables that set how many collectives the recorder keeps; the first one that is set counts.
_BUFFER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


class ExchangeWatch:
    """Watches the training of one attempt, from its construction to `close`."""

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._began_ns = time.time_ns()
        self._first_step_ns = 0
        self._largest = 0
        self._has_exchanged = False
        self._hook = register_optimizer_step_post_hook(self._on_step)

    def close(self) -> None:
        """Stop watching."""
        self._hook.remove()

    def has_trained_alone(
        self, read_records: Callable[[], Iterable[Mapping[str, Any]]], count_operations: Callable[[], Mapping[str, int]]
    ) -> bool:
        """Return True if an optimizer has made a step, and gradients or parameters were never exchanged so far.

        Args:
            read_records: Returns what the flight recorders of this process have now; nothing if torch has none.
            count_operations: Returns how many operations this rank has begun in each group, by `display_name`.
        """
        if not self._first_step_ns or self._has_exchanged or not _is_recording():
            return False
        numbers = count_operations()  # first: what begins meanwhile must be in the records
        records = list(read_records())
        recorded = {one.group: one.number for record in records for one in read_collectives(record, self._began_ns)}
        has_sent = any(number > recorded.get(group, 0) for group, number in numbers.items())
        has_carried = any(
            entry["time_created_ns"] >= self._began_ns and may_carry_model(entry, self._largest, self._first_step_ns)
            for record in records
            for entry in record.get("entries", ())
        )
        self._has_exchanged = not records or has_sent or has_carried
        return not self._has_exchanged

    def _on_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._first_step_ns:
            sizes = [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
            self._largest = max(sizes, default=0)
            self._first_step_ns = time.time_ns()


def may_carry_model(entry: Mapping[str, Any], largest: int, first_step_ns: int) -> bool:
    """Return True if a recorded collective may have carried gradients or parameters of a model.

    Args:
        entry: An entry of PyTorch's flight recorder.
        largest: Elements of the model's largest parameter. Compressed gradients (PowerSGD) have the square root of that; a
            loss or a few metrics have fewer.
        first_step_ns: When the optimizer made its first step. A broadcast before it makes the ranks begin with the same
            weights, as DDP's constructor does, and shares nothing afterwards.
    """
    if entry["is_p2p"]:  # nccl records them
        return True
    if "broadcast" in entry["profiling_name"] and entry["time_created_ns"] < first_step_ns:
        return False
    num_elements: int = sum(math.prod(size) for size in entry["input_sizes"])
    return num_elements >= (max(2, math.isqrt(largest)) if largest > 1 else 1)


def _is_recording() -> bool:
    given = next((value for name in _BUFFER_SIZES if (value := os.environ.get(name))), "1")
    return given != "0"
