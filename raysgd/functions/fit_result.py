"""`FitResult`: what a training by functions returns. Driver side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raysgd.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class FitResult:
    """The results of a training.

    Attributes:
        metrics: The metrics of the last epoch: ``train_loss``, and those of the evaluation as ``eval_loss`` and so on.
        history: The metrics of each epoch.
        num_steps: The number of updates so far.
        num_compilations: How often each step was compiled, by name: once for each shape of a batch. The metric
            ``compilations`` says at which steps.
        checkpoints: ``last``, ``epoch_0`` and so on, and ``min_loss`` or ``max_accuracy`` for the best ones: those that fit was
            asked to keep.
        run_dir: The folder of the run.
    """

    metrics: dict[str, Any]
    history: list[dict[str, Any]] = field(repr=False)
    num_steps: int
    num_compilations: dict[str, int] = field(repr=False)
    checkpoints: dict[str, Checkpoint]
    run_dir: str | None
    _load_params: Callable[[], Any] = field(repr=False)

    @property
    def params(self) -> Any:
        """The trained parameters as NumPy arrays, or the module of nnx, loaded when they are asked for.

        Raises:
            UsageError: They are of a call of `Trainer.train`, and another one has followed.
        """
        return self._load_params()
