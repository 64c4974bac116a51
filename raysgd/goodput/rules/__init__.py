"""The rules of `raysgd why`: each looks at the evidence of a run, and names one cause, or none."""

from __future__ import annotations

from raysgd.goodput.findings import Rule
from raysgd.goodput.rules import batches, checkpoints, collectives, data, machines, overheads, restarts, stragglers

#: Those that name a rank for which the others wait.
OF_RANKS: tuple[Rule, ...] = (data.find, stragglers.find, batches.find_uneven)
RULES: tuple[Rule, ...] = (
    *OF_RANKS,
    batches.find_small,
    collectives.find,
    machines.find_processors,
    machines.find_memory,
    restarts.find,
    checkpoints.find,
    overheads.find_start,
    overheads.find_compiling,
    overheads.find_evaluation,
    overheads.find_callbacks,
    overheads.find_garbage_collection,
)
