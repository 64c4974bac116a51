"""The random number generators of a process: those of Python, NumPy and each framework that is loaded.

A framework that is not loaded has drawn nothing. JAX has no global generator: its keys are part of the user's state. Runs in
the training thread.
"""

from __future__ import annotations

import base64
import ctypes
import json
import random
from collections.abc import Collection, Mapping
from typing import Any

from raysgd._util.imports import imported

#: The states as each library returns them, by library.
States = dict[str, Any]
#: Python's global generator, and where its own fields are.
_python: Any = random.getstate.__self__  # type: ignore[attr-defined]
_PYTHON = id(_python) + object.__basicsize__
_PYTHON_BYTES = random.Random.__base__.__basicsize__ - object.__basicsize__  # type: ignore[union-attr]
#: The words of a Mersenne twister, and its place in them.
_MT19937_BYTES = 4 * 624 + 4
#: The memory of NumPy's generator when it was looked at last, and whether there was no second number then.
_checked = (b"", False)


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


#: The libraries whose generators are read.
LIBRARIES = frozenset({"python", "numpy", "torch", "torch_cuda"})


def read(of: Collection[str] = LIBRARIES) -> States:
    """Return the states of the loaded generators of some libraries."""
    states: States = {"python": random.getstate()} if "python" in of else {}
    if "numpy" in of and (numpy := imported("numpy")):
        states["numpy"] = numpy.random.get_state()
    if "torch" in of and (torch := imported("torch")):
        states["torch"] = torch.get_rng_state()
    if "torch_cuda" in of and (torch := imported("torch")) and torch.cuda.is_initialized():
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
    """Returns the states of the loaded generators as JSON. What has not changed is not encoded again, as each step reads it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, str]] = {}
        self._text = "{}"

    def read(self) -> str:
        """Return what `to_json` returns of the states now, as text."""
        changed = {
            name: key for name, key in _keys().items() if key is None or self._known.get(name, (None,))[0] != key
        }
        if changed:
            for name, state in read(changed).items():
                self._known[name] = changed[name], json.dumps(_to_json(name, state))
            self._text = "{" + ",".join(f'"{name}":{text}' for name, (_, text) in self._known.items()) + "}"
        return self._text


def _keys() -> dict[str, Any]:
    """Return for each loaded generator what differs if its state does; None: its state is not known without reading it.

    Of Python's and NumPy's it is their memory: to read their states takes 9 and 40 us.
    """
    keys: dict[str, Any] = {"python": (ctypes.string_at(_PYTHON, _PYTHON_BYTES), _python.gauss_next)}
    if numpy := imported("numpy"):
        keys["numpy"] = _key_of_numpy(numpy)
    if torch := imported("torch"):
        keys["torch"] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_initialized():
            keys["torch_cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return keys


def _key_of_numpy(numpy: Any) -> bytes | None:
    """Return the memory of NumPy's global generator.

    None if there is a second number of a pair of normal numbers, which lies elsewhere, or the generator is another one.
    """
    generator = numpy.random.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        return None
    memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    global _checked
    if memory != _checked[0]:  # a pair begins with a change of the memory
        _checked = memory, not numpy.random.get_state()[3]
    return memory if _checked[1] else None


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
