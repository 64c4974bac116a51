"""Workers that were told to end, or whose nodes will be taken away. Pure: part of the run's machine.

All ranks are asked to leave by the two ways there are, whichever comes first: ``should_stop()`` turns true at the same
look, and they leave out of the next save (`raysgd.controller.savepoint`). Those that are preempted are ended when the
attempt is over, and the group forms anew without them. None of this is a failure, nor is it their death before that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from raysgd.controller.commands import AskToStop, Command, KillRanks, Note, SetTimer
from raysgd.controller.failure_policy import Failure
from raysgd.controller.savepoint import SavePoint
from raysgd.controller.states import Running

#: Seconds of what a node has left that are not waited for: time to end the attempt, and to write what was saved.
LEAVE_S = 5.0


class Preemption:
    """Of one attempt's ranks.

    Args:
        grace_s: Seconds to leave in, where nobody says when a process will be taken away.
        out: Where commands go.

    Attributes:
        why: What the group forms anew for; None while nobody is preempted.
        saw_stop: A rank has found ``should_stop()`` true and returned.
    """

    def __init__(self, savepoint: SavePoint, grace_s: float, out: Callable[[Command], None]) -> None:
        self._savepoint = savepoint
        self._grace_s = grace_s
        self._out = out
        self._ranks: set[int] = set()
        self._is_asked = False
        self.why: str | None = None
        self.saw_stop = False

    def note(self, running: Running, ranks: Collection[int], nodes: tuple[str, ...], why: str) -> bool:
        """These ranks are preempted; whether that is news."""
        new = sorted(set(ranks) - self._ranks)
        for rank in new:
            data = {"attempt": running.attempt, "rank": rank, "node": nodes[rank], "why": why}
            self._out(Note("preemption", data))
            self.why = self.why or f"rank {rank} is preempted: {why}"
        self._ranks.update(new)
        return bool(new)

    def ask(self, running: Running, within_s: float | None) -> None:
        """Have all ranks leave; those who do not within the time, or ``within_s``, are made to."""
        if not self._is_asked:
            self._is_asked = True
            if not self._savepoint.is_inside:
                self._out(AskToStop(running.attempt, ends_reports=False))
            self.agrees_again(running)
        delay_s = self._grace_s if within_s is None else max(0.0, within_s - LEAVE_S)
        self._out(SetTimer("preemption", running.serial, delay_s))

    def agrees_again(self, running: Running | None) -> bool:
        """Have them leave out of a save, if that is not agreed on already; whether anybody is to leave at all."""
        if running is not None and self.why is not None and self._savepoint.why is None:
            self._savepoint.want_change(running.attempt, running.serial, self.why, stops=True)
        return self.why is not None

    def explains(self, ranks: Collection[int]) -> bool:
        """Whether all of these ranks are preempted."""
        return bool(ranks) and self._ranks.issuperset(ranks)

    def excuses(self, failure: Failure, attempt: int) -> bool:
        """Whether what happened was announced; then it is told as a reason to form anew."""
        if not failure.is_announced and not self.explains(failure.ranks):
            return False
        self._out(Note("regroup", {"attempt": attempt, "why": failure.what}))
        return True

    def carry_out(self) -> None:
        """The attempt is over: end those who are preempted."""
        if self._ranks:
            self._out(KillRanks(tuple(sorted(self._ranks))))
        self._ranks.clear()
        self.why, self.saw_stop, self._is_asked = None, False, False
