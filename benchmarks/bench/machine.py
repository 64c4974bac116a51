"""The machine and the software that a result was measured with. It has no names of hosts, users or folders."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("raysgd", "ray", "torch", "numpy", "pyarrow")
ROOT = Path(__file__).resolve().parent.parent.parent


def describe_machine(more_packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return cores, memory and versions, also of ``more_packages`` if they are installed."""
    versions = {"python": platform.python_version()}
    for package in (*_PACKAGES, *more_packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "versions": versions,
    }


def without_paths(text: str) -> str:
    """Replace the folders of this machine in a text by placeholders."""
    known = {
        str(ROOT): "<project>",
        sys.prefix: "<python>",
        sys.base_prefix: "<python>",
        tempfile.gettempdir(): "<tmp>",
        str(Path.home()): "<home>",
    }
    for path, name in sorted(known.items(), key=lambda item: -len(item[0])):
        if len(path) > 1:
            text = text.replace(path, name)
    return text


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
