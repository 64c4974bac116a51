"""Metrics in Weights & Biases. Runs in the controller's helper process and imports wandb only there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from raysgd._util.imports import import_optional
from raysgd.callbacks.folder import FileCallback, StoreFolder, open_folder, parent_of
from raysgd.callbacks.values import flatten, one_line
from raysgd.config.checks import check_choice
from raysgd.result import Result, RunInfo

if TYPE_CHECKING:
    from raysgd.checkpoint.checkpoint import Checkpoint

_STEP = "training_iteration"
#: W&B's service writes the last bytes of an offline run's file after ``finish`` has returned, without notice.
_SETTLE_S = 1.0


class WandbCallback(FileCallback):
    """Logs each result to a W&B run of its own, with ``training_iteration`` as the x-axis of every metric.

    The W&B run of a failed run ends with exit code 1 and has ``error`` in its summary. Results that are repeated after a
    failure are further points at the same ``training_iteration``. Files go to ``{run_dir}/wandb``; those of
    ``mode="offline"`` can be sent later by ``wandb sync``. The controller's process needs the API key: by
    ``wandb login`` on its node, or ``runtime_env={"env_vars": {"WANDB_API_KEY": ...}}``.

    Args:
        project: W&B project; None: the name of the folder that holds the run's folder.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``. None: the mode of W&B's own settings.
        **init: Further arguments of ``wandb.init``; they override those of raysgd.
    """

    packages: ClassVar[Mapping[str, str]] = {"wandb": "raysgd[wandb]"}

    def __init__(
        self,
        project: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        **init: Any,
    ) -> None:
        self._project = project
        self._mode = (
            None if mode is None else check_choice("WandbCallback(mode)", mode, ("online", "offline", "disabled"))
        )
        self._init = init
        self._run: Any = None

    def on_run_start(self, info: RunInfo) -> None:
        wandb = import_optional("wandb", "wandb")
        self._folder = open_folder(info.run_dir)
        arguments = {
            "project": self._project or parent_of(info.run_dir).rpartition("/")[2] or "raysgd",
            "name": info.name,
            "config": {**info.config, "raysgd": {"num_workers": info.num_workers, "backend": info.backend}},
            "dir": str(self._folder.path),
            "mode": self._mode,
            "reinit": "create_new",  # leaves other W&B runs of this process alone
            "settings": wandb.Settings(silent=True, console="off"),
        }
        self._run = wandb.init(**{**arguments, **self._init})
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def on_result(self, result: Result) -> None:
        if self._run is not None:
            self._run.log(flatten(result))

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._run is not None and checkpoint.path is not None:
            self._run.summary["last_checkpoint"] = str(checkpoint.path)

    def on_run_end(self, error: BaseException | None) -> None:
        run, self._run = self._run, None
        if run is not None:
            if error is not None:
                run.summary["error"] = one_line(error)
            run.finish(exit_code=0 if error is None else 1)
        if isinstance(self._folder, StoreFolder):
            time.sleep(_SETTLE_S)
        super().on_run_end(error)
