"""Resets a warm worker between runs, and checks that its code is still the code on disk. Runs in the worker."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import site
import sys
import sysconfig
import time
from operator import attrgetter
from typing import Any

from raysgd._util.imports import imported
from raysgd.session.rank_state import GeneratorStates, capture_generators, restore_generators

#: Flags of ``torch.backends``, in the order to write them: later ones set some of the earlier ones, or raise for a mixture.
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
    """The state of a fresh worker: environment, working directory, generators, defaults of the framework."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._cwd = os.getcwd()
        self._path = list(sys.path)
        self._generators: GeneratorStates | None = None
        self._torch: dict[str, Any] = {}

    def note_framework(self) -> None:
        """Remember the state of what `Backend.load` imported; called right after the first load."""
        # A framework has half a million objects that live as long as the process. Without this, each collection between
        # attempts visits all of them, which takes 0.1-0.2 s with torch.
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
        """Restore the state of a fresh worker, and free what the last run held."""
        for name in set(os.environ) - set(self._environ):
            del os.environ[name]
        os.environ.update(self._environ)
        os.chdir(self._cwd)
        sys.path[:] = self._path
        if self._generators is not None:
            restore_generators(self._generators)
            # A run without a seed must not repeat the last one, so the generators get new entropy from the system.
            random.seed()
            if numpy := imported("numpy"):
                numpy.random.seed()
        self._restore_torch()
        gc.collect()

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
    """Return the flags that this version of torch has."""
    found = {}
    for owner, name in _FLAGS:
        with contextlib.suppress(AttributeError):
            found[owner, name] = attrgetter(f"{owner}.{name}" if owner else name)(backends)
    return found


#: Modules that TensorFlow makes from functions, in files that it deletes.
_GENERATED = "__autograph_generated_file"


def _installed_prefixes() -> tuple[str, ...]:
    places = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, *site.getsitepackages()}
    places.add(site.getusersitepackages())
    both = {place for given in places if given for place in (os.path.abspath(given), os.path.realpath(given))}
    return tuple(place + os.sep for place in both)


class ModuleWatch:
    """Remembers the source of each user module as it was when the module was loaded."""

    def __init__(self) -> None:
        self._prefixes = _installed_prefixes()
        self._stamps: dict[str, tuple[int, int]] = {}
        self._changed: set[str] = set()
        self._noted_at_ns = time.time_ns()

    def note_loaded(self) -> None:
        """Note the modules loaded since the last call, and those of them whose source was changed after their import."""
        since, self._noted_at_ns = self._noted_at_ns, time.time_ns()
        for name, path in self._user_modules():
            if name in self._stamps or (stamp := _stamp(path)) is None:
                continue
            self._stamps[name] = stamp
            if stamp[0] > since and _has_changed_since_import(name, stamp):
                self._changed.add(name)

    def stale(self) -> tuple[str, ...]:
        """Return the names of loaded user modules whose source has changed since."""
        for name, path in self._user_modules():
            known = self._stamps.get(name)
            if known is not None and _stamp(path) != known:
                self._changed.add(name)
        return tuple(sorted(self._changed))

    def _user_modules(self) -> list[tuple[str, str]]:
        found = []
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            # Every warm start checks thousands of modules: installed ones must not cost a system call.
            if name == "__main__" or not path or not path.endswith(".py") or path.startswith(self._prefixes):
                continue
            if name.startswith(_GENERATED):
                continue
            real = os.path.realpath(path)
            if not real.startswith(self._prefixes):
                found.append((name, real))
        return found


def _has_changed_since_import(name: str, stamp: tuple[int, int]) -> bool:
    """Return True if the source's time differs from the one in the compiled file that was written at import."""
    cached = getattr(sys.modules[name], "__cached__", None)
    try:
        with open(cached or "", "rb") as file:
            header = file.read(16)
    except OSError:
        return True  # unknown: a new process is safe
    return int.from_bytes(header[8:12], "little") != (stamp[0] // 10**9) & 0xFFFFFFFF


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
