"""Decides whether a loop with the engine is that of one process, or was refused in time; see `support.loop_runs`."""

from __future__ import annotations

import math
from typing import Any

from support.loop_habits import HABITS
from support.loop_runs import NAMES, RANKS, STRATEGIES, Loop, Outcome, fits, parts_of, train, train_plainly
from support.torch_ranks import RankGroup

TIMEOUT_S = 60  # of a loop, which takes a second
#: What loops with pipelines import, for many seconds on a busy machine.
PRELOADED = ("support.loop_runs", "torch.distributed.pipelining.schedules", "transformers.models.llama.modeling_llama")


def compare(loop: Loop) -> tuple[Outcome, Outcome]:
    """Train a loop with the engine, and plainly."""
    return train(loop), train_plainly(loop)


def deviation(found: float, expected: float) -> float:
    """Return by how much a number is wrong, in proportion if it is large. A loop that diverges has equal infinite numbers."""
    if found == expected or (math.isnan(found) and math.isnan(expected)):
        return 0.0
    wrong = abs(found - expected) / max(1.0, abs(expected))
    return math.inf if math.isnan(wrong) else wrong


def difference(loop: Loop, rank: int, own: Outcome, plain: Outcome) -> str | None:
    """Return how a rank's loop differs from the plain one, or None; of a loop that was refused, until then."""
    losses = dict(plain.losses)
    copies = STRATEGIES[loop.strategy].copies
    sizes = {number: size for size, first, last in parts_of(loop) for number in range(first, last)}
    for number, (loss,) in own.losses:
        of_ranks = losses[number]
        is_alone = sizes[number] == 1 or copies == 1
        expected = sum(of_ranks) / len(of_ranks) if is_alone else of_ranks[rank]
        if deviation(loss, expected) > loop.tolerance:
            return f"the loss of batch {number} is {loss:.6g}, not {expected:.6g}"
    if own.error is not None:
        return None
    if [number for number, _ in own.losses] != list(losses):
        return f"batches {[number for number, _ in own.losses]}"
    for name, values in plain.values.items():
        if name not in own.values and "pipeline" in loop.marks:
            continue  # another stage has it
        found = own.values[name]
        if name == "logged" and rank and ("evaluate on one rank" in loop.habits or "norm" in loop.net):
            continue  # the first rank has evaluated alone, or within a step, in which buffers are each rank's own
        if len(found) != len(values):
            return f"{len(found)} {name} in place of {len(values)}"
        worst = max(map(deviation, found, values), default=0.0)
        if worst > loop.tolerance:
            return f"{name} differ by {worst:.2g}"
    return None


def find_difference(loop: Loop, of_ranks: list[tuple[Outcome, Outcome]]) -> str | None:
    """Return what is wrong with a loop, or None: it is right on all ranks, or was refused before it differed."""
    for rank, (own, plain) in enumerate(of_ranks):
        if (wrong := difference(loop, rank, own, plain)) is not None:
            return f"rank {rank}: {wrong}"
    errors = [own for own, _ in of_ranks if own.error is not None]
    refused = [own.error for own in errors if own.is_refused]
    if errors and not refused:
        return f"ended without a sentence: {errors[0].error}"
    if refused and not loop.is_refused:
        return f"refused: {refused[0]}"
    if loop.is_refused and not refused:
        return "is right, and the guide says that it is refused"
    return None


class Judge:
    """Compares loops in the processes of two ranks, and starts these again when a loop has ended them; a context manager."""

    def __enter__(self) -> Judge:
        self._group = RankGroup(RANKS, timeout_s=TIMEOUT_S, preloaded=PRELOADED)
        return self

    def __exit__(self, *error: Any) -> None:
        self._group.__exit__()

    def find_wrong(self, loops: list[Loop]) -> list[str]:
        """Return how loops are wrong, each with the fewest habits that are."""
        wrong = []
        for loop in loops:
            if (text := self._find_difference(loop)) is not None:
                smallest, of_smallest = self._shrink(loop, text)
                wrong.append(f"{smallest}: {of_smallest} [drawn: {loop}]")
                print(wrong[-1], flush=True)  # the rest may take hours
        return wrong

    def _find_difference(self, loop: Loop) -> str | None:
        try:
            return find_difference(loop, self._group.run(compare, loop))
        except AssertionError as error:  # a rank has died, or waits for another one
            self.__exit__()
            self.__enter__()
            return f"the processes do not answer: {str(error)[-1000:]}"

    def _shrink(self, loop: Loop, text: str) -> tuple[Loop, str]:
        for smaller in filter(fits, loop.smaller()):
            if (found := self._find_difference(smaller)) is not None:
                return self._shrink(smaller, found)
        return loop, text


def table() -> str:
    """Return the table of the guide: what a loop may do, and with which strategies that is refused."""
    rows = [["the loop may", "refused with"], ["---", "---"]]
    rows += [[each.text, ", ".join(NAMES.get(mark, mark) for mark in each.refused)] for each in HABITS.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
