"""The random number generators of a worker process: their state as JSON, so that every checkpoint can carry it.

Python's and NumPy's, and those of each framework that is loaded; a framework that is not loaded has drawn nothing.
Runs in the training thread. JAX has no global generator: its keys are part of the user's state.
"""

from __future__ import annotations

import base64
import os
import random
from typing import Any

from raysgd._util.imported import imported

GeneratorStates = dict[str, Any]


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
    """The states of the loaded generators, as JSON-able values."""
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
    """Put the generators back to where `capture_generators` saw them; those that are not loaded now are left out."""
    if "python" in states:
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in states and (numpy := imported("numpy")):
        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(_decode(keys), numpy.uint32), position, has_gauss, cached))
    if "torch" in states and (torch := imported("torch")):
        torch.set_rng_state(_torch_bytes(torch, states["torch"]))
        if "torch_cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(_torch_bytes(torch, states["torch_cuda"]))


def make_deterministic() -> None:
    """Ask the loaded framework for bit-identical repetition. Must come before the first use of a GPU."""
    if torch := imported("torch"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if tensorflow := imported("tensorflow"):
        tensorflow.config.experimental.enable_op_determinism()


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)


def _torch_bytes(torch: Any, text: str) -> Any:
    return torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)
