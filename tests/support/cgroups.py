"""A memory cgroup for a test, where this machine allows one: as root, on the host or in a VM."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.poll import until

MOUNT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited_memory(limit_bytes: int) -> Iterator[Path]:
    """Yield a cgroup with a memory limit; a process joins by writing its id into the file ``cgroup.procs``."""
    top = MOUNT / "memory" if (MOUNT / "memory").is_dir() else MOUNT
    place = top / f"raysgd-tests-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        limit = place / ("memory.max" if (place / "cgroup.controllers").exists() else "memory.limit_in_bytes")
        if not limit.exists():
            pytest.skip("cgroups made here do not limit memory")
        limit.write_text(str(limit_bytes))
        for no_swap in ("memory.swap.max", "memory.swappiness"):
            with contextlib.suppress(OSError):
                (place / no_swap).write_text("0")
        yield place
    finally:
        assert until(lambda: _is_removed(place), timeout_s=30), f"{place} still has processes"


def _is_removed(place: Path) -> bool:
    with contextlib.suppress(OSError):
        place.rmdir()
    return not place.exists()
