"""Tensor and sequence parallelism: a plan from a model's structure, and its application on one axis of a device mesh."""

from raysgd.engine.tensor_parallel.apply import apply_tensor_plan, check_own_plan
from raysgd.engine.tensor_parallel.placements import fsdp_shard_placement
from raysgd.engine.tensor_parallel.tensor_plan import TensorPlan, make_tensor_plan

__all__ = ["TensorPlan", "apply_tensor_plan", "check_own_plan", "fsdp_shard_placement", "make_tensor_plan"]
