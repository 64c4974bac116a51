"""What the ranks of a `support.run_fuzz.RunFuzz` train, step by step, and a check that a run's files have every report once."""

from __future__ import annotations

from collections.abc import Set
from itertools import pairwise
from typing import Any

from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.rounds import merge_results
from raysgd.session import events as e
from raysgd.testing.record import History
from support.simulated_workers import SimulatedRank
from support.simulation import reports, saved


class StepLog:
    """The steps of a training that resumes from its checkpoints: report i of an attempt is of step i after its start.

    A loop that saves before it reports resumes after the step of the report that follows the save, if it made that report.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}  # by attempt, the steps before it
        self._starts: dict[int, int] = {}  # by attempt, the checkpoint that it starts from; 0: none
        self._saved: dict[
            int, tuple[int, int, bool]
        ] = {}  # by checkpoint: steps and reports before, whether it comes first
        self._closed: set[tuple[int, int]] = set()  # checkpoints, and the reports that follow them

    def begin(self, entered: c.StartAttempt) -> None:
        """An attempt begins."""
        start = entered.start
        self._starts[entered.attempt] = start.number
        self._before[entered.attempt] = self.steps_until(start.number) if start.number else start.iteration
        for number in [number for number in self._saved if number >= entered.first_number]:
            del self._saved[number]  # a number that no checkpoint was made of is used again
        self._closed = {each for each in self._closed if each[0] < entered.first_number}

    def steps_until(self, number: int) -> int:
        """Return the steps that are part of a checkpoint."""
        before, num_reports, saves_first = self._saved[number]
        return before + num_reports + (saves_first and (number, num_reports) in self._closed)

    def save(self, entered: c.StartAttempt, rank: SimulatedRank, call: int) -> e.Saved:
        """Return the event of a rank's save; rank 0 gives the state."""
        if rank.number == 0:
            made = self._before[entered.attempt], rank.num_reports, rank.saves_first
            self._saved[entered.first_number + call] = made
        own = None if rank.saves_first else _metrics(self._before[entered.attempt] + rank.num_reports)
        return saved(call, rank.num_reports, own, awaits_round=rank.saves_first)

    def report(self, entered: c.StartAttempt, rank: SimulatedRank, count: int) -> e.Reports:
        """Return a rank's next reports."""
        first, before = rank.num_reports, self._before[entered.attempt]
        if rank.unscored is not None:
            self._closed.add((entered.first_number + rank.unscored, first))
        rows: list[Any] = [[0.0, 0.0, _metrics(before + index + 1)] for index in range(first, first + count)]
        return reports(first, count, rows, rank.unscored)

    def check(self, history: History) -> None:
        """Check the metrics and the checkpoints that readers of the run's files get."""
        kinds = [frame.kind for frame in history.frames]
        results = merge_results(history.frames, {}, is_done=history.outcome.get("kind") == "done")
        for before, after in pairwise(results):
            assert after["training_iteration"] == before["training_iteration"] + 1
            assert after["step"] > before["step"], "a report has the iteration of another one"
        needed = self._needed(history)
        lost = needed - {result["step"] for result in results}
        assert not lost, f"the reports of steps {sorted(lost)} are in the journal, and have no iteration"
        assert frames.RUN_CLOSED in kinds
        for number, stored in history.stored.items():
            self._check_score(history, number, stored.manifest)

    def _needed(self, history: History) -> set[int]:
        """Return the steps whose reports are on storage, and which no later attempt made again."""
        made: list[Frame] = []
        kept: dict[int, int | None] = {}
        for frame in history.frames:
            if frame.kind == frames.ATTEMPT_END:
                kept.setdefault(frame.attempt, frame.data["keep_rounds"])
            elif frame.kind == frames.REPORTS and frame.attempt not in kept:
                made.append(frame)
        known = {(number, report) for frame in made for report, number in frame.data.get("closes", ())}
        needed: set[int] = set()
        for frame in made:
            first, count = self._before[frame.attempt] + frame.data["first"], frame.data["count"]
            limits = [self._limit(attempt, known) for attempt in self._before if attempt > frame.attempt]
            if not limits and (keep := kept.get(frame.attempt)) is not None:  # rounds that some ranks made are left out
                limits = [self._before[frame.attempt] + keep]
            needed |= {step for step in range(first + 1, first + count + 1) if step <= min(limits, default=step)}
        return needed

    def _limit(self, attempt: int, known: Set[tuple[int, int]]) -> int:
        """Return the step up to which the reports before an attempt count; the last one may be in no file."""
        start = self._starts[attempt]
        _, num_reports, saves_first = self._saved.get(start, (0, 0, False))
        is_lost = saves_first and (start, num_reports) in self._closed - known
        return self._before[attempt] - is_lost

    def _check_score(self, history: History, number: int, manifest: Any) -> None:
        before, num_reports, saves_first = self._saved[number]
        if manifest.metrics:
            assert manifest.metrics == _metrics(before + num_reports + saves_first)
        if not manifest.awaits_round:
            return
        ended: set[int] = set()
        for frame in history.frames:
            if frame.kind == frames.ATTEMPT_END:
                ended.add(frame.attempt)
            elif frame.kind == frames.REPORTS and frame.attempt == manifest.attempt and frame.attempt not in ended:
                assert [num_reports, number] not in frame.data.get("closes", ()), f"checkpoint {number} lacks its round"


def _metrics(step: int) -> dict[str, int]:
    return {"step": step, "loss": step % 3}
