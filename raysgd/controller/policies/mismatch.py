"""Which ranks wait in collectives that other ranks do not join. Pure.

A rank waits if a collective that it has begun is not done and its thread is blocked; see `raysgd.workers.orders.Position`.
Whom it waits for follows from the numbers of the collectives: all ranks number those of a group alike. A rank that has
returned joins none. A rank that waits elsewhere joins none before its own is complete. If that can never happen, the wait is
hopeless. A rank that computes, such as one that evaluates alone, may still join: a warning names it, and the run continues.

A rank that made another operation of the same number, or the same one with other sizes or dtypes, has not joined either. So
ranks that are further are asked what they made of that number. Sends and receives are collectives of two ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd.backends.flight_recorder import FROM_ANY, Collective, CollectiveId, name_ranks
from raysgd.session.progress import Heartbeat
from raysgd.workers.orders import Position

#: Seconds of waiting after which the ranks that are missing are named.
WARN_AFTER_S = 30.0
#: The positions are asked for when a rank has made no session call for this fraction of the time until a warning, and then
#: this many times within that time.
LOOK_FROM = 1 / 3
LOOKS = 6


@dataclass(frozen=True)
class Mismatch:
    """Ranks that wait for others which do not come.

    Attributes:
        ranks: The ranks that wait.
        why: One or two sentences for the user.
        is_over: The wait is hopeless, and has lasted for the timeout: the run must end.
    """

    ranks: tuple[int, ...]
    why: str
    is_over: bool = False


@dataclass
class _Rank:
    """What is known of a rank.

    Attributes:
        idle_s: Seconds without a session call of train_func, if train_func runs.
        has_returned: It has returned from train_func.
        seen_at: When it was last seen at its position.
        asked: What it was asked then.
        to_ask: What to ask at the next look.
    """

    idle_s: float = 0.0
    has_returned: bool = False
    position: Position = field(default_factory=Position)
    seen_at: float | None = None
    asked: Collection[CollectiveId] = ()
    to_ask: Collection[CollectiveId] = ()

    def waited_s(self, now: float) -> float:
        """Return for how long it has waited, if it is where it was seen."""
        return self.position.waited_s + now - (self.seen_at or now)

    def last_in(self, group: str) -> Collective | None:
        return next((one for one in self.position.collectives if one.group == group), None)

    def begun(self, asked: CollectiveId) -> Collective | None:
        """Return the collective if the rank is known to have begun it."""
        known = *self.position.collectives, *(self.position.begun or ())
        return next((one for one in known if one.is_asked_for(asked)), None)

    def has_denied(self, asked: CollectiveId) -> bool:
        """Return True if the rank was asked for a collective and has none of that number."""
        return asked in self.asked and self.position.begun is not None and self.begun(asked) is None


class MismatchPolicy:
    """Finds mismatches in one attempt.

    Args:
        timeout_s: `FailureConfig.mismatch_timeout_s`; None: nothing ends the run.
        ranks: The ranks of the group.
    """

    def __init__(self, timeout_s: float | None, ranks: Iterable[int]) -> None:
        self._timeout_s = timeout_s
        self._warn_after_s = WARN_AFTER_S if timeout_s is None else min(WARN_AFTER_S, timeout_s / 2)
        self._ranks = {rank: _Rank() for rank in ranks}
        self._warned: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self._next_look = 0.0

    def on_heartbeat(self, rank: int, heartbeat: Heartbeat) -> None:
        """A worker has answered."""
        self._ranks[rank].idle_s = heartbeat.idle_s if heartbeat.is_inside else 0.0

    def on_returned(self, rank: int) -> None:
        """train_func has returned on a rank."""
        self._ranks[rank].has_returned = True

    def is_look_due(self, now: float) -> bool:
        """Return True if the positions of all ranks should be asked for now. Each True counts as one look."""
        is_idle = any(rank.idle_s >= LOOK_FROM * self._warn_after_s for rank in self._ranks.values())
        if not is_idle or len(self._ranks) == 1 or now < self._next_look:
            return False
        self._next_look = now + self._warn_after_s / LOOKS
        return True

    def list_questions(self) -> Mapping[int, Collection[CollectiveId]]:
        """Return for each rank the collectives of which the next look should ask whether, and how, it has begun them.

        Those are collectives in which other ranks wait, and which the rank has passed as far as its last number says.
        """
        waited = {one.id: one for seen in self._ranks.values() for one in seen.position.collectives if not one.is_done}
        asked: dict[int, list[CollectiveId]] = {rank: [] for rank in self._ranks}
        for one in waited.values():
            for rank in self._members_of(one) if one.operation else ():
                last = self._ranks[rank].last_in(one.group)
                if one.transfer or (last is not None and last.number > one.number):
                    asked[rank].append(one.id)
        for rank, ids in asked.items():
            self._ranks[rank].to_ask = ids
        return asked

    def on_position(self, rank: int, position: Position, now: float) -> None:
        """A worker has answered where it is, and what the last `list_questions` asked it."""
        seen = self._ranks[rank]
        seen.position, seen.seen_at, seen.asked = position, now, seen.to_ask

    def find_mismatch(self, now: float) -> Mismatch | None:
        """Return what to warn about or to end the run for, or None. Each warning is returned once."""
        concerned = self._find_concerned(now)
        if not concerned:
            return None
        if self._is_over(concerned, now):
            return Mismatch(tuple(concerned), self._explain(concerned, now), True)
        missing = {rank for each in concerned.values() for rank in each}
        key = tuple(concerned), tuple(sorted(rank for rank in missing if self._ranks[rank].has_returned))
        if key in self._warned:
            return None
        self._warned.add(key)
        why = self._explain(concerned, now)
        if self._is_hopeless(concerned):
            why += f". The run fails after {self._timeout_s:g} s of waiting (FailureConfig(mismatch_timeout_s=...))"
        return Mismatch(tuple(concerned), why)

    def will_end(self, now: float) -> bool:
        """Return True if the run will end for a mismatch: all ranks inside wait for others that will never come."""
        return self._is_hopeless(self._find_concerned(now))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _waits(self, rank: int, now: float) -> bool:
        """Return True if a rank has been seen to wait in a collective for long enough to warn."""
        seen = self._ranks[rank]
        if seen.seen_at is None or seen.has_returned or not seen.position.waited_s:
            return False
        look_s = self._warn_after_s / LOOKS
        is_recent = now - seen.seen_at < 3 * look_s
        return is_recent and seen.position.blocked_s >= look_s and seen.waited_s(now) >= self._warn_after_s

    def _find_concerned(self, now: float) -> dict[int, dict[int, Collective]]:
        """Return the ranks that wait for others, each with the ranks that its collectives lack."""
        known: dict[tuple[Any, ...], list[int]] = {}  # a thousand ranks that wait in one collective lack the same ranks
        waiting = {rank: self._missing_for(rank, known) for rank in self._ranks if self._waits(rank, now)}
        return {rank: missing for rank, missing in waiting.items() if missing}

    def _missing_for(self, rank: int, known: dict[tuple[Any, ...], list[int]]) -> dict[int, Collective]:
        """Return the ranks that a collective lacks in which ``rank`` waits, each with that collective.

        Args:
            rank: A rank that waits.
            known: The ranks that collectives lack, as far as they were looked for; it grows.
        """
        missing: dict[int, Collective] = {}
        for waited in self._ranks[rank].position.collectives:
            if waited.is_done:
                continue
            key = waited.id, waited.operation, waited.sizes, waited.dtypes, waited.ranks
            if key not in known:
                known[key] = [other for other in self._members_of(waited) if self._is_missing(other, waited)]
            missing.update((other, waited) for other in known[key] if other != rank)
        return missing

    def _members_of(self, waited: Collective) -> list[int]:
        if waited.ranks:
            return [rank for rank in waited.ranks if rank in self._ranks]
        is_of_all = not waited.operation or waited.group == "default_pg"
        return [rank for rank, seen in self._ranks.items() if is_of_all or seen.last_in(waited.group) is not None]

    def _is_missing(self, rank: int, waited: Collective) -> bool:
        other, last = self._ranks[rank], self._ranks[rank].last_in(waited.group)
        if other.has_returned and not waited.operation:  # barriers of raysgd do not wait for it
            return False
        if waited.transfer == FROM_ANY:
            return other.seen_at is not None
        if waited.transfer:
            return other.has_denied(waited.id)
        if last is None or last.number < waited.number:
            return other.seen_at is not None
        return self._made_otherwise(rank, waited) is not None

    def _made_otherwise(self, rank: int, waited: Collective) -> Collective | None:
        """Return what a rank made of the number of a collective, if it cannot complete that collective."""
        begun = self._ranks[rank].begun(waited.id)
        return None if begun is None or begun.matches(waited) else begun

    def _is_hopeless(self, concerned: Mapping[int, Any]) -> bool:
        """Return True if every rank has returned or waits for another, so that nobody is left to join, and that ends the run."""
        num_inside = sum(not seen.has_returned for seen in self._ranks.values())
        return self._timeout_s is not None and bool(concerned) and len(concerned) == num_inside

    def _is_over(self, concerned: Mapping[int, Any], now: float) -> bool:
        """Return True if the wait is hopeless, and has been for the whole timeout."""
        if self._timeout_s is None or not self._is_hopeless(concerned):
            return False
        waits = [self._ranks[rank] for rank in concerned]
        return all(
            seen.waited_s(now) >= self._timeout_s and seen.position.blocked_s >= self._timeout_s / 3 for seen in waits
        )

    def _explain(self, waiting: dict[int, dict[int, Collective]], now: float) -> str:
        by_place: dict[str, list[int]] = {}
        made: dict[str, set[int]] = {}
        for rank, missing in waiting.items():
            waited = next(iter(missing.values()))
            otherwise = {
                other: begun
                for other, one in missing.items()
                if (begun := self._made_otherwise(other, one)) is not None
            }
            is_same = any(begun.operation == waited.operation for begun in otherwise.values())
            by_place.setdefault(waited.place_and_content if is_same else waited.place, []).append(rank)
            for other, begun in otherwise.items():
                if other not in waiting or begun.is_done:
                    made.setdefault(begun.place_and_content, set()).add(other)
        waits = [f"{name_ranks(ranks, 'waits', 'wait')} in {place}" for place, ranks in by_place.items()]
        longest_s = max(self._ranks[rank].waited_s(now) for rank in waiting)
        others = sorted({rank for missing in waiting.values() for rank in missing} - waiting.keys())
        passed = [f"{name_ranks(ranks, 'has', 'have')} made {place}" for place, ranks in made.items()]
        return "; ".join([f"{', '.join(waits)} for {longest_s:.0f} s", *passed, *map(self._describe_missing, others)])

    def _describe_missing(self, rank: int) -> str:
        seen = self._ranks[rank]
        if seen.has_returned:
            return f"rank {rank} has returned from train_func"
        return f"rank {rank} is missing{f', it is at {seen.position.line}' if seen.position.line else ''}"
