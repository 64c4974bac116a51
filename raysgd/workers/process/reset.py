"""Resets a warm worker between runs, and checks that its code is still the code on disk. Runs in the worker."""

from __future__ import annotations

import functools
import gc
import os
import random
import site
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from raysgd._util import numeric_settings
from raysgd._util.imports import imported
from raysgd.session.rank_state import GeneratorStates, capture_generators, restore_generators

#: So many modules imported since the last time make collections slow.
MANY_MODULES = 100
#: Modification time of a source, in nanoseconds, and its size.
_Stamp = tuple[int, int]


class Baseline:
    """The state of a fresh worker: environment, working directory, generators, settings of the framework."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._cwd = os.getcwd()
        self._path = list(sys.path)
        self._generators: GeneratorStates | None = None
        self._settings: numeric_settings.Settings = {}
        self._torch: dict[str, Any] = {}
        self._num_frozen = 0  # modules

    def note_framework(self) -> None:
        """Remember the state of what `Backend.load` imported; called right after the first load."""
        self._freeze()
        self._environ = dict(os.environ)
        self._generators = capture_generators()
        self._settings = numeric_settings.read()
        if torch := imported("torch"):
            self._torch = {
                "threads": torch.get_num_threads(),
                "grad": torch.is_grad_enabled(),
                "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            }

    def restore(self, *, may_freeze: bool = True) -> None:
        """Restore the state of a fresh worker, and free what the last run held.

        Args:
            may_freeze: This process is in no group, so that imports may be frozen; see `settle`.
        """
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
        # Of frameworks that a run has imported itself, there is no earlier value.
        later = numeric_settings.fresh(numeric_settings.read().keys() - self._settings.keys())
        numeric_settings.write(self._settings | later)
        self._restore_torch()
        gc.collect()
        if may_freeze and self._has_many_imports():
            self._freeze()

    def settle(self) -> None:
        """Free what a run has left, if it has imported much: later collections then take no time for what it imported.

        Called when the group has been left. What is alive now and is held by cycles is never freed: JAX's client, which a
        group has until it is left, would keep the memory of its GPU.
        """
        if self._has_many_imports():
            gc.collect()
            self._freeze()

    def _has_many_imports(self) -> bool:
        return len(sys.modules) - self._num_frozen >= MANY_MODULES

    def _freeze(self) -> None:
        """Exclude all objects from later collections, each of which visits every object: see decision 0010."""
        gc.freeze()
        self._num_frozen = len(sys.modules)

    def _restore_torch(self) -> None:
        torch = imported("torch")
        if torch is None or not self._torch:
            return
        torch.set_num_threads(self._torch["threads"])
        torch.set_grad_enabled(self._torch["grad"])
        torch.autograd.set_detect_anomaly(*self._torch["anomaly"])
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


#: Modules that TensorFlow makes from functions, in files that it deletes.
_GENERATED = "__autograph_generated_file"


@functools.cache
def foreign_prefixes() -> tuple[str, ...]:
    """Return the folders whose modules are not the user's: those of installed packages, and raysgd's own."""
    places = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, *site.getsitepackages()}
    places |= {site.getusersitepackages(), str(Path(__file__).parents[2])}
    both = {place for given in places if given for place in (os.path.abspath(given), os.path.realpath(given))}
    return tuple(place + os.sep for place in both)


class ModuleWatch:
    """Remembers the source of each user module as it was when the module was loaded.

    A process may have loaded ten thousand modules, and every warm start asks. Each module is therefore examined once.
    """

    def __init__(self) -> None:
        self._prefixes = foreign_prefixes()
        self._examined: set[str] = set()
        self._sources: dict[str, tuple[str, _Stamp]] = {}  # of the user's modules
        self._changed: set[str] = set()
        self._noted_at_ns = time.time_ns()

    def note_loaded(self) -> None:
        """Note the modules loaded since the last call, and those of them whose source was changed after their import."""
        since, self._noted_at_ns = self._noted_at_ns, time.time_ns()
        for name in sys.modules.keys() - self._examined:
            self._examined.add(name)
            path = self._source_of(name)
            if path is None or (stamp := _stamp(path)) is None:
                continue
            self._sources[name] = path, stamp
            if stamp[0] > since and _has_changed_since_import(name, stamp):
                self._changed.add(name)

    def stale(self) -> tuple[str, ...]:
        """Return the names of loaded user modules whose source has changed since."""
        for name, (path, stamp) in self._sources.items():
            if name in sys.modules and _stamp(path) != stamp:
                self._changed.add(name)
        return tuple(sorted(self._changed))

    def _source_of(self, name: str) -> str | None:
        """Return the source of a module that is the user's; None for any other module."""
        # No `getattr`: a module that is loaded on first use would be loaded for it.
        attributes = getattr(sys.modules.get(name), "__dict__", {})
        path = attributes.get("__file__")
        if name == "__main__" or not path or not path.endswith(".py") or name.startswith(_GENERATED):
            return None
        if attributes.get("__spec__") is None:  # not imported, but made by code, such as torch.compile's
            return None
        is_foreign = path.startswith(self._prefixes) or os.path.realpath(path).startswith(self._prefixes)
        return None if is_foreign else str(path)


def _has_changed_since_import(name: str, stamp: _Stamp) -> bool:
    """Return True if the source's time differs from the one in the compiled file that was written at import."""
    cached = getattr(sys.modules[name], "__cached__", None)
    try:
        with open(cached or "", "rb") as file:
            header = file.read(16)
    except OSError:
        return True  # unknown: a new process is safe
    return int.from_bytes(header[8:12], "little") != (stamp[0] // 10**9) & 0xFFFFFFFF


def _stamp(path: str) -> _Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
