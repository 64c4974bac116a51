"""The steps of all ranks on one clock, with what happened in the run, as trace events for Perfetto. Pure.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from raysgd.goodput.ledger import ENDING, PAUSED, RECOVERING, REGROUPING, STARTING, WORDS, Ledger
from raysgd.goodput.spans import RankSteps
from raysgd.result import Event
from raysgd.viewer.timeline import describe

#: How many steps a trace has if none are asked for.
NUM_NEWEST = 100
#: Events that are shown as spans, or that are the begin and end of what the tracks of ranks show.
_SPANS = frozenset({"checkpoint", "attempt_start", "worker_up", "entered", "left", "sample", "checkpoint_deleted"})
#: The uses in words; the ledger divides waiting further.
_WORDS = {**WORDS, "waiting": "waiting for other ranks"}
#: What ranks do outside train_func, and the events that end it for all of them.
_OUTSIDE = frozenset({STARTING, RECOVERING, REGROUPING, PAUSED, ENDING})
_ENDS = frozenset({"failure", "controller_restart", "regroup", "paused", "run_end"})
#: The process of the trace that stands for the run, before those of the ranks; and the one thread that each has.
_RUN_PID, _TID = 0, 1


def count_before(ranks: Sequence[RankSteps]) -> int:
    """Return how many steps the run had made when this attempt began: those up to the checkpoint that it began from.

    A checkpoint counts reports. If a report follows several steps, as many came before the attempt for each report as in it.
    """
    ratios = [(step.number - 1) / step.reports for rank in ranks for step in rank.steps if step.reports]
    return round(ranks[0].iterations_before * max(1.0, min(ratios, default=1.0)))


def distance(steps: Iterable[int], first: int, last: int) -> int:
    """Return how far the nearest of some steps is from those from ``first`` to ``last``."""
    return min(max(first - step, step - last, 0) for step in steps)


def choose_steps(kept: Sequence[int], first: int, last: int) -> list[int]:
    """Return the kept steps from ``first`` to ``last``; if there are none, as many that are nearest to them."""
    found = [step for step in kept if first <= step <= last]
    nearest = sorted(kept, key=lambda step: distance([step], first, last))[: last - first + 1]
    return sorted(found or nearest)


def make_trace(events: Sequence[Event], ranks: Sequence[RankSteps], steps: Collection[int]) -> dict[str, Any]:
    """Return the content of a trace file.

    Args:
        events: The events of the run, oldest first.
        ranks: The kept steps of each rank in one attempt.
        steps: The numbers of the steps in the run; see `count_before`.
    """
    before, origin_s = count_before(ranks), events[0].timestamp
    clocks = _clocks(ranks)
    made: list[dict[str, Any]] = []
    begin, end = float("inf"), float("-inf")
    inside: dict[int, tuple[float, float]] = {}
    for rank in ranks:
        ahead_us = (clocks[rank.node][0] - origin_s) * 1e6
        inside[rank.rank] = rank.steps[0].start + ahead_us, rank.steps[-1].end + ahead_us
        made += _name(rank.rank + 1, f"rank {rank.rank}", rank.node)
        for step in rank.steps:
            if step.number + before not in steps:
                continue
            begin, end = min(begin, step.start + ahead_us), max(end, step.end + ahead_us)
            name = f"step {step.number + before}" if step.number else WORDS["setup"]
            details = {"attempt": rank.attempt, "reports before": rank.iterations_before + step.reports}
            made.append(_span(rank.rank + 1, name, "step", step.start + ahead_us, step.end + ahead_us, args=details))
            for use, start, stop in step.spans():
                made.append(_span(rank.rank + 1, _WORDS.get(use, use), use, start + ahead_us, stop + ahead_us))
    if any(rank.steps[0].number + before in steps for rank in ranks if not rank.steps[0].number):
        begin = min(begin, _start_of(events, ranks[0].attempt, origin_s))
    if any(rank.steps[-1].number + before in steps for rank in ranks):
        end = max(end, _entry_after(events, ranks[0].attempt, origin_s))
    made += _name(_RUN_PID, "run", "")
    made += _outside(events, origin_s, begin, end, inside)
    made += _of_run(events, origin_s, begin, end)
    errors = {node: None if error is None else error * 1e3 for node, (_, error) in clocks.items()}
    return {
        "traceEvents": sorted(made, key=lambda each: (each["ph"] != "M", each["ts"], -each.get("dur", 0))),
        "displayTimeUnit": "ms",
        "otherData": {"attempt": ranks[0].attempt, "began": origin_s, "clock_error_ms": errors},
    }


def _clocks(ranks: Sequence[RankSteps]) -> dict[str, tuple[float, float | None]]:
    """Return the clock of each node, by the best of the readings that its ranks have; all ranks of a node share its clock."""
    best: dict[str, tuple[float, float | None]] = {}
    for rank in ranks:
        known = best.get(rank.node)
        if known is None or _error(rank.error_s) < _error(known[1]):
            best[rank.node] = rank.clock_s, rank.error_s
    return best


def _error(error_s: float | None) -> float:
    return float("inf") if error_s is None else error_s


def _start_of(events: Sequence[Event], attempt: int, origin_s: float) -> float:
    """Return when an attempt, or the wait for its workers, began: at the event that ended the one before it."""
    began = origin_s
    for event in events:
        if event.kind == "attempt_start" and event.data["attempt"] == attempt:
            break
        if event.kind in _ENDS:
            began = event.timestamp
    return (began - origin_s) * 1e6


def _entry_after(events: Sequence[Event], attempt: int, origin_s: float) -> float:
    """Return when ranks entered train_func in the next attempt, or the time of the newest event."""
    for event in events:
        if event.kind == "entered" and event.data.get("attempt", 0) > attempt:
            return (event.timestamp - origin_s) * 1e6
    return (events[-1].timestamp - origin_s) * 1e6


def _outside(
    events: Sequence[Event], origin_s: float, begin: float, end: float, inside: Mapping[int, tuple[float, float]]
) -> Iterator[dict[str, Any]]:
    """Return what ranks did outside train_func from ``begin`` to ``end``; ``inside``: when each was in it."""
    for piece in Ledger.of(events).slices():
        start, stop = (piece.start - origin_s) * 1e6, (piece.end - origin_s) * 1e6
        if not piece.uses.keys() <= _OUTSIDE or start >= end or stop <= begin:
            continue
        entered, left = inside.get(piece.rank, (end, end))
        # The controller's clock and that of the rank differ by a little.
        start, stop = (start, min(stop, entered)) if start < entered else (max(start, left), stop)
        if stop > start:
            use = next(iter(piece.uses))
            yield _span(piece.rank + 1, WORDS[use], use, start, stop)


def _of_run(events: Sequence[Event], origin_s: float, begin: float, end: float) -> Iterator[dict[str, Any]]:
    """Return what happened from ``begin`` to ``end``: events and checkpoints."""
    for event in events:
        at, data = (event.timestamp - origin_s) * 1e6, event.data
        if not begin <= at <= end:
            continue
        if event.kind == "checkpoint":
            start = at - 1e6 * (data.get("seconds") or 0.0)
            same = {"name": f"checkpoint {data['number']}", "cat": "checkpoint", "id": data["number"], "pid": _RUN_PID}
            yield {**same, "ph": "b", "ts": round(start), "tid": _TID}
            yield {**same, "ph": "e", "ts": round(at), "tid": _TID}
        elif event.kind not in _SPANS:
            details = {"text": describe(event.kind, data), "ranks": data.get("ranks", [])}
            same = {"name": event.kind.replace("_", " "), "cat": "event", "pid": _RUN_PID, "tid": _TID}
            yield {**same, "ph": "i", "s": "g", "ts": round(at), "args": details}


def _name(pid: int, name: str, node: str) -> Iterator[dict[str, Any]]:
    thread = "events" if pid == _RUN_PID else "train_func"
    given = {"process_name": {"name": name}, "process_sort_index": {"sort_index": pid}, "thread_name": {"name": thread}}
    if node:
        given["process_labels"] = {"labels": node}
    for kind, details in given.items():
        yield {"ph": "M", "name": kind, "pid": pid, "tid": _TID, "ts": 0, "args": details}


def _span(pid: int, name: str, category: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    # Ends are rounded, not lengths: neighbours neither overlap nor leave a gap.
    since = round(start)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": _TID,
        "ts": since,
        "dur": round(end) - since,
    } | more
