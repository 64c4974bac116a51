"""How much slower this machine is than the one on which limits were chosen, measured once by each process of pytest."""

from __future__ import annotations

import functools
import subprocess
import sys
import time

#: Seconds until a process has imported Ray, which is most of an actor's start, on two idle cores.
_USUAL_S = 0.8
_MAX = 4.0


@functools.cache
def slowness() -> float:
    """Return the factor for limits and grace periods: from 1 to 4."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import ray"], check=False)
    return min(max((time.monotonic() - begin) / _USUAL_S, 1.0), _MAX)
