"""Runs, params and metrics in MLflow. Runs in the controller's helper process and imports mlflow only there.

The callback has its own client of the tracking store, so mlflow's global "active run" is neither used nor changed.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from raysgd._util.imports import import_optional
from raysgd._util.redact import redact_uri
from raysgd.callbacks.base import Callback
from raysgd.callbacks.folder import parent_of
from raysgd.callbacks.values import clip, end_state, flatten, numbers, one_line, strict_json, unicode_text
from raysgd.errors import ConfigError
from raysgd.result import Event, Result, RunInfo

if TYPE_CHECKING:
    from raysgd.checkpoint.checkpoint import Checkpoint

_FLUSH_EVERY_S = 1.0
_MAX_METRICS, _MAX_PARAMS = 1000, 100  # in one request
_MAX_WAITING = 100_000  # metrics held while the store cannot be reached; the oldest are dropped first
_MAX_PARAM, _MAX_TAG = 500, 5000  # characters that every version of the server accepts
_RUN_DIR_TAG = "raysgd.run_dir"
_STATUS = {"finished": "FINISHED", "cancelled": "KILLED", "failed": "FAILED"}


class MLflowCallback(Callback):
    """Logs the config as params and the numbers of each result as metrics at step ``training_iteration``.

    Characters that MLflow does not accept are replaced (``loss@5`` becomes ``loss_5``). Metrics are sent once a second at most,
    with the next result or event after that. The MLflow run ends as ``FINISHED``, as ``FAILED`` with the error in the tag
    ``raysgd.error``, or as ``KILLED`` if it was cancelled. It begins and ends when the raysgd run does. If the helper process
    is started again, it continues the same MLflow run. Results that are repeated after a failure add values at the same step.

    Args:
        experiment_name: Experiment; None: the name of the folder that holds the run's folder.
        tracking_uri: Tracking store. None: ``MLFLOW_TRACKING_URI`` where the callback is made, else ``mlflow.db``, an SQLite
            file next to the run's folder.
        run_name: Name of the MLflow run; None: the run's name.
        tags: Tags of the MLflow run.
    """

    runs_in = "controller"
    packages: ClassVar[Mapping[str, str]] = {"mlflow": "raysgd[mlflow]"}

    _client: Any
    _run_id: str | None
    _checkpoint: str | None
    _ended_s: float | None
    _waiting: deque[tuple[str, float, int, int]]
    _next_flush: float

    def __init__(
        self,
        experiment_name: str | None = None,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._experiment_name = experiment_name
        self._tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._run_name = run_name
        self._tags = dict(tags or {})
        self._clear()

    def on_run_start(self, info: RunInfo) -> None:
        self._clear()
        tracking = import_optional("mlflow.tracking", "mlflow")
        self._client = tracking.MlflowClient(tracking_uri=self._tracking_uri or _default_store(info.run_dir))
        self._run_id = self._open_run(info)
        self._log_params(info.config)

    def on_result(self, result: Result) -> None:
        step = int(result.get("training_iteration", 0))
        when_ms = int(result.get("timestamp", time.time()) * 1000)
        for key, value in numbers(result).items():
            if key not in ("training_iteration", "timestamp"):
                self._waiting.append((_name(key), value, when_ms, step))
        self._flush()

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = None if checkpoint.path is None else str(checkpoint.path)

    def on_event(self, event: Event) -> None:
        if event.kind == "run_end":
            self._ended_s = event.timestamp
        self._flush()

    def on_run_end(self, error: BaseException | None) -> None:
        if self._client is None or self._run_id is None:
            return
        try:
            if self._checkpoint is not None:
                self._set_tag("raysgd.last_checkpoint", redact_uri(self._checkpoint))
            if error is not None:
                self._set_tag("raysgd.error", one_line(error, _MAX_TAG))
            self._flush(force=True)
        finally:  # otherwise the MLflow run would seem to run forever
            end_ms = None if self._ended_s is None else int(self._ended_s * 1000)
            self._client.set_terminated(self._run_id, _STATUS[end_state(error)], end_time=end_ms)
            self._clear()

    def _clear(self) -> None:
        self._client = None
        self._run_id = None
        self._checkpoint = None
        self._ended_s = None
        self._waiting = deque(maxlen=_MAX_WAITING)
        self._next_flush = 0.0

    def _open_run(self, info: RunInfo) -> str:
        name = self._experiment_name or parent_of(info.run_dir).rpartition("/")[2] or "raysgd"
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run_dir = redact_uri(info.run_dir)
        found = self._client.search_runs([experiment_id], f"tags.`{_RUN_DIR_TAG}` = {_quoted(run_dir)}", max_results=1)
        if found:
            run_id = str(found[0].info.run_id)
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        tags = {**self._tags, _RUN_DIR_TAG: run_dir, "raysgd.backend": info.backend}
        start_ms = int(info.started_s * 1000) or None  # None: now
        run = self._client.create_run(
            experiment_id, start_time=start_ms, tags=tags, run_name=self._run_name or info.name
        )
        return str(run.info.run_id)

    def _log_params(self, config: Mapping[str, Any]) -> None:
        entities = import_optional("mlflow.entities", "mlflow")
        known = self._client.get_run(self._run_id).data.params  # MLflow refuses to change params of a run
        texts = {_name(key): clip(_text(value), _MAX_PARAM) for key, value in flatten(config).items()}
        params = [entities.Param(key, text) for key, text in texts.items() if key not in known]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])

    def _flush(self, *, force: bool = False) -> None:
        if self._client is None or not self._waiting or (time.monotonic() < self._next_flush and not force):
            return
        self._next_flush = time.monotonic() + _FLUSH_EVERY_S
        entities = import_optional("mlflow.entities", "mlflow")
        while self._waiting:
            batch = list(islice(self._waiting, _MAX_METRICS))
            self._client.log_batch(self._run_id, metrics=[entities.Metric(*metric) for metric in batch])
            for _ in batch:  # not before: a failed batch is sent again
                self._waiting.popleft()

    def _set_tag(self, key: str, text: str) -> None:
        self._client.set_tag(self._run_id, key, clip(unicode_text(text), _MAX_TAG))


def _default_store(run_dir: str) -> str:
    if "://" in run_dir:
        raise ConfigError(
            f"MLflow cannot keep its store in {redact_uri(run_dir)}; give MLflowCallback(tracking_uri=...)."
        )
    return f"sqlite:///{parent_of(run_dir)}/mlflow.db"


def _name(key: str) -> str:
    return clip(re.sub(r"[^\w\-. /]", "_", key, flags=re.ASCII).strip("/") or "_", 250)


def _text(value: Any) -> str:
    return unicode_text(value) if isinstance(value, str) else strict_json(value)


def _quoted(text: str) -> str:
    return f'"{text}"' if '"' not in text else f"'{text}'"
