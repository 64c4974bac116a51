"""`CopyInterval`: after which steps the state is copied to the cluster's memory, where no other rank holds a piece. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: The part of the training time that the copies may take.
MAX_FRACTION = 0.02
#: Seconds between two copies at least, as each costs the TrainerActor some messages for each rank.
MIN_INTERVAL_S = 1.0
#: Steps between the first copy, which takes memory that the later ones use again, and the second, which is measured.
_FIRST_INTERVAL = 10


class CopyInterval:
    """The same on all ranks, as they count the same steps and know the times of all.

    Attributes:
        steps: Steps from one copy to the next.
    """

    def __init__(self) -> None:
        self.steps = _FIRST_INTERVAL
        self._num_copies = 0
        self._last = 0
        self._last_end = 0.0

    def is_due(self, step: int) -> bool:
        """Return whether to copy the state after a step, from 1."""
        return not self._num_copies or step >= self._last + self.steps

    def measure(self, step: int, began: float, ended: float) -> tuple[float, float]:
        """Return the seconds that a copy took, and those of a step since the last copy.

        Args:
            step: The step after which it was made.
            began: When it began, in seconds.
            ended: When it was complete as far as the training waits for it.
        """
        of_step = (began - self._last_end) / max(1, step - self._last) if self._num_copies else 0.0
        self._last_end = ended
        return ended - began, of_step

    def on_copied(self, step: int, times: Sequence[tuple[float, float]]) -> None:
        """Choose the next interval, from what `measure` returned on each rank."""
        if self._num_copies:
            seconds, of_step = max(each[0] for each in times), min(each[1] for each in times)
            self.steps = math.ceil(max(seconds / MAX_FRACTION, MIN_INTERVAL_S) / max(of_step, 1e-6))
        self._num_copies += 1
        self._last = step
