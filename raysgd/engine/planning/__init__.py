"""The plan: which strategies fit a model into the memory of the devices, and what that costs. Without Ray.

`plan` compares strategies, `predict_memory` gives the numbers of one. `trace` runs a step on fake tensors, `memory` and
`candidates` compute with what it found.
"""

from raysgd.engine.planning.candidates import Candidate, Hardware
from raysgd.engine.planning.memory_prediction import MemoryEstimate
from raysgd.engine.planning.strategy_plan import Plan, plan, predict_memory

__all__ = ["Candidate", "Hardware", "MemoryEstimate", "Plan", "plan", "predict_memory"]
