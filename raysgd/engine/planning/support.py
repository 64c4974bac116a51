"""Which strategies the engine can apply to a model. The model may be on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

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
        self._shared: dict[tuple[int, bool], str | None] = {}
        self._split: dict[int, str | None] = {}
        self._stage_blocks: dict[int, tuple[range, ...]] = {}

    @property
    def stage_blocks(self) -> Mapping[int, tuple[range, ...]]:
        """The blocks of each stage, by the numbers of stages that were asked for."""
        return dict(self._stage_blocks)

    def find_obstacle(self, config: EngineConfig) -> str | None:
        """Return why the engine cannot apply a strategy, or None."""
        reason = OWN_PLAN_OF_SEQUENCES if config.sequence_parallel and self._has_own_plan else None
        if config.tensor_parallel > 1 and not self._has_own_plan:
            reason = self._find_sharing_obstacle(config.tensor_parallel, config.sequence_parallel)
        if reason is None and config.pipeline_parallel > 1:
            reason = self._find_splitting_obstacle(config.pipeline_parallel)
        if reason is None and self._refuse is not None:
            reason = self._refuse(config)
        return reason

    def _find_sharing_obstacle(self, size: int, is_on_parts: bool) -> str | None:
        key = (size, is_on_parts)
        if key not in self._shared:
            try:
                make_tensor_plan(self._model, size, is_on_parts)
                self._shared[key] = None
            except ConfigError as error:
                self._shared[key] = str(error)
        return self._shared[key]

    def _find_splitting_obstacle(self, num_stages: int) -> str | None:
        if num_stages not in self._split:
            try:
                self._stage_blocks[num_stages] = read_model(self._model, num_stages).ranges
                self._split[num_stages] = None
            except ConfigError as error:
                self._split[num_stages] = str(error)
        return self._split[num_stages]
