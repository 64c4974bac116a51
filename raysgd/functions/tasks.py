"""What the driver sends to the workers: a train_func for each of fit and predict. Any process; JAX is imported in the call.

The user's functions stay pickled until the process group is formed: a model among them may hold JAX arrays, which would fix the
devices of the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysgd.functions.settings import FitSettings, PredictSettings, TaskSettings
from raysgd.workers.pickling import loads


@dataclass(frozen=True)
class FitTask:
    """The train_func of fit.

    Attributes:
        parts: Pickle of a dict: the user's functions, the optimizer and the sharding rules.
        like: Pickle of the shapes of the parameters.
    """

    parts: bytes
    like: bytes
    settings: FitSettings

    @property
    def __name__(self) -> str:
        return "fit"

    def __call__(self) -> dict[str, Any]:
        from raysgd.functions.worker.fitting import Fitting

        return Fitting({**loads(self.parts), "like": loads(self.like)}, self.settings, identity=self.parts).run()


@dataclass(frozen=True)
class EvalLossTask:
    """The train_func of eval_loss. Attributes are as those of `FitTask`."""

    parts: bytes
    like: bytes
    settings: FitSettings

    @property
    def __name__(self) -> str:
        return "eval_loss"

    def __call__(self) -> float:
        from raysgd.functions.worker.fitting import Fitting

        fitting = Fitting({**loads(self.parts), "like": loads(self.like)}, self.settings, identity=self.parts)
        return fitting.eval_loss()


@dataclass(frozen=True)
class ExportTask:
    """The train_func of export_ckpt. Attributes are as those of `FitTask`, and the folder to write to."""

    parts: bytes
    like: bytes
    settings: TaskSettings
    folder: str

    @property
    def __name__(self) -> str:
        return "export_ckpt"

    def __call__(self) -> None:
        from raysgd.functions.worker.exporting import export

        export({**loads(self.parts), "like": loads(self.like)}, self.settings, self.folder)


@dataclass(frozen=True)
class PredictTask:
    """The train_func of predict. Attributes are as those of `FitTask`."""

    parts: bytes
    like: bytes
    settings: PredictSettings

    @property
    def __name__(self) -> str:
        return "predict"

    def __call__(self) -> list[Any]:
        from raysgd.functions.worker.predicting import predict_all

        return predict_all({**loads(self.parts), "like": loads(self.like)}, self.settings, identity=self.parts)
