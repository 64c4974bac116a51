"""Which complete step an attempt starts from, of those that the survivors of the last attempt hold in memory. Pure.

In each step all ranks exchange something, such as gradients. So when a rank has completed a step, all ranks have begun it, with
the rows of that step, and none is more than one step behind. What a rank draws at random it draws before it takes part in the
exchange, as a rule; `Mark.is_settled` says whether it does. So what belongs to one rank alone is known for the newest step even
if that rank died within it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raysgd.session.events import Mark

#: The marks of a rank that may be needed: after the chosen step and the one after it, and after passes in the steps that follow.
NUM_MARKS = 5


class StepId(NamedTuple):
    """A step: the number of its attempt, and how many steps of that attempt are complete with it. Later ones are greater."""

    attempt: int
    step: int


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
    """What a process that took part in the last attempt says of its live state.

    Attributes:
        rank: Its rank in that attempt.
        attempt: The number of that attempt.
        marks: Its last marks, oldest first.
        held: The step that it holds; None if its state was being changed when it left train_func.
        endpoint: Where others can copy the state from.
    """

    rank: int
    attempt: int
    marks: tuple[Mark, ...] = ()
    held: HeldStep | None = None
    endpoint: Any = None


@dataclass(frozen=True)
class LiveStart:
    """The complete step that an attempt starts from.

    Attributes:
        held: The step.
        holders: The ranks of the new attempt that hold it. The first one is the source of the others.
        world_size: The number of ranks that made the step.
        small: The small state of each of these ranks; empty if another number of ranks starts.
        endpoint: Where to copy the state from.
        num_repeated: Steps that some rank had begun after it.
    """

    held: HeldStep
    holders: tuple[int, ...]
    world_size: int
    small: Mapping[int, bytes] = field(default_factory=dict)
    endpoint: Any = None
    num_repeated: int = 1


def choose_step(
    attempt: int,
    reports: Mapping[int, LiveReport],
    of_dead: Mapping[int, Sequence[Mark]],
    start: LiveStart | None,
    *,
    old_size: int,
    new_size: int,
) -> LiveStart | str:
    """Return the newest complete step that all ranks can start from, or why there is none.

    Args:
        attempt: The number of the last attempt.
        reports: By the rank in the next attempt; processes that have nothing to say have none.
        of_dead: The marks of the ranks whose processes died, by their rank in the last attempt.
        start: The complete step that the last attempt started from, if it was one.
        old_size: The number of ranks of the last attempt.
        new_size: The number of ranks of the next one.
    """
    marks = {rank: tuple(given) for rank, given in of_dead.items()}
    marks |= {report.rank: report.marks for report in reports.values() if report.attempt == attempt}
    known = {None if start is None else start.held.id}
    held = {rank: report.held for rank, report in reports.items() if report.held is not None}
    held = {rank: each for rank, each in held.items() if each.id.attempt == attempt or each.id in known}
    if not held:
        return "no rank is left that held the state of a complete step"
    newest = max(held.values(), key=lambda each: (each.id, each.iteration))
    holders = tuple(sorted(rank for rank, each in held.items() if each.id == newest.id))
    furthest = {rank: max((mark.step for mark in given), default=0) for rank, given in marks.items()}
    step = newest.id.step if newest.id.attempt == attempt else 0
    if (first := max(furthest.values(), default=0)) > step + 1:
        return f"a rank had completed step {first}, and those that are left hold step {step}"
    if late := [rank for rank in range(old_size) if furthest.get(rank, 0) < step - 1]:
        return f"ranks {late} had completed less than step {step - 1} when others completed step {step}"
    small: dict[int, bytes] = {}
    if new_size == old_size:
        for rank in range(old_size):
            own = start.small.get(rank) if start is not None and not step else _small_at(marks.get(rank, ()), step)
            if own is None:
                return f"the random number generators of rank {rank} after step {step} are not known"
            small[rank] = own
    endpoint = reports[holders[0]].endpoint
    return LiveStart(newest, holders, old_size, small, endpoint, max(1, first - step))


def _small_at(marks: Sequence[Mark], step: int) -> bytes | None:
    """Return what belongs to a rank alone after a step that others have completed; None if it is not known."""
    for mark in reversed(marks):
        if mark.step == step and not mark.is_in_step:
            return mark.small
    last = marks[-1] if marks else None
    is_after_pass = last is not None and last.is_in_step and last.step == step - 1
    return last.small if last is not None and is_after_pass and last.is_settled else None
