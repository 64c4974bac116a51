"""Which strategies the engine can apply to a model. The model may be on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from raysgd.engine.config import OWN_PLAN_OF_SEQUENCES, EngineConfig
from raysgd.engine.pipeline.stages import read_model
from raysgd.engine.planning.candidates import Refuse
from raysgd.engine.tensor_parallel import make_tensor_plan
from raysgd.errors import ConfigError


class EngineSupport:
    """Asks the engine, once for each number of ranks, whether it can shard the layers or split the model.

    Args:
        model: The model.
        has_own_plan: Whether the user has a plan for tensor parallelism, so that the engine need not know the model.
        refuse: Returns more reasons against a strategy, or None.
    """

    def __init__(self, model: nn.Module, *, has_own_plan: bool, refuse: Refuse | None = None) -> None:
        self._model = model
        self._has_own_plan = has_own_plan
        self._refuse = refuse
        self._answers: dict[Any, str | None] = {}
        self._stage_blocks: dict[int, tuple[range, ...]] = {}

    @property
    def stage_blocks(self) -> Mapping[int, tuple[range, ...]]:
        """The blocks of each stage, by the numbers of stages that were asked for."""
        return dict(self._stage_blocks)

    def find_obstacle(self, config: EngineConfig) -> str | None:
        """Return why the engine cannot apply a strategy, or None."""
        reason = OWN_PLAN_OF_SEQUENCES if config.sequence_parallel and self._has_own_plan else None
        if config.tensor_parallel > 1 and not self._has_own_plan:
            reason = self._try(make_tensor_plan, self._model, config.tensor_parallel, config.sequence_parallel)
        if reason is None and config.pipeline_parallel > 1:
            reason = self._try(self._split, config.pipeline_parallel)
        if reason is None and self._refuse is not None:
            reason = self._refuse(config)
        return reason

    def _split(self, num_stages: int) -> None:
        self._stage_blocks[num_stages] = read_model(self._model, num_stages).ranges

    def _try(self, apply: Callable[..., object], *args: Any) -> str | None:
        key = (apply, *args)
        if key not in self._answers:
            try:
                apply(*args)
                self._answers[key] = None
            except ConfigError as error:
                self._answers[key] = str(error)
        return self._answers[key]
