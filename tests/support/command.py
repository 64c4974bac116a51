"""The command ``raysgd`` in a process of its own, on the cluster of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.project import ROOT

COMMAND = [sys.executable, "-m", "raysgd.cli"]


def environment(cluster: Mapping[str, Any] | None, **variables: str) -> dict[str, str]:
    """Return the command's environment; without a cluster, it starts one of its own."""
    address = "local" if cluster is None else str(cluster["gcs_address"])
    # In another shell than that of the cluster, Ray has to find out by itself that the cluster wants a token.
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    # Threads of several ranks would take the cores from each other.
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "RAY_ADDRESS": address,
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def start(cluster: Mapping[str, Any] | None, folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Start ``raysgd`` with these words in a folder."""
    return subprocess.Popen(
        [*COMMAND, *words],
        cwd=folder,
        env=environment(cluster, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    cluster: Mapping[str, Any] | None, folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``raysgd`` with these words in a folder, to its end."""
    process = start(cluster, folder, *words, **variables)
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    return subprocess.CompletedProcess(words, process.returncode, out, err)
