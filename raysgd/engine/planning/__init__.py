"""The plan: which strategies fit a model into the memory of the devices, and what that costs. Driver side, without Ray.

`plan` compares strategies, `predict_memory` gives the numbers of one. `trace` runs a step on fake tensors, `memory` and
`step_time` compute with what it found.
"""

from raysgd.engine.planning.candidates import Candidate
from raysgd.engine.planning.memory import MemoryEstimate
from raysgd.engine.planning.plan import Plan, plan, predict_memory
from raysgd.engine.planning.step_time import Hardware, TimeEstimate

__all__ = ["Candidate", "Hardware", "MemoryEstimate", "Plan", "TimeEstimate", "plan", "predict_memory"]
