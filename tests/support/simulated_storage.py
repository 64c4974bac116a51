"""The storage of a `support.simulation.SimulatedRun`: a TrainerActor may die between any two writes."""

from __future__ import annotations

from collections import deque

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.controller import commands as c
from support.simulation import SimulatedRun


class SimulatedStorage:
    """The checkpoints on storage, the writes that are requested, and how much of the journal is written.

    Attributes:
        checkpoints: By number.
    """

    def __init__(self) -> None:
        self.checkpoints: dict[int, Manifest] = {}
        self._requested: deque[tuple[int, c.Command]] = deque()  # with the length of the journal then
        self._num_flushed = 0  # frames of the journal that are written, at least

    def request(self, run: SimulatedRun, command: c.Command) -> None:
        """Request a write; the storage sees the writes in this order."""
        self._requested.append((len(_journal(run.commands)), command))

    def flush(self, run: SimulatedRun, before: c.Command | None = None) -> None:
        """Write the frames of the journal, or those before a command."""
        until = len(run.commands) if before is None else run.commands.index(before)
        self._num_flushed = len(_journal(run.commands[:until]))

    def write(self, count: int | None = None) -> None:
        """Make the oldest writes; None: all. The journal is flushed before each."""
        for _ in range(len(self._requested) if count is None else min(count, len(self._requested))):
            length, command = self._requested.popleft()
            self._num_flushed = max(self._num_flushed, length)
            if isinstance(command, c.DeleteCheckpoint):
                self.checkpoints.pop(command.number, None)
                continue
            assert isinstance(command, (c.CommitCheckpoint, c.WriteRound))
            if isinstance(command, c.CommitCheckpoint) or command.manifest.number in self.checkpoints:
                self.checkpoints[command.manifest.number] = command.manifest

    def answer(self, commit: c.CommitCheckpoint, *, succeeds: bool) -> None:
        """Make a write, or refuse it, after those that were requested before."""
        self.write([command for _, command in self._requested].index(commit))
        if succeeds:
            self.write(1)
        else:
            self._requested.popleft()

    def die(self, run: SimulatedRun, flushed: float) -> list[c.Command]:
        """Lose what the TrainerActor had not written; removes these frames from the run, and returns them.

        Args:
            run: The run.
            flushed: How much is written of what the journal got since its last flush.
        """
        self._requested.clear()
        journal = _journal(run.commands)
        self._num_flushed += int(flushed * (len(journal) - self._num_flushed))
        lost = journal[self._num_flushed :]
        numbers = {id(command) for command in lost}
        run.commands[:] = [command for command in run.commands if id(command) not in numbers]
        return lost


def _journal(commands: list[c.Command]) -> list[c.Command]:
    return [command for command in commands if isinstance(command, (c.EmitFrame, c.RecordEvent))]
