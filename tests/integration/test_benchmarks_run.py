"""The benchmark programs run with small sizes and write their results. The figures are not checked.

Ray Train would take a minute and is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.frameworks import needs_horovod
from support.project import ROOT


@pytest.fixture(autouse=True)
def _no_empty_work_folder() -> Iterator[None]:
    yield
    with contextlib.suppress(OSError):  # another benchmark uses the folder
        os.removedirs(ROOT / "build" / "benchmarks")


def run(script: str, *arguments: str, output: Path, file: str = "results.json") -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", *arguments, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=190, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    document: dict[str, Any] = json.loads((output / file).read_text(encoding="utf-8"))
    return document


@pytest.mark.timeout(220)
def test_comparison_and_scale_share_a_document(tmp_path: Path) -> None:
    measured = run("vs_ray_train.py", "--only", "ddp", output=tmp_path)
    assert measured["rows"]
    for row in measured["rows"]:
        assert row["cells"].keys() == {"torchrun", "raysgd"}
        assert all(cell["value"] > 0 for cell in row["cells"].values()), row

    document = run("scale.py", output=tmp_path)
    assert document["rows"] == measured["rows"], "scale.py removed the rows of vs_ray_train.py"
    points = [*document["scale"]["simulated"], document["scale"]["real"]]
    assert [point["workers"] for point in points] == [1, 8, 4]
    assert all(point["reports_per_s"] > 0 for point in points), points
    assert (tmp_path / "index.md").exists()


@pytest.mark.timeout(220)
def test_recovery_is_measured_with_a_spare(tmp_path: Path) -> None:
    arguments = ("--only", "kill", "--system", "raysgd_spare")
    document = run("recovery.py", *arguments, output=tmp_path, file="recovery.json")
    row = next(row for row in document["rows"] if row["key"] == "kill_spare")
    assert row["cells"]["raysgd"]["n"] == 2 and row["cells"]["raysgd"]["value"] > 0
    assert "failed" not in row["cells"]["raysgd"], document
    assert (tmp_path / "recovery.md").exists()


@pytest.mark.timeout(220)
def test_ingest_is_measured_from_files(tmp_path: Path) -> None:
    document = run("ingest.py", "--only", "ingest_files", output=tmp_path, file="ingest.json")
    first, later = document["rows"]
    assert (first["cells"].keys(), later["cells"].keys()) == ({"pyarrow", "raysgd"}, {"raysgd"})
    assert all(cell["value"] > 0 for row in (first, later) for cell in row["cells"].values()), document["rows"]


@pytest.mark.timeout(220)
def test_search_is_measured(tmp_path: Path) -> None:
    document = run("tune.py", "--system", "raysgd", output=tmp_path, file="tune.json")
    assert [row["cells"]["raysgd"]["value"] > 0 for row in document["rows"]] == [True, True]
    assert (tmp_path / "tune.md").exists()


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    ("measure", "ours", "peer", "rows"),
    [
        ("backend_allreduce", "raysgd_jax", "jax", "allreduce_jax"),
        pytest.param("backend_start", "raysgd_horovod", "horovod_executor", "start_horovod", marks=needs_horovod),
    ],
)
def test_backend_is_compared_with_its_framework(tmp_path: Path, measure: str, ours: str, peer: str, rows: str) -> None:
    arguments = ("--only", measure, "--system", ours, "--system", peer)
    document = run("backends.py", *arguments, output=tmp_path, file="backends.json")
    found = [row for row in document["rows"] if row["key"].startswith(rows)]
    assert found
    for row in found:
        assert row["cells"].keys() == {peer, "raysgd"}
        assert all(cell["value"] > 0 for cell in row["cells"].values()), row
    assert (tmp_path / "backends.md").exists()


@pytest.mark.timeout(220)
def test_kill_in_a_backend_group_is_measured(tmp_path: Path) -> None:
    document = run(
        "backends.py", "--only", "backend_kill", "--system", "raysgd_jax", output=tmp_path, file="backends.json"
    )
    row = next(row for row in document["rows"] if row["key"] == "kill_jax")
    assert row["cells"]["raysgd"]["value"] > 0 and "failed" not in row["cells"]["raysgd"], document


@pytest.mark.timeout(220)
def test_start_of_scripts_is_measured(tmp_path: Path) -> None:
    document = run("run_vs_torchrun.py", output=tmp_path, file="scripts.json")
    assert document["samples"].keys() == {"torchrun", "env", "torch", "second"}
    for name, taken in document["samples"].items():
        (times,) = taken
        assert 0 < times["line"] <= times["group"] <= times["end"], name
    assert "first collective" in (tmp_path / "scripts.md").read_text(encoding="utf-8")
