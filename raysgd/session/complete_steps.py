"""The records of complete steps, whose states are in the memory of workers; see `raysgd.session.live`. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raysgd.transport import Endpoint

#: The marks of a rank that may be needed: after the chosen step and the one after it, and after passes in the steps that follow.
NUM_MARKS = 5


class StepId(NamedTuple):
    """A step: the number of its attempt, and how many steps of that attempt are complete with it. Later ones are greater."""

    attempt: int
    step: int


@dataclass(frozen=True)
class Mark:
    """How far a rank is.

    Attributes:
        step: Complete steps of the attempt.
        small: The small state that belongs to this rank alone, as JSON; None: as in the mark before.
        is_in_step: The forward pass of the next step is over; ``small`` is the state after it.
        is_settled: In no step so far, and there was one, has the small state changed after the forward pass.
    """

    step: int
    small: bytes | None
    is_in_step: bool = False
    is_settled: bool = False


@dataclass(frozen=True)
class HeldStep:
    """A complete step whose whole state is in a worker's memory, unchanged since.

    Attributes:
        iteration: Rounds of the run up to the step.
        num_saves: Calls of ``save_checkpoint`` in the attempt up to the step.
        positions: The positions in the datasets, which are the same on all ranks.
    """

    id: StepId
    iteration: int = 0
    time_total_s: float = 0.0
    num_saves: int = 0
    positions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveReport:
    """What a process that took part in the last attempt of the run has.

    Attributes:
        rank: Its rank in that attempt.
        attempt: The number of that attempt.
        marks: Its last marks, oldest first.
        held: The step that it holds; None if its state was being changed when it left train_func.
        endpoint: Where other workers can copy the state from.
    """

    rank: int
    attempt: int
    marks: tuple[Mark, ...] = ()
    held: HeldStep | None = None
    endpoint: Endpoint | None = None
