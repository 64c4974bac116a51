"""The settings of a Trainer: frozen keyword-only dataclasses, checked when they are made.

Pure data: importable anywhere, without Ray or a framework.
"""

from raysgd.config.checks import from_mapping
from raysgd.config.run import CheckpointConfig, FailureConfig, RunConfig
from raysgd.config.scaling import ScalingConfig

__all__ = ["CheckpointConfig", "FailureConfig", "RunConfig", "ScalingConfig", "from_mapping"]
