"""All ranks leave an attempt out of the same save, once it is committed. Pure: part of the run's machine.

The steps: a reason arises (`want`); the ranks agree on a save that none of them has begun (`AgreeOnSave`, see
`raysgd.session.savegate`); each says when it waits there (`reached`); the checkpoint is committed; the attempt ends. A rank
that does not come there although the checkpoint is committed may wait for those who do, so it is not waited for for long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from raysgd.controller.commands import AgreeOnSave, CallOffSave, ChangeGroup, Command, SetTimer

#: Seconds for the last ranks to reach the place, once the checkpoint is committed.
REACH_S = 2.0
#: Seconds after a save that could not be written, before another one is agreed on.
AGAIN_S = 1.0


class SavePoint:
    """One agreement at a time.

    Args:
        out: Where commands go.

    Attributes:
        is_inside: train_func leaves its group by itself when it is told that this is to change, and makes no save for it.
        why: What the attempt is left for; None while there is no agreement.
    """

    def __init__(self, out: Callable[[Command], None], *, is_inside: bool = False) -> None:
        self._out = out
        self.is_inside = is_inside
        self.why: str | None = None
        self._attempt = 0
        self._serial = 0
        self._number: int | None = None  # of the checkpoint agreed on, known when the first rank waits
        self._reached: set[int] = set()
        self._committed: set[int] = set()
        self._failed: set[int] = set()
        self._is_late = False

    def want(self, attempt: int, serial: int, why: str) -> None:
        """Have the ranks of the attempt agree on a save. ``serial``: of its group."""
        self.forget()
        self.why, self._attempt, self._serial = why, attempt, serial
        self._out(AgreeOnSave(attempt))

    def want_change(self, attempt: int, serial: int, why: str, *, stops: bool = False) -> None:
        """Have the ranks of the attempt leave for another group, as they do it best. ``stops``: by ``should_stop()`` too."""
        if self.is_inside:
            self.forget()
            self.why, self._attempt, self._serial = why, attempt, serial
            self._out(ChangeGroup(attempt, stops))
        else:
            self.want(attempt, serial, why)

    def reached(self, rank: int, number: int) -> None:
        """A rank waits, having made the save of checkpoint ``number``."""
        if self.why is None:  # called off meanwhile; it hears of that
            return
        self._reached.add(rank)
        if self._number is None:
            self._number = number
            self._look()

    def committed(self, number: int) -> None:
        """A checkpoint is on storage."""
        if self.why is not None:
            self._committed.add(number)
            self._look()

    def failed(self, number: int) -> None:
        """A checkpoint will never be."""
        if self.why is not None:
            self._failed.add(number)
            self._look()

    def reaching_took_too_long(self) -> None:
        """Wait for no further rank."""
        self._is_late = self._is_there()

    def call_off(self) -> None:
        """The ranks that wait go on, and the others pass."""
        if self.why is not None:
            self._out(CallOffSave(self._attempt))
        self.forget()

    def is_due(self, inside: Collection[int]) -> bool:
        """Whether to end the attempt now: the checkpoint is there, and so are the ranks that are inside."""
        return self._is_there() and (self._is_late or set(inside) <= self._reached)

    def forget(self) -> None:
        """The attempt is over."""
        self.why, self._number, self._is_late = None, None, False
        for known in (self._reached, self._committed, self._failed):
            known.clear()

    def _is_there(self) -> bool:
        return self.why is not None and self._number in self._committed

    def _look(self) -> None:
        if self._number in self._failed:
            self.call_off()
            self._out(SetTimer("grow", self._serial, AGAIN_S))
        elif self._is_there():
            self._out(SetTimer("savepoint", self._serial, REACH_S))
