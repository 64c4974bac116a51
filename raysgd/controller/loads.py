"""What ranks are told that ask for the newest checkpoint during an attempt. Pure.

They ask at different times, and training must not go on from different states: the k-th answer is the same for all. A
checkpoint that was an answer is not deleted before every rank has had the time to read it.
"""

from __future__ import annotations


class LoadAnswers:
    """The answers of one attempt, and the deletions that wait for them.

    Args:
        first_number: Number of the checkpoint that the attempt's first save makes.
    """

    def __init__(self, first_number: int = 1) -> None:
        self._first_number = first_number
        self._answers: dict[int, int | None] = {}
        self._needed_before: dict[int, int] = {}  # number of the first checkpoint saved after it was read
        self._committed = 0
        self._held: set[int] = set()

    def answer(self, index: int, num_saves: int, newest: int | None) -> int | None:
        """The answer to the ``index``-th question, before which each rank saves ``num_saves`` times.

        It is ``newest`` for the rank that asks first, and the same for the others.
        """
        number = self._answers.setdefault(index, newest)
        if number is not None:
            self._needed_before[number] = max(self._needed_before.get(number, 0), self._first_number + num_saves)
        return number

    def may_go(self, number: int) -> bool:
        """Whether a checkpoint can be deleted now; if not, `committed` or `end` gives it back."""
        if self._needed_before.get(number, 0) <= self._committed:
            return True
        self._held.add(number)
        return False

    def committed(self, number: int) -> list[int]:
        """All ranks made the save ``number``, so they have read what they asked for before it; what can go now."""
        self._committed = max(self._committed, number)
        return self._let_go({held for held in self._held if self._needed_before[held] <= self._committed})

    def end(self) -> list[int]:
        """The attempt is over; what can go now."""
        return self._let_go(set(self._held))

    def _let_go(self, numbers: set[int]) -> list[int]:
        self._held -= numbers
        return sorted(numbers)
