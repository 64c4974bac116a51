"""Which complete step an attempt starts from, of those that the survivors of the last attempt hold in memory. Pure.

In each step all ranks exchange something, such as gradients. So when a rank has completed a step, all ranks have begun it, with
the rows of that step, and none is more than one step behind. What a rank draws at random it draws before it takes part in the
exchange, as a rule; `Mark.is_settled` says whether it does. So what belongs to one rank alone is known for the newest step even
if that rank died within it.

Where ranks hold pieces of the state, the step must be there with all pieces. One that only some pieces have reached is not used,
but the one before may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raysgd.session.events import HeldStep, LiveReport, Mark, StepId
from raysgd.transport import Endpoint
from raysgd.workers.orders import LiveOrder


@dataclass(frozen=True)
class LiveStart:
    """The complete step that an attempt starts from.

    Attributes:
        held: The step.
        holders: The ranks of the new attempt that hold their piece of it, or the whole state.
        world_size: The number of ranks that made the step.
        small: The small state of each of these ranks; empty if another number of ranks starts.
        sources: By piece, the rank of the new attempt from which others copy it, and where.
        num_repeated: Steps that some rank had begun after it.
    """

    held: HeldStep
    holders: tuple[int, ...]
    world_size: int
    small: Mapping[int, bytes] = field(default_factory=dict)
    sources: Mapping[int, tuple[int, Endpoint | None]] = field(default_factory=dict)
    num_repeated: int = 1

    @property
    def id(self) -> StepId:
        return self.held.id

    @property
    def origin(self) -> str:
        """The ranks from whose memory the state comes, for the user."""
        ranks = sorted({rank for rank, _ in self.sources.values()})
        return f"the memory of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    def order_for(self, rank: int) -> LiveOrder:
        """Return the order for a rank that starts from the step."""
        piece = self.held.pieces[rank] if self.held.pieces else 0
        endpoint = None if rank in self.holders else self.sources[piece][1]
        return LiveOrder(replace(self.held, piece=piece), self.small.get(rank), endpoint)


@dataclass(frozen=True)
class CopiedStart:
    """The complete step whose copies in the cluster's memory an attempt starts from.

    Attributes:
        id: The step.
        num_repeated: Steps that some rank had begun after it.
    """

    id: StepId
    num_repeated: int
    origin: str = "memory copies"


def describe_continuation(start: LiveStart | CopiedStart, lost: Sequence[int], seconds: float) -> dict[str, Any]:
    """Return the record of how training continued, with one line for the user.

    Args:
        start: Where it continued.
        lost: The ranks whose processes died; empty if the ranks left for another reason.
        seconds: From then until all ranks had entered train_func again.
    """
    num_repeated = start.num_repeated
    ranks = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} died; " if lost else ""
    steps = "one step" if num_repeated == 1 else f"{num_repeated} steps"
    why = f"continued after {seconds:.2f} s from {start.origin}, {steps} repeated, nothing read from storage"
    source = min(rank for rank, _ in start.sources.values()) if isinstance(start, LiveStart) else None
    fields = {"step": list(start.id), "source": source, "num_repeated": num_repeated}
    return {"why": ranks + why, "ranks": list(lost), "seconds": seconds, **fields}


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
        problems = [each.problem for each in reports.values() if each.problem is not None]
        return problems[0] if problems else "no rank is left that held the state of a complete step"
    problems = []
    for place in sorted({(each.id, each.place) for each in held.values()}, reverse=True):
        of_step = {rank: each for rank, each in held.items() if (each.id, each.place) == place}
        found = _choose(of_step, attempt, marks, start, old_size=old_size, new_size=new_size)
        if isinstance(found, LiveStart):
            sources = {of_step[rank].piece: (rank, reports[rank].endpoint) for rank in sorted(of_step, reverse=True)}
            return replace(found, sources=sources)
        problems.append(found)
    return problems[0]


def _choose(
    held: Mapping[int, HeldStep],
    attempt: int,
    marks: Mapping[int, Sequence[Mark]],
    start: LiveStart | None,
    *,
    old_size: int,
    new_size: int,
) -> LiveStart | str:
    """Return the start from one step that some ranks hold, if all ranks can start there; or why they cannot."""
    newest = max(held.values(), key=lambda each: each.iteration)
    pieces = newest.pieces or (0,) * old_size
    step = newest.id.step if newest.id.attempt == attempt else 0
    if newest.pieces and new_size != len(pieces):
        return f"the state is divided among {len(pieces)} ranks, and {new_size} ranks start"
    there = {each.piece for each in held.values()}
    if missing := [str(rank) for rank, piece in enumerate(pieces) if piece not in there]:
        return f"no rank is left that held the piece of rank {', '.join(missing)} after step {step}"
    holders = [rank for rank, each in held.items() if not newest.pieces or each.piece == pieces[rank]]
    furthest = {rank: max((mark.step for mark in given), default=0) for rank, given in marks.items()}
    if (first := max(furthest.values(), default=0)) > step + 1:
        return f"a rank had completed step {first}, and those that are left hold step {step}"
    if late := [rank for rank, last in sorted(furthest.items()) if last < step - 1]:
        return f"ranks {late} had completed less than step {step - 1} when others completed step {step}"
    small: dict[int, bytes] = {}
    if new_size == old_size:
        for rank in range(old_size):
            own = start.small.get(rank) if start is not None and not step else _small_at(marks.get(rank, ()), step)
            if own is None:
                return f"the random number generators of rank {rank} after step {step} are not known"
            small[rank] = own
    return LiveStart(newest, tuple(sorted(holders)), old_size, small, {}, max(1, first - step))


def _small_at(marks: Sequence[Mark], step: int) -> bytes | None:
    """Return what belongs to a rank alone after a step that others have completed; None if it is not known."""
    for mark in reversed(marks):
        if mark.step == step and not mark.is_in_step:
            return mark.small
    last = marks[-1] if marks else None
    is_after_pass = last is not None and last.is_in_step and last.step == step - 1
    return last.small if last is not None and is_after_pass and last.is_settled else None
