"""Put a warm worker back to where it was before its first run. Runs in the worker, between runs."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
from operator import attrgetter
from typing import Any

from raysgd._util.imported import imported
from raysgd.session.generators import GeneratorStates, capture_generators, restore_generators

#: Below ``torch.backends``; those further down are written last, since they set some of those above, or raise for a mixture.
_FLAGS = (
    ("cudnn", "deterministic"),
    ("cudnn", "benchmark"),
    ("cuda.matmul", "allow_tf32"),
    ("cudnn", "allow_tf32"),
    ("", "fp32_precision"),
    ("cudnn", "fp32_precision"),
    ("mkldnn", "fp32_precision"),
    ("cuda.matmul", "fp32_precision"),
    ("cudnn.conv", "fp32_precision"),
    ("cudnn.rnn", "fp32_precision"),
    ("mkldnn.matmul", "fp32_precision"),
    ("mkldnn.conv", "fp32_precision"),
    ("mkldnn.rnn", "fp32_precision"),
)


class Baseline:
    """What a fresh worker looked like: environment, working directory, generators, the framework's defaults."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._cwd = os.getcwd()
        self._path = list(sys.path)
        self._generators: GeneratorStates | None = None
        self._torch: dict[str, Any] = {}

    def note_framework(self) -> None:
        """Remember the state of what `Backend.load` imported; call it right after the first load."""
        # A framework is half a million objects that live as long as the process: without this each collection between
        # attempts walks them all, 0.1-0.2 s with torch.
        gc.freeze()
        self._environ = dict(os.environ)
        self._generators = capture_generators()
        if torch := imported("torch"):
            self._torch = {
                "dtype": torch.get_default_dtype(),
                "threads": torch.get_num_threads(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "grad": torch.is_grad_enabled(),
                "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
                "matmul": torch.get_float32_matmul_precision(),
                "flags": _read_flags(torch.backends),
            }

    def restore(self) -> None:
        """Bring all of it back, and free what the last run held."""
        self._restore_environ()
        os.chdir(self._cwd)
        sys.path[:] = self._path
        if self._generators is not None:
            restore_generators(self._generators)
            # Generators drew from the system at the process's start; a run without a seed shall not repeat the last.
            random.seed()
            if numpy := imported("numpy"):
                numpy.random.seed()
        self._restore_torch()
        gc.collect()

    def _restore_environ(self) -> None:
        for name in set(os.environ) - set(self._environ):
            del os.environ[name]
        os.environ.update(self._environ)

    def _restore_torch(self) -> None:
        torch = imported("torch")
        if torch is None or not self._torch:
            return
        torch.set_default_dtype(self._torch["dtype"])
        torch.set_num_threads(self._torch["threads"])
        if torch.are_deterministic_algorithms_enabled() != self._torch["deterministic"]:
            torch.use_deterministic_algorithms(self._torch["deterministic"])  # imports the compiler: 1.5 s at first
        torch.set_grad_enabled(self._torch["grad"])
        torch.autograd.set_detect_anomaly(*self._torch["anomaly"])
        torch.set_float32_matmul_precision(self._torch["matmul"])
        for (owner, name), value in self._torch["flags"].items():
            setattr(attrgetter(owner)(torch.backends) if owner else torch.backends, name, value)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _read_flags(backends: Any) -> dict[tuple[str, str], Any]:
    """Those that this version of torch has."""
    found = {}
    for owner, name in _FLAGS:
        with contextlib.suppress(AttributeError):
            found[owner, name] = attrgetter(f"{owner}.{name}" if owner else name)(backends)
    return found
