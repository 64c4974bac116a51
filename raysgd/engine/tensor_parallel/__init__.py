"""Tensor and sequence parallelism: a plan from a model's structure, and its application on one axis of a device mesh."""

from raysgd.engine.tensor_parallel.apply import apply_tensor_plan, check_own_plan, match_modules
from raysgd.engine.tensor_parallel.tensor_plan import TensorPlan, make_tensor_plan

__all__ = ["TensorPlan", "apply_tensor_plan", "check_own_plan", "make_tensor_plan", "match_modules"]
