"""The small state that each rank adds to a checkpoint: its random number generators, and its positions in the datasets.

The generators are those of Python, NumPy and each framework that is loaded; a framework that is not loaded has drawn
nothing. JAX has no global generator: its keys are part of the user's state. Runs in the training thread.
"""

from __future__ import annotations

import base64
import os
import random
from collections.abc import Mapping
from typing import Any

from raysgd._util.imports import imported
from raysgd.session.base import Datasets

GeneratorStates = dict[str, Any]
RankState = dict[str, Any]

_GENERATORS = "generators"
_DATA = "data"
#: The positions in datasets that the rank reads whole, which other ranks need not share.
_OWN_DATA = "data_of_rank"


def seed_generators(seed: int, rank: int) -> None:
    """Seed every loaded generator with ``seed + rank``."""
    value = (seed + rank) % 2**32  # NumPy takes no more
    random.seed(value)
    if numpy := imported("numpy"):
        numpy.random.seed(value)
    if torch := imported("torch"):
        torch.manual_seed(value)  # CPU and every GPU
    if tensorflow := imported("tensorflow"):
        tensorflow.random.set_seed(value)


def capture_generators() -> GeneratorStates:
    """Return the states of the loaded generators, as JSON-able values."""
    version, internal, gauss = random.getstate()
    states: GeneratorStates = {"python": [version, list(internal), gauss]}
    if numpy := imported("numpy"):
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = [name, _encode(keys.tobytes()), int(position), int(has_gauss), float(cached)]
    if torch := imported("torch"):
        states["torch"] = _encode(torch.get_rng_state().numpy().tobytes())
        if torch.cuda.is_initialized():
            states["torch_cuda"] = _encode(torch.cuda.get_rng_state().numpy().tobytes())
    return states


def restore_generators(states: GeneratorStates) -> None:
    """Restore the generators to what `capture_generators` returned; skips those of frameworks that are not loaded."""
    if "python" in states:
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in states and (numpy := imported("numpy")):
        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state(
            (name, numpy.frombuffer(base64.b64decode(keys), numpy.uint32), position, has_gauss, cached)
        )
    if "torch" in states and (torch := imported("torch")):
        torch.set_rng_state(_torch_bytes(torch, states["torch"]))
        if "torch_cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(_torch_bytes(torch, states["torch_cuda"]))


def make_deterministic() -> None:
    """Set the loaded framework to bit-identical repetition. Must be called before the first use of a GPU."""
    if torch := imported("torch"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if tensorflow := imported("tensorflow"):
        tensorflow.config.experimental.enable_op_determinism()


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _torch_bytes(torch: Any, text: str) -> Any:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def capture(datasets: Datasets) -> RankState:
    """Return this rank's state now, JSON-able."""
    state: RankState = {_GENERATORS: capture_generators()}
    if positions := datasets.positions():
        state[_DATA] = positions
    if own := datasets.own_positions():
        state[_OWN_DATA] = own
    return state


def restore(state: Mapping[str, Any], datasets: Datasets) -> None:
    """Restore what `capture` returned. What the state does not contain stays as it is.

    Raises:
        CheckpointError: A dataset cannot resume there; then nothing changes.
    """
    if _DATA in state:
        datasets.restore(state[_DATA], state.get(_OWN_DATA, {}))
    restore_generators(state.get(_GENERATORS, {}))


def positions_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data positions in a rank's state on which all ranks agree."""
    return dict(state.get(_DATA, {}))


def inherit(states: Mapping[int, Mapping[str, Any]], rank: int, *, is_same_size: bool) -> RankState:
    """Return the state with which ``rank`` resumes from a checkpoint.

    Args:
        states: By the rank that saved it; a rank that had returned by then has none.
        rank: The rank that resumes.
        is_same_size: Whether as many ranks resume as saved it. Generators of another number of ranks would repeat or skip
            draws, so they stay as the seed set them.
    """
    own = states.get(rank, {})
    inherited = dict(own) if is_same_size else {}
    for key in (_DATA, _OWN_DATA):
        has_key = [state for _, state in sorted(states.items()) if key in state]
        if key == _OWN_DATA and rank in states:  # a rank that has read nothing whole begins there
            has_key = [own] if key in own else []
        if has_key:
            inherited[key] = has_key[0][key]
    return inherited
