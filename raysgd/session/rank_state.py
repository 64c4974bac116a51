"""The small state each rank adds to a checkpoint: its random number generators, and where it stands in its datasets.

The generators are a rank's own. The positions in the data are those of the whole group: they are the same on all ranks,
and any number of them can go on there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.session.datasets import Datasets
from raysgd.session.generators import capture_generators, restore_generators

RankState = dict[str, Any]

_GENERATORS = "generators"
_DATA = "data"


def capture(datasets: Datasets) -> RankState:
    """This rank's state now, JSON-able."""
    state: RankState = {_GENERATORS: capture_generators()}
    if positions := datasets.positions():
        state[_DATA] = positions
    return state


def restore(state: Mapping[str, Any], datasets: Datasets) -> None:
    """Go on where `capture` was called. What the state says nothing of stays as it is.

    Raises:
        CheckpointError: The datasets cannot go on there; then nothing is changed.
    """
    if _DATA in state:
        datasets.restore(state[_DATA])
    restore_generators(state.get(_GENERATORS, {}))


def positions_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """The positions in the data that a rank's state has."""
    return dict(state.get(_DATA, {}))


def inherit(states: Mapping[int, Mapping[str, Any]], rank: int, *, is_same_size: bool) -> RankState:
    """The state of a checkpoint that ``rank`` goes on from.

    Args:
        states: By the rank that saved it; one that had returned by then has none.
        rank: Who goes on.
        is_same_size: Whether as many ranks go on as saved it. The generators of another number of ranks would repeat or
            skip draws; then they stay as the seed set them.
    """
    inherited = dict(states.get(rank, {})) if is_same_size else {}
    for _, state in sorted(states.items()):
        if _DATA in state:
            return {**inherited, _DATA: state[_DATA]}
    return inherited
