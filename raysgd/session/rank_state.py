"""The small state that each rank adds to a checkpoint: its random number generators, and its positions in the datasets.

With logical workers the generators of each of them belong to it too; see `raysgd.session.logical`. Runs in the training thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from raysgd._util.imports import imported
from raysgd.session import generators
from raysgd.session.base import Datasets
from raysgd.session.logical import LogicalWorkers

GeneratorStates = dict[str, Any]
RankState = dict[str, Any]

_GENERATORS = "generators"
#: Those of the logical workers of a rank, by number.
_LOGICAL = "logical_generators"
_DATA = "data"
#: The positions in datasets that the rank reads whole, which other ranks need not share.
_OWN_DATA = "data_of_rank"


def seed_generators(seed: int, rank: int) -> None:
    """Seed every loaded generator with ``seed + rank``."""
    generators.seed(seed + rank)


def capture_generators() -> GeneratorStates:
    """Return the states of the loaded generators, as JSON-able values."""
    return generators.to_json(generators.read())


def restore_generators(states: Mapping[str, Any]) -> None:
    """Restore the generators to what `capture_generators` returned; skips those of frameworks that are not loaded."""
    generators.write(generators.from_json(states))


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the loaded generators after the block, also after an error."""
    now = capture_generators()
    try:
        yield
    finally:
        restore_generators(now)


def make_deterministic() -> None:
    """Set the loaded framework to bit-identical repetition. Must be called before the first use of a GPU."""
    if torch := imported("torch"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if tensorflow := imported("tensorflow"):
        tensorflow.config.experimental.enable_op_determinism()


def use_one_thread() -> None:
    """Have torch compute with one thread: the order of additions in its kernels depends on their number."""
    if torch := imported("torch"):
        torch.set_num_threads(1)


def capture(datasets: Datasets, logical: LogicalWorkers | None = None) -> RankState:
    """Return this rank's state now, JSON-able."""
    state: RankState = {_GENERATORS: capture_generators()}
    if logical is not None:
        state[_LOGICAL] = logical.to_json()
    if positions := datasets.positions():
        state[_DATA] = positions
    if own := datasets.own_positions():
        state[_OWN_DATA] = own
    return state


def restore(state: Mapping[str, Any], datasets: Datasets, logical: LogicalWorkers | None = None) -> None:
    """Restore what `capture` returned. What the state does not contain stays as it is.

    Raises:
        CheckpointError: A dataset cannot resume there; then nothing changes.
    """
    if _DATA in state:
        datasets.restore(state[_DATA], state.get(_OWN_DATA, {}))
    restore_generators(state.get(_GENERATORS, {}))
    if logical is not None:
        logical.restore(state.get(_LOGICAL, {}))


def positions_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data positions in a rank's state on which all ranks agree."""
    return dict(state.get(_DATA, {}))


def capture_own(generator_text: str, datasets: Datasets) -> bytes:
    """Return what `capture` returns without the positions on which all ranks agree, as JSON.

    Args:
        generator_text: From `raysgd.session.generators.GeneratorText`.
        datasets: The datasets of this rank.
    """
    own = datasets.own_positions()
    positions = f',"{_OWN_DATA}":{json.dumps(own)}' if own else ""
    return f'{{"{_GENERATORS}":{generator_text}{positions}}}'.encode()


def after_step(small: bytes | None, positions: Mapping[str, Any]) -> RankState:
    """Return the state with which a rank resumes after a complete step.

    Args:
        small: What `capture_own` returned; None: another number of ranks resumes.
        positions: The shared positions.
    """
    own: RankState = {} if small is None else json.loads(small)
    return own | ({_DATA: dict(positions)} if positions else {})


def shared_states(states: Mapping[int, Mapping[str, Any]]) -> dict[int, RankState]:
    """Return what `inherit` needs of ``states`` in addition to the own state of the rank that resumes."""
    shared: dict[int, RankState] = {}
    for key in (_DATA, _OWN_DATA):
        lowest = min((rank for rank, state in states.items() if key in state), default=None)
        if lowest is not None:
            shared.setdefault(lowest, {})[key] = states[lowest][key]
    if logical := _merge_logical(states):
        shared.setdefault(min(rank for rank, state in states.items() if _LOGICAL in state), {}).update(logical)
    return shared


def _merge_logical(states: Mapping[int, Mapping[str, Any]]) -> RankState:
    """Return the generators of all logical workers and those of the run, which are equal on all ranks; empty without any."""
    logical = [state for _, state in sorted(states.items()) if _LOGICAL in state]
    if not logical:
        return {}
    merged = {number: each for state in logical for number, each in state[_LOGICAL].items()}
    return {_GENERATORS: logical[0][_GENERATORS], _LOGICAL: merged}


def inherit(states: Mapping[int, Mapping[str, Any]], rank: int, *, is_same_size: bool) -> RankState:
    """Return the state with which ``rank`` resumes from a checkpoint.

    Args:
        states: By the rank that saved it; a rank that had returned by then has none.
        rank: The rank that resumes.
        is_same_size: Whether as many ranks resume as saved it. Generators of another number of ranks would repeat or skip
            draws, so they stay as the seed set them, unless they belong to logical workers.
    """
    own = states.get(rank, {})
    inherited = dict(own) if is_same_size else {}
    inherited |= _merge_logical(states)
    for key in (_DATA, _OWN_DATA):
        has_key = [state for _, state in sorted(states.items()) if key in state]
        if key == _OWN_DATA and rank in states:  # a rank that has read nothing whole begins there
            has_key = [own] if key in own else []
        if has_key:
            inherited[key] = has_key[0][key]
    return inherited
