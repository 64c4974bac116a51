"""Modules of nnx, and checkpoints of orbax, by functions on real workers. The programs make JAX arrays, so each is a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.project import ROOT

pytest.importorskip("optax")
pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]


def run_program(ray_cluster: Any, folder: Path, *arguments: int) -> dict[str, Any]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "functions_nnx.py"), str(folder), *map(str, arguments)],
        env={**os.environ, "RAY_ADDRESS": ray_cluster["gcs_address"]},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.fault
def test_module_is_trained_and_exported_alike_on_one_and_two_workers(ray_cluster: Any, tmp_path: Path) -> None:
    """Losses, statistics, predictions, and what orbax reads; on two workers with model shards, of which one is killed."""
    expected = run_program(ray_cluster, tmp_path / "one", 1, 1, 1, 0)
    found = run_program(ray_cluster, tmp_path / "two", 2, 2, 2, 1)
    assert (expected.pop("was_killed"), found.pop("was_killed")) == (False, True)
    assert found.pop("steps") == expected.pop("steps") == 15
    for name, values in found.items():
        assert values == pytest.approx(expected[name], abs=2e-5), name
    assert found["eval_losses"][0] == pytest.approx(found["eval_losses"][1], abs=1e-5)  # of what was read again
