"""A run's folder as pandas tables: `load_run`. A loaded run prints as a few lines, in a notebook with the page of the run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from raysgd._util.metric_names import flatten
from raysgd._util.redact import redact_uri
from raysgd._util.tables import as_html, as_text, make_table
from raysgd.callbacks.progress.view import sparkline
from raysgd.callbacks.values import duration, short
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.storage.storage import Storage
from raysgd.config.run import Reduction
from raysgd.errors import CheckpointNotFoundError
from raysgd.result import AUTOMATIC_KEYS, DATA_WAIT_FRACTION, Result
from raysgd.runs.reading import read_run
from raysgd.viewer.page import write_frame

if TYPE_CHECKING:
    from rich.table import Table

#: Metrics that are shown; a run may have hundreds.
MAX_METRICS = 20
_CURVE_WIDTH = 32
_OUTCOMES = {"done": "done", "stopped": "stopped by a callback", "cancelled": "cancelled", "error": "failed"}
_LEFT_OUT = AUTOMATIC_KEYS | {DATA_WAIT_FRACTION}


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """The contents of a run's folder. It prints as a short summary, in a notebook with the page of the run.

    Attributes:
        run_dir: The folder.
        metrics: A row per iteration: what a loop over the run's results saw, with ``reduce`` and the automatic keys. A nested
            metric is a column such as ``val/acc``. For an iteration that was repeated after a failure, the latest. Iterations
            that a failure undid and that were not repeated before the run was done are left out.
        workers: A row per iteration and rank, with each rank's own metrics.
        events: A row per event: ``timestamp``, ``kind``, ``data``.
        samples: A row per sample of a worker: CPU, memory, GPU, pace of reports.
        config: The config, with secrets redacted.
        description: The contents of ``run.json``.
        checkpoints: The committed checkpoints, oldest first.
        outcome: ``"done"``, ``"stopped"`` (ended early by a callback), ``"cancelled"`` or ``"error"``. None: the run is live, or
            it was lost. The event ``run_end`` has the reason.
    """

    run_dir: str
    metrics: pd.DataFrame
    workers: pd.DataFrame
    events: pd.DataFrame
    samples: pd.DataFrame
    config: dict[str, Any]
    description: dict[str, Any]
    checkpoints: list[Checkpoint] = field(default_factory=list)
    outcome: str | None = None

    @property
    def warnings(self) -> list[str]:
        """The texts of the run's warnings, oldest first."""
        return [str(data.get("message", "")) for data in self.events[self.events["kind"] == "warning"]["data"]]

    def __repr__(self) -> str:
        return as_text(*self._summary())

    def _repr_html_(self) -> str:
        """Return the summary, and below it the page of the run: curves and timeline."""
        return f"{as_html(*self._summary(has_curves=True))}{write_frame(self.run_dir)}"

    def _summary(self, *, has_curves: bool = False) -> list[str | Table]:
        kinds = list(self.events["kind"])
        facts = [_OUTCOMES.get(self.outcome or "", "live, or lost"), _count(len(self.metrics), "iteration")]
        if len(self.metrics) and "time_total_s" in self.metrics:
            facts[-1] += f" in {duration(float(self.metrics['time_total_s'].iloc[-1]))}"
        if "num_workers" in self.description:
            facts.append(f"{self.description['num_workers']} x {self.description.get('backend', '?')} worker")
        facts.append(_count(len(self.checkpoints), "checkpoint"))
        facts += [_count(kinds.count(kind), kind) for kind in ("failure", "warning") if kind in kinds]
        place = redact_uri(self.run_dir)
        name = place.partition("?")[0].rstrip("/").rpartition("/")[2]
        found = {str(name): values for name in self.metrics.columns if (values := _numbers(self.metrics, name))}
        rows: list[tuple[str, ...]] = [
            (name, *map(short, (values[0], values[-1], min(values), max(values))))
            for name, values in list(found.items())[:MAX_METRICS]
        ]
        columns: tuple[str, ...] = ("metric", "first", "last", "lowest", "highest")
        if has_curves:
            rows = [(*row, sparkline(found[row[0]], _CURVE_WIDTH)) for row in rows]
            columns = (*columns, "curve")
        shown: list[str | Table] = [f"{name}: {', '.join(facts)}", f"in {place}"]
        shown += [make_table(columns, rows, right=columns[1:5])] if rows else []
        shown += [f"and {len(found) - MAX_METRICS} more metrics"] if len(found) > MAX_METRICS else []
        return [*shown, "tables: .metrics .workers .events .samples; also .config .description .checkpoints"]


def load_run(run_dir: str | os.PathLike[str] | None, reduce: Mapping[str, Reduction] | None = None) -> LoadedRun:
    """Read the files of a run.

    Args:
        run_dir: The run's folder, path or URI; so may be ``trainer.run_dir``, which is None before its first run.
        reduce: Metrics to compute over all ranks, as in ``Trainer.run``. None: as the run itself did; ``{}``: rank 0's.

    Raises:
        CheckpointNotFoundError: The folder is not that of a run; the text names the runs in it.
        CheckpointCorruptError: A file of the run is damaged.
        ConfigError: ``reduce`` cannot work.
    """
    if run_dir is None:
        raise CheckpointNotFoundError("load_run(None): this Trainer has had no run; give the folder of a run.")
    run = read_run(Storage.from_uri(run_dir), reduce)
    return LoadedRun(
        run_dir=run.folder.uri,
        metrics=pd.DataFrame([flatten(result) for result in run.results]),
        workers=pd.DataFrame([row for result in run.results for row in _worker_rows(result)]),
        events=pd.DataFrame(
            [(e.timestamp, e.kind, e.data) for e in run.events if e.kind != "sample"],
            columns=["timestamp", "kind", "data"],
        ),
        samples=pd.DataFrame([{"timestamp": e.timestamp, **e.data} for e in run.events if e.kind == "sample"]),
        config=run.description.get("config", {}),
        description=run.description,
        checkpoints=run.checkpoints,
        outcome=run.outcome,
    )


def _worker_rows(result: Result) -> Iterator[dict[str, Any]]:
    for rank, metrics in zip(result.ranks, result.workers, strict=True):
        automatic = {"training_iteration": result["training_iteration"], "attempt": result["attempt"], "rank": rank}
        yield {**automatic, **{name: value for name, value in flatten(metrics).items() if name not in automatic}}


def _numbers(metrics: pd.DataFrame, name: Any) -> list[float]:
    """Return the finite values of a metric; none if it is not a number, or is one of raysgd's own."""
    column = metrics[name]
    if name in _LEFT_OUT or column.dtype.kind not in "iuf":
        return []
    return [value for value in map(float, column) if math.isfinite(value)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
