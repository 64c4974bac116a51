"""Reads a run's folder for a page, all of it or what is new since the last time. Runs anywhere, without Ray."""

from __future__ import annotations

import bisect
import json
import math
import threading
import time
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from raysgd._util.media import image_names
from raysgd._util.metric_names import flatten
from raysgd.callbacks.values import clip
from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal.journal import read_description, reading
from raysgd.controller.rounds import RoundMerger, check_reduce
from raysgd.goodput.evidence import Evidence
from raysgd.goodput.kept_events import KeptEvents
from raysgd.goodput.ledger import WORDS, now_event
from raysgd.goodput.summary import summarize
from raysgd.result import Event, Result
from raysgd.runs.finding import run_name
from raysgd.runs.output import OutputTimes
from raysgd.runs.state import state_by_files
from raysgd.runs.tail import JournalTail
from raysgd.viewer.columns import Columns, encode
from raysgd.viewer.timeline import Timeline

#: Points of a curve of a worker's load. Older ones are thinned out, every second one at a time.
MAX_SAMPLES = 1000
#: Values of single ranks in a file, over all curves. Where there are more, each curve has fewer points.
MAX_RANK_VALUES = 2_000_000
MAX_WARNINGS = 500
#: How long one answer reads reports that are there; the next one continues. How much is read at once, in bytes and results.
_BUDGET_S = 0.5
_READ_BYTES = 2 << 20
_MAX_UNSORTED = 2000
#: Seconds until a live run's time is added up again, and how many times as long as that has taken.
_TIME_EVERY_S, _TIME_FACTOR = 2.0, 20.0
_LOADS = ("rss_bytes", "cpu_percent", "gpu_memory_bytes", "gpu_percent", "reports_per_s")
#: The parts of ``run.json`` that are shown elsewhere, or say nothing to a reader.
_NOT_SETTINGS = frozenset({"config", "versions", "name", "run_dir", "workers", "resources", "started"})
#: Keys of a result that the page does not draw.
_NOT_DRAWN = frozenset({"training_iteration", "attempt"})
_MAX_TEXT = 1000


class RunData:
    """One run for a page. Thread-safe.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Storage) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._tail = JournalTail(folder)
        self._seq = -1  # of the newest frame
        self._is_closed = self._is_behind = False
        self._description: dict[str, Any] | None = None
        self._pending: list[Frame] = []
        self._merger = RoundMerger()
        self._new: list[Result] = []  # that are not in columns yet
        self._results = Columns(left_out=_NOT_DRAWN)
        self._ranks: dict[int, Columns] = {}
        self._changes: list[tuple[int, int]] = []  # (number of a frame, the first iteration that it changed)
        self._facts_seq = -1
        self._timeline = Timeline()
        self._samples: dict[int, Samples] = {}
        self._output = OutputTimes()
        self._warnings: list[str] = []
        self._num_warnings = 0
        self._is_paused = False
        self._end: dict[str, Any] | None = None
        self._last_time = self._first_time = 0.0
        self._last_iteration = 0
        self._kept = KeptEvents()
        self._time: dict[str, Any] = {}
        self._time_seq = -2  # of the newest frame that it counts
        self._time_again_at = 0.0

    def read(self, after: int = -1, *, is_final: bool = False) -> dict[str, Any]:
        """Read what is new in the folder, and return what a page needs. Blocks.

        Args:
            after: The ``cursor`` of an earlier answer. -1: return all.
            is_final: The run is not read again: frames after a gap count at once.

        Returns:
            ``cursor``, ``state``, ``updated``, ``is_closed``: nothing follows but late warnings, and ``is_behind``: there is
            more to read. ``results``, if there are new ones: the rows from ``results["from"]`` on replace those that the page
            has; ``step``: see `Columns`. ``facts``, if anything else has changed.

        Raises:
            CheckpointNotFoundError: The folder is not a run's folder.
            CheckpointCorruptError: A file is damaged.
        """
        with self._lock:
            with reading(self.folder):
                self._update(None if is_final else _BUDGET_S, is_final=is_final)
            answer: dict[str, Any] = {
                "cursor": self._seq if not self._pending else -1,
                "state": self._state(),
                "is_closed": self._is_closed and not self._pending,
                "is_behind": self._is_behind,
                "updated": self._last_time,
            }
            if (place := self._first_changed(after)) is not None:
                answer["results"] = self._encode_results(place)
            if after < self._facts_seq:
                answer["facts"] = self._facts()
            return answer

    def rank_curves(self, metric: str, *, step: int = 1) -> dict[str, Any]:
        """Return the values of a metric by rank, of every ``step``-th iteration; those are left out where all ranks have all."""
        with self._lock:
            curves: dict[str, Any] = {}
            for rank, columns in sorted(self._ranks.items()):
                if metric not in columns.numbers:
                    continue
                curves[str(rank)] = {"y": encode(columns.numbers[metric][::step])}
                if columns.iterations != self._results.iterations:
                    curves[str(rank)]["x"] = encode(columns.iterations[::step])
            return {"step": step, "curves": curves}

    def time_used(self) -> dict[str, Any]:
        """Read what is new, and return what the time was used for.

        It is what `summarize` returns, with ``words``: those of each use, in their order; and ``is_final``: it will not change.
        Of a live run, it is added up again after a while that is long against what that takes. Errors as for `read`.
        """
        with self._lock:
            with reading(self.folder):
                self._update(_BUDGET_S)
            is_live = self._state() in ("live", "paused")
            if (self._time_seq != self._seq or is_live) and time.monotonic() >= self._time_again_at:
                began = time.thread_time()
                evidence = Evidence.of([*self._kept, *([now_event()] if is_live else [])])
                self._time, self._time_seq = {**summarize(evidence), "words": WORDS}, self._seq
                took_s = time.thread_time() - began
                self._time_again_at = time.monotonic() + max(_TIME_EVERY_S, _TIME_FACTOR * took_s)
            return {**self._time, "is_final": self._is_closed and self._time_seq == self._seq}

    def ranges(self, budget_s: float | None = None) -> dict[str, list[float]] | None:
        """Read what is new, and return the lowest and the highest finite value of each metric. Errors as for `read`.

        Args:
            budget_s: Seconds for reading. The answer is None if there is more to read then.
        """
        with self._lock:
            with reading(self.folder):
                self._update(budget_s)
            if self._is_behind:
                return None
            columns = {name: np.asarray(column) for name, column in self._results.numbers.items()}
            finite = {name: column[np.isfinite(column)] for name, column in columns.items()}
            return {name: [float(found.min()), float(found.max())] for name, found in finite.items() if found.size}

    @property
    def name(self) -> str:
        """The run's name for people."""
        return run_name(self.folder)

    def image_names(self) -> list[str]:
        """Return the names of the images that were reported, newest first."""
        with self._lock:
            texts = [(at, text) for found in self._results.texts.values() for at, text in found.items()]
        return list(dict.fromkeys(name for _, text in sorted(texts, reverse=True) for name in image_names(text)))

    def output(self) -> OutputTimes:
        """Read what is new, and return what is known of the output of workers. Errors as for `read`."""
        with self._lock:
            with reading(self.folder):
                self._update()
            return self._output

    def rank_step(self) -> int:
        """Return which iterations of single ranks a file gets: every ``n``-th, so that it does not become too large."""
        with self._lock:
            total = sum(len(columns) * len(columns.numbers) for columns in self._ranks.values())
            return 1 + total // MAX_RANK_VALUES

    # -- reading ------------------------------------------------------------------------------------------------------

    def _update(self, budget_s: float | None = None, *, is_final: bool = False) -> None:
        """Read what is new, or as much of it as there is time for."""
        ends_at = math.inf if budget_s is None else time.monotonic() + budget_s
        self._read_more(is_final=is_final)
        while self._is_behind and time.monotonic() < ends_at:
            self._read_more(is_final=is_final)

    def _read_more(self, *, is_final: bool) -> None:
        self._pending += self._tail.read(max_bytes=_READ_BYTES, is_final=is_final)
        self._seq, self._is_closed, self._is_behind = self._tail.last_seq, self._tail.is_closed, self._tail.is_behind
        if self._description is None and self.folder.exists("run.json"):
            self._description = read_description(self.folder)
            self._merger = RoundMerger(check_reduce(self._description.get("reduce")))
            self._facts_seq = self._seq + 1
        # Results need run.json, which is written when the first group is ready.
        has_reports = any(frame.kind == frames.REPORTS for frame in self._pending)
        if self._description is not None or is_final or self._is_closed or not has_reports:
            pending, self._pending = self._pending, []
            for frame in pending:
                self._add(frame)
            self._put_results()

    def _add(self, frame: Frame) -> None:
        if frame.kind != frames.REPORTS:
            self._facts_seq = frame.seq
        if frame.kind == frames.EVENT:
            self._add_event(frame.data["kind"], frame.data["timestamp"], frame.data["data"])
        elif frame.kind == frames.ATTEMPT:
            self._put_results()  # the iterations of each call ascend
            self._last_iteration = frame.data.get("iterations_before", 0)
        if found := list(self._merger.feed(frame)):
            self._last_iteration = found[-1]["training_iteration"]
            self._new += found
            self._changes.append((frame.seq, found[0]["training_iteration"]))
        if frame.kind == frames.RUN_END:
            self._put_results()
            self._end = frame.data
            if self._state() == "done" and self._drop_undone():
                self._changes.append((frame.seq, self._last_iteration + 1))
        if len(self._new) >= _MAX_UNSORTED:
            self._put_results()

    def _drop_undone(self) -> bool:
        """Drop iterations that a failure undid and that were not repeated, as `raysgd.load_run` does; whether there were any."""
        for columns in self._ranks.values():
            columns.drop_after(self._last_iteration)
        return self._results.drop_after(self._last_iteration)

    def _put_results(self) -> None:
        """Sort the new results into columns."""
        new, self._new = self._new, []
        if not new:
            return
        self._last_time = max(self._last_time, *(result["timestamp"] for result in new))
        iterations = [result["training_iteration"] for result in new]
        if self._results.put_all(iterations, [_flat(result) for result in new]):  # all rows have changed
            self._changes = [(self._changes[-1][0], 0)]
        by_rank: dict[int, tuple[list[int], list[dict[str, Any]]]] = {}
        for iteration, result in zip(iterations, new, strict=True):
            if result["world_size"] == 1:
                continue
            for rank, metrics in zip(result.ranks, result.workers, strict=True):
                found = by_rank.setdefault(rank, ([], []))
                found[0].append(iteration)
                found[1].append(_flat(metrics))
        for rank, (made, reported) in by_rank.items():
            if rank not in self._ranks:
                self._ranks[rank] = Columns(keeps_texts=False)
            self._ranks[rank].put_all(made, reported)

    def _add_event(self, kind: str, timestamp: float, data: Mapping[str, Any]) -> None:
        self._last_time = max(self._last_time, timestamp)
        self._first_time = self._first_time or timestamp
        self._timeline.add(kind, timestamp, data)
        event = Event(kind, timestamp, dict(data))
        self._output.add(event)
        self._kept.add(event)
        if kind == "sample":
            rank = data["rank"]
            if rank not in self._samples:
                self._samples[rank] = Samples()
            self._samples[rank].add(timestamp, data)
        elif kind in ("paused", "resumed"):
            self._is_paused = kind == "paused"
        elif kind == "warning":
            self._num_warnings += 1
            if len(self._warnings) < MAX_WARNINGS:
                self._warnings.append(clip(str(data.get("message", "")), _MAX_TEXT))

    # -- answers ------------------------------------------------------------------------------------------------------

    def _state(self) -> str:
        outcome = None if self._end is None else str(self._end.get("kind", "done"))
        return state_by_files(outcome, is_paused=self._is_paused, last_s=self._last_time)

    def _first_changed(self, after: int) -> int | None:
        """Return the place of the first row that a frame after this one changed; None: there is none."""
        later = self._changes[bisect.bisect_right(self._changes, (after, 1 << 62)) :]
        if not later:
            return None
        return self._results.first_place(min(iteration for _, iteration in later))

    def _encode_results(self, place: int) -> dict[str, Any]:
        results = self._results
        first = results.iterations[place] if place < len(results) else self._last_iteration + 1
        texts = {
            name: [[at, text] for at, text in found.items() if at >= first] for name, found in results.texts.items()
        }
        return {
            "from": first,
            "iterations": encode(results.iterations[place:]),
            "columns": {
                name: encode(column[place:], is_time=name == "timestamp") for name, column in results.numbers.items()
            },
            "nonfinite": {name: _first_nonfinite(found) for name, found in results.nonfinite.items() if found},
            "texts": {name: found for name, found in texts.items() if found},
            "ranks": sorted(self._ranks),
            "step": results.step,
        }

    def _facts(self) -> dict[str, Any]:
        description = self._description or {}
        settings = {name: value for name, value in description.items() if name not in _NOT_SETTINGS}
        return {
            "name": self.name,
            "run_dir": self.folder.path_of(""),
            "started": description.get("started") or self._first_time,
            "config": as_texts(description.get("config", {})),
            "settings": as_texts(settings),
            "versions": as_texts(description.get("versions", {})),
            "workers": [
                f"rank {worker.get('rank')}: {worker.get('hostname') or '?'} ({worker.get('node_ip') or '?'}), "
                f"pid {worker.get('pid')}, GPUs {worker.get('gpu_ids') or 'none'}"
                for worker in description.get("workers", [])
            ],
            "warnings": self._warnings,
            "num_warnings": self._num_warnings,
            "samples": {str(rank): samples.to_json() for rank, samples in sorted(self._samples.items())},
            "error": self._error(),
            "timeline": self._timeline.to_json(),
        }

    def _error(self) -> dict[str, Any] | None:
        if self._end is None or self._end.get("kind") not in ("error", "cancelled"):
            return None
        end = self._end
        return {
            "title": str(end.get("summary") or end.get("error_type") or end.get("kind")),
            "message": str(end.get("message") or ""),
            "rank": end.get("rank"),
            "ranks": end.get("ranks", []),
            "node": str(end.get("node") or ""),
            "traceback": str(end.get("traceback") or ""),
            "followed": [[rank, str(line)] for rank, line in end.get("followed", [])],
        }


class Samples:
    """The load of one worker over time, with at most `MAX_SAMPLES` points."""

    def __init__(self) -> None:
        self._times = array("d")
        self._loads = {name: array("d") for name in _LOADS}
        self._every = 1
        self._count = 0

    def add(self, timestamp: float, data: Mapping[str, Any]) -> None:
        """Add a sample; where there are too many, every second one is removed."""
        self._count += 1
        if (self._count - 1) % self._every:
            return
        self._times.append(timestamp)
        for name, column in self._loads.items():
            value = data.get(name)
            column.append(float("nan") if value is None else float(value))
        if len(self._times) > MAX_SAMPLES:
            self._every *= 2
            self._times = self._times[::2]
            self._loads = {name: column[::2] for name, column in self._loads.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the columns that have any value."""
        found = {name: encode(column) for name, column in self._loads.items() if any(v == v for v in column)}
        return {"time": encode(self._times, is_time=True), **found}


def as_texts(tree: Any) -> dict[str, str]:
    """Return the leaves of a tree of dicts as texts, by names such as ``optimizer.lr``."""
    if not isinstance(tree, Mapping):
        return {"": _text(tree)}
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{key}.{name}": text for name, text in as_texts(value).items()}
        else:
            found[str(key)] = _text(value)
    return found


def _flat(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics that were decoded from JSON by their names; most have no groups."""
    return flatten(metrics) if dict in map(type, metrics.values()) else metrics


def _text(value: Any) -> str:
    return clip(value if isinstance(value, str) else json.dumps(value, default=str), _MAX_TEXT)


def _first_nonfinite(found: dict[int, str]) -> dict[str, Any]:
    first = sorted(found.items())[:200]
    return {"count": len(found), "first": [[iteration, text] for iteration, text in first]}
