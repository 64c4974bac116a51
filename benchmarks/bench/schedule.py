"""In which order systems and measures take turns. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.measures import Measure


@dataclass(frozen=True)
class Turn:
    """One process: a system, and the measures it is put to."""

    system: str
    measures: tuple[str, ...]
    repetition: int


def make_turns(measures: Sequence[Measure], *, quick: bool, repeat: int | None = None) -> list[Turn]:
    """All turns. Systems alternate within a repetition, and another one begins each time.

    Measures that can share a warm process are one group; each of the others is one of its own.
    """
    warm = [measure for measure in measures if not measure.IS_FRESH]
    groups = [[measure] for measure in measures if measure.IS_FRESH]
    turns = []
    for group in [warm, *groups] if warm else groups:
        times = repeat or (1 if quick else max(measure.REPEAT for measure in group))
        for number in range(times):
            turns += _one_round(group, number, quick)
    return turns


def at_once(turns: Sequence[Turn], measures: Mapping[str, Measure]) -> list[list[Turn]]:
    """Turns, those together whose systems are measured at once, in the order of the first of them."""
    batches: dict[tuple[object, ...], list[Turn]] = {}
    for number, turn in enumerate(turns):
        (name,) = turn.measures
        answer = getattr(measures[name], "at_once", None)
        key = (number,) if answer is None else (name, turn.repetition, answer(turn.system))
        batches.setdefault(key, []).append(turn)
    return list(batches.values())


def systems_of(measure: Measure, *, quick: bool) -> Sequence[str]:
    return measure.QUICK_SYSTEMS if quick else measure.SYSTEMS


def _one_round(group: Sequence[Measure], number: int, quick: bool) -> list[Turn]:
    systems = list(dict.fromkeys(name for measure in group for name in systems_of(measure, quick=quick)))
    first = number % len(systems)
    turns = []
    for system in systems[first:] + systems[:first]:
        names = tuple(measure.NAME for measure in group if system in systems_of(measure, quick=quick))
        turns.append(Turn(system, names, number))
    return turns
