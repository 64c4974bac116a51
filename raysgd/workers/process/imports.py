"""The modules that a process has imported, and the import of the same ones in a spare. Worker side."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterable

from raysgd.workers.process.reset import foreign_prefixes


def installed_modules() -> list[str]:
    """Return the modules of installed packages and of Python that this process has imported, in the order of their imports."""
    found = []
    for name, module in list(sys.modules.items()):
        # No `getattr`: a module that is loaded on first use would be loaded for it.
        attributes = getattr(module, "__dict__", {})
        spec, path = attributes.get("__spec__"), attributes.get("__file__")
        if spec is not None and spec.name == name and path and path.startswith(foreign_prefixes()):
            found.append(name)
    return found


class EarlyImports:
    """Imports in a process without a rank what its train_func will need. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False

    def run(self, names: Iterable[str]) -> None:
        """Import modules, until `end` is called. One that cannot be imported is left out: train_func gets the error."""
        with self._lock:
            for name in names:
                if self._is_over:
                    return
                if name not in sys.modules:
                    with contextlib.suppress(BaseException):  # a module may call sys.exit, which would end the actor
                        importlib.import_module(name)

    def end(self) -> None:
        """Wait for the import of one module to end, and import no other."""
        self._is_over = True
        with self._lock:
            pass
