"""A run that rests: its workers are given back, and it goes on from its newest checkpoint. Pure: part of the run's machine.

The ranks leave out of the same save (`raysgd.controller.savepoint`), so that nothing they have done is done again.
"""

from __future__ import annotations

from raysgd.controller.savepoint import SavePoint
from raysgd.controller.states import Running

WHY = "the run is to pause"


class Pausing:
    """Whether the run is to rest when its attempt is over.

    Attributes:
        is_wanted: It was asked for, and has not been taken back.
    """

    def __init__(self, savepoint: SavePoint) -> None:
        self._savepoint = savepoint
        self.is_wanted = False

    def ask(self, running: Running | None) -> None:
        """Have the ranks leave out of the next save; ``running`` is the attempt, if it can be left."""
        self.is_wanted = True
        self.agrees_again(running)

    def agrees_again(self, running: Running | None) -> bool:
        """Have them leave out of a save, if that is not agreed on already; whether they are to leave at all."""
        if self.is_wanted and running is not None and self._savepoint.why is None:
            self._savepoint.want(running.attempt, running.serial, WHY)
        return self.is_wanted

    def take_back(self, running: Running | None) -> None:
        """The ranks that are to leave for this alone stay; ``running`` is the attempt, if they have not left."""
        self.is_wanted = False
        if running is not None and self._savepoint.why == WHY:
            self._savepoint.call_off()
