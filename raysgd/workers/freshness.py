"""Whether a warm worker's code is still the code on disk. Runs in the worker, between runs.

A notebook's own functions travel with each run, but a module the user edits stays loaded in a warm process. Modules
below the interpreter's and the packages' folders do not change under a session and are left out.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import time

#: Modules that TensorFlow makes of functions, in files of its own that it deletes.
_GENERATED = "__autograph_generated_file"


def _installed_prefixes() -> tuple[str, ...]:
    places = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, *site.getsitepackages()}
    places.add(site.getusersitepackages())
    both = {place for given in places if given for place in (os.path.abspath(given), os.path.realpath(given))}
    return tuple(place + os.sep for place in both)


class ModuleWatch:
    """Remembers the source of each user module at the time it was loaded."""

    def __init__(self) -> None:
        self._prefixes = _installed_prefixes()
        self._stamps: dict[str, tuple[int, int]] = {}
        self._changed: set[str] = set()
        self._looked_at_ns = time.time_ns()

    def look(self) -> None:
        """Note the modules loaded since the last look. A source younger than that look changed while it was in use."""
        since, self._looked_at_ns = self._looked_at_ns, time.time_ns()
        for name, path in self._user_modules():
            if name in self._stamps or (stamp := _stamp(path)) is None:
                continue
            self._stamps[name] = stamp
            if stamp[0] > since and self._changed_since_import(name, stamp):
                self._changed.add(name)

    def stale(self) -> tuple[str, ...]:
        """Names of loaded user modules whose source is no longer what was loaded."""
        for name, path in self._user_modules():
            known = self._stamps.get(name)
            if known is not None and _stamp(path) != known:
                self._changed.add(name)
        return tuple(sorted(self._changed))

    def _changed_since_import(self, name: str, stamp: tuple[int, int]) -> bool:
        """Whether the compiled file written at import tells another source time than the source has now."""
        cached = getattr(sys.modules[name], "__cached__", None)
        try:
            with open(cached or "", "rb") as file:
                header = file.read(16)
        except OSError:
            return True  # cannot tell: the safe side is a fresh process
        return int.from_bytes(header[8:12], "little") != (stamp[0] // 10**9) & 0xFFFFFFFF

    def _user_modules(self) -> list[tuple[str, str]]:
        found = []
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            # Thousands of modules, looked at in every warm start: no system call for those that are installed.
            if name == "__main__" or not path or not path.endswith(".py") or path.startswith(self._prefixes):
                continue
            if name.startswith(_GENERATED):
                continue
            real = os.path.realpath(path)
            if not real.startswith(self._prefixes):
                found.append((name, real))
        return found


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
