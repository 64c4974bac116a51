"""Read the folder of a run, and compare two runs to find where they first differ. Runs anywhere, without Ray."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from raysgd._util.metric_names import flatten
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.config.run import Reduction
from raysgd.controller import frames
from raysgd.controller.checkpoints.pending import find_rounds
from raysgd.controller.frames import Frame
from raysgd.controller.journal.journal import read_description, reading, stored_frames
from raysgd.controller.rounds import check_reduce, merge_results
from raysgd.errors import CheckpointNotFoundError
from raysgd.result import DATA_WAIT_FRACTION, Event, Result
from raysgd.trainer.run_summary import RunSummary, summarize

#: Metrics that differ between equal runs.
_CLOCK_KEYS = frozenset({"timestamp", "time_this_iter_s", "time_total_s", "attempt", DATA_WAIT_FRACTION})

Span = tuple[int, int] | None
#: Metrics by iteration and rank.
_Rows = dict[tuple[int, int], dict[str, Any]]


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
        return self._summary().text()

    def _repr_html_(self) -> str:
        """Return the summary, and below it the page of the run: curves and timeline."""
        page = importlib.import_module(
            "raysgd.viewer.page"
        )  # of a higher layer, which reads runs by themselves: no cycle
        return f"{self._summary().html()}{page.write_frame(self.run_dir)}"

    def _summary(self) -> RunSummary:
        return summarize(self.run_dir, self.metrics, self.events, self.description, len(self.checkpoints), self.outcome)


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
    storage = Storage.from_uri(run_dir)
    with reading(storage):
        return _load(storage, reduce)


def _load(storage: Storage, reduce: Mapping[str, str] | None) -> LoadedRun:
    sequence = stored_frames(storage)
    description = read_description(storage)
    events = [Event(**frame.data) for frame in sequence if frame.kind == frames.EVENT]
    ends = [event.data["kind"] for event in events if event.kind == "run_end"]
    reductions = check_reduce(description.get("reduce") if reduce is None else reduce)
    results = merge_results(sequence, reductions, is_done=ends[-1:] == ["done"])
    return LoadedRun(
        run_dir=storage.uri,
        metrics=pd.DataFrame([flatten(result) for result in results]),
        workers=pd.DataFrame(list(_worker_rows(results))),
        events=pd.DataFrame(
            [(e.timestamp, e.kind, e.data) for e in events if e.kind != "sample"], columns=["timestamp", "kind", "data"]
        ),
        samples=pd.DataFrame([{"timestamp": e.timestamp, **e.data} for e in events if e.kind == "sample"]),
        config=description.get("config", {}),
        description=description,
        checkpoints=_checkpoints(storage, sequence, reductions),
        outcome=ends[-1] if ends else None,
    )


def _worker_rows(results: list[Result]) -> Iterator[dict[str, Any]]:
    for result in results:
        for rank, metrics in zip(result.ranks, result.workers, strict=True):
            automatic = {"training_iteration": result["training_iteration"], "attempt": result["attempt"], "rank": rank}
            yield {**automatic, **{k: v for k, v in flatten(metrics).items() if k not in automatic}}


def _checkpoints(storage: Storage, sequence: list[Frame], reduce: Mapping[str, str]) -> list[Checkpoint]:
    if not storage.is_folder("checkpoints"):
        return []
    store = CheckpointStore(storage.child("checkpoints"))
    found = find_rounds(store.list(), sequence, reduce)
    return [Checkpoint.of_manifest(store.path(manifest.number), manifest) for manifest in found]


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs; it is false if there is none.

    Attributes:
        iteration: The first iteration that differs, or None.
        rank: The lowest rank that differs there, or None.
        metrics: ``{name: (in a, in b)}`` of that rank's metrics that differ there. None stands for a missing metric; all are
            missing if only one run has that rank.
        config: ``{key: (in a, in b)}`` of differing config entries.
        versions: ``{package: (in a, in b)}`` of differing software versions.
        lengths: Iterations in a, in b.
        spans: First and last iteration of a and of b; None if a run has none. A later begin is not a difference, since a
            run may start from a checkpoint. An earlier end is a difference.
    """

    iteration: int | None
    rank: int | None
    metrics: dict[str, tuple[Any, Any]]
    config: dict[str, tuple[Any, Any]]
    versions: dict[str, tuple[Any, Any]]
    lengths: tuple[int, int]
    spans: tuple[Span, Span]

    def __bool__(self) -> bool:
        ends = [None if span is None else span[1] for span in self.spans]
        return self.iteration is not None or ends[0] != ends[1]

    def __str__(self) -> str:
        if self.iteration is not None:
            found = ", ".join(f"{name}: {a!r} != {b!r}" for name, (a, b) in self.metrics.items())
            text = f"first difference at iteration {self.iteration}, rank {self.rank}: {found}"
        else:
            text = self._equality()
        for what, entries in (("config", self.config), ("versions", self.versions)):
            if entries:
                text += f"; {what}: " + ", ".join(f"{name} {a!r} / {b!r}" for name, (a, b) in entries.items())
        return text

    def _equality(self) -> str:
        if self.spans[0] == self.spans[1]:
            return f"equal in all {self.lengths[0]} iterations"
        spans = f"({_span_text(self.spans[0])} and {_span_text(self.spans[1])})"
        both = _common(*self.spans)
        if both is None:
            return f"no iteration in common {spans}"
        number = both[1] - both[0] + 1
        text = f"equal in the {number} iteration{'s' * (number > 1)} both have ({_span_text(both)})"
        return f"{text}, then one ends {spans}" if self else text


def compare_runs(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, rel_tol: float = 0.0, ignore: tuple[str, ...] = ()
) -> Difference:
    """Compare the metrics of two runs, rank by rank, in the iterations that both have.

    If both runs have logical workers, the number of workers does not matter: only ranks that both runs have are compared.

    Args:
        a: The folder of a run.
        b: The folder of another run.
        rel_tol: Relative difference of numbers that counts as equal. 0: equal bits.
        ignore: Further metrics to leave out, such as ``val/acc``, or ``val`` for all of that group. Times are always left out.

    Raises:
        CheckpointNotFoundError: A folder is not that of a run.
    """
    first, second = load_run(a), load_run(b)
    rows_a, rows_b = _rows(first, ignore), _rows(second, ignore)
    if first.description.get("logical_workers") and second.description.get("logical_workers"):
        rows_a, rows_b = _of_ranks_of(rows_b, rows_a), _of_ranks_of(rows_a, rows_b)
    iteration, rank, metrics = _first_difference(rows_a, rows_b, rel_tol)
    return Difference(
        iteration,
        rank,
        metrics,
        _differing(first.config, second.config, 0.0),
        _differing(first.description.get("versions", {}), second.description.get("versions", {}), 0.0),
        (len(first.metrics), len(second.metrics)),
        (_span(rows_a), _span(rows_b)),
    )


def _rows(run: LoadedRun, ignore: tuple[str, ...]) -> _Rows:
    left_out = _CLOCK_KEYS | set(ignore)
    groups = tuple(f"{name}/" for name in ignore)
    kept = [str(name) for name in run.workers.columns if name not in left_out and not str(name).startswith(groups)]
    return {
        (row["training_iteration"], row["rank"]): {name: row[name] for name in kept if not _is_missing(row[name])}
        for row in run.workers.to_dict("records")
    }


def _of_ranks_of(other: _Rows, rows: _Rows) -> _Rows:
    """Return the rows whose rank the other run has in that iteration."""
    return {key: row for key, row in rows.items() if key in other}


def _first_difference(
    rows_a: _Rows, rows_b: _Rows, rel_tol: float
) -> tuple[int | None, int | None, dict[str, tuple[Any, Any]]]:
    both = {iteration for iteration, _ in rows_a} & {iteration for iteration, _ in rows_b}
    for key in sorted(key for key in {*rows_a, *rows_b} if key[0] in both):
        if differing := _differing(rows_a.get(key, {}), rows_b.get(key, {}), rel_tol):
            return key[0], key[1], differing
    return None, None, {}


def _span(rows: _Rows) -> Span:
    iterations = [iteration for iteration, _ in rows]
    return (min(iterations), max(iterations)) if iterations else None


def _common(a: Span, b: Span) -> Span:
    if a is None or b is None:
        return None
    first, last = max(a[0], b[0]), min(a[1], b[1])
    return (first, last) if first <= last else None


def _span_text(span: Span) -> str:
    if span is None:
        return "none"
    return str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"


def _differing(a: dict[str, Any], b: dict[str, Any], rel_tol: float) -> dict[str, tuple[Any, Any]]:
    keys = [*a, *(key for key in b if key not in a)]
    return {key: (a.get(key), b.get(key)) for key in keys if not _same(a.get(key), b.get(key), rel_tol)}


def _same(a: Any, b: Any, rel_tol: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=rel_tol)
    return bool(a == b)


def _is_missing(value: Any) -> bool:
    """Return whether a metric is missing. Pandas marks that with NaN, so a reported NaN counts as missing in both runs."""
    return isinstance(value, float) and math.isnan(value)
