"""Programs in the form of redco's examples run, but for the import as they are, and give the numbers that redco gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.project import ROOT

pytest.importorskip("jax")
pytest.importorskip("optax")
pytest.importorskip("flax")

from support.functions_redco import PROGRAMS, REDCO_GAVE

pytestmark = [pytest.mark.jax, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 worker", "2 workers"])
def found(request: pytest.FixtureRequest, ray_cluster: dict[str, Any], tmp_path_factory: Any) -> dict[str, Any]:
    """What the programs gave, by family: numbers, or the traceback of a failure."""
    folder: Path = tmp_path_factory.mktemp("programs")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "functions_redco.py"), "raysgd", str(request.param)],
        env={**os.environ, "RAY_ADDRESS": ray_cluster["gcs_address"], "TMPDIR": str(folder)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    assert len(lines) == len(PROGRAMS), done.stderr[-4000:]
    return dict(entry for line in lines for entry in json.loads(line).items())


@pytest.mark.parametrize("family", PROGRAMS)
def test_program_gives_the_numbers_of_redco(family: str, found: dict[str, Any]) -> None:
    numbers = found[family]
    assert isinstance(numbers, list), numbers
    np.testing.assert_allclose(numbers, REDCO_GAVE[family], rtol=0, atol=1e-4)
