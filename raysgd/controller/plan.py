"""What a run is to do. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller.shelf import Start

if TYPE_CHECKING:
    from raysgd.controller.past import Past


@dataclass(frozen=True)
class RunPlan:
    """The settings that a `raysgd.controller.machine.RunMachine` goes by.

    Attributes:
        start: Where the first attempt goes on from.
        reduce: How checkpoints' metrics are made of those of all ranks.
        recovers_inside: train_func may get over changes of its group by itself; see `BackendConfig.recovers_inside`.
        past: What another process of the controller did of it; None: the run begins.
    """

    failure: FailureConfig
    checkpoint: CheckpointConfig
    start: Start = field(default_factory=Start)
    reduce: Mapping[str, str] = field(default_factory=dict)
    past: Past | None = None
    recovers_inside: bool = False
