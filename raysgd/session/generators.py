"""The random number generators of a process: those of Python, NumPy and each framework that is loaded.

A framework that is not loaded has drawn nothing. JAX has no global generator: its keys are part of the user's state. Runs in
the training thread.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping
from typing import Any

from raysgd._util.imports import imported

#: The states as each library returns them, by library.
States = dict[str, Any]


def seed(seed: int) -> None:
    """Seed every loaded generator."""
    value = seed % 2**32  # NumPy takes no more
    random.seed(value)
    if numpy := imported("numpy"):
        numpy.random.seed(value)
    if torch := imported("torch"):
        torch.manual_seed(value)  # CPU and every GPU
    if tensorflow := imported("tensorflow"):
        tensorflow.random.set_seed(value)


def read() -> States:
    """Return the states of the loaded generators."""
    states: States = {"python": random.getstate()}
    if numpy := imported("numpy"):
        states["numpy"] = numpy.random.get_state()
    if torch := imported("torch"):
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            states["torch_cuda"] = torch.cuda.get_rng_state()
    return states


def write(states: States) -> None:
    """Set the generators to what `read` returned; skips those of frameworks that are not loaded."""
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states and (numpy := imported("numpy")):
        numpy.random.set_state(states["numpy"])
    if "torch" in states and (torch := imported("torch")):
        torch.set_rng_state(states["torch"])
        if "torch_cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["torch_cuda"])


def to_json(states: States) -> dict[str, Any]:
    """Return what `read` returned as JSON-able values."""
    return {name: _to_json(name, state) for name, state in states.items()}


def _to_json(name: str, state: Any) -> Any:
    if name == "python":
        version, internal, gauss = state
        return [version, list(internal), gauss]
    if name == "numpy":
        kind, keys, position, has_gauss, cached = state
        return [kind, _encode(keys.tobytes()), int(position), int(has_gauss), float(cached)]
    return _encode(state.numpy().tobytes())


class GeneratorText:
    """Returns the states of the loaded generators as JSON. Those that have not changed are not encoded again."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, str]] = {}

    def read(self) -> str:
        """Return what `to_json` returns of the states now, as text."""
        for name, state in read().items():
            known = self._known.get(name)
            if known is None or not _is_same(name, known[0], state):
                self._known[name] = state, json.dumps(_to_json(name, state))
        return "{" + ",".join(f'"{name}":{text}' for name, (_, text) in self._known.items()) + "}"


def _is_same(name: str, one: Any, other: Any) -> bool:
    if name == "python":
        return bool(one == other)
    if name == "numpy":
        return bool(one[2:] == other[2:] and (one[1] == other[1]).all())
    return bool(one.equal(other))


def from_json(plain: Mapping[str, Any]) -> States:
    """Return what `to_json` was given; leaves out what belongs to frameworks that are not loaded."""
    states: States = {}
    if "python" in plain:
        version, internal, gauss = plain["python"]
        states["python"] = (version, tuple(internal), gauss)
    if "numpy" in plain and (numpy := imported("numpy")):
        name, keys, position, has_gauss, cached = plain["numpy"]
        words = numpy.frombuffer(base64.b64decode(keys), numpy.uint32)
        states["numpy"] = (name, words, position, has_gauss, cached)
    if torch := imported("torch"):
        for name in ("torch", "torch_cuda"):
            if name in plain:
                states[name] = torch.frombuffer(bytearray(base64.b64decode(plain[name])), dtype=torch.uint8)
    return states


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
