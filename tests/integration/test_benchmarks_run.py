"""The benchmark programs run with small sizes and write their results. The figures are not checked.

Ray Train would take a minute and is left out. Those that take long by themselves are marked ``benchmark``.
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

from support.browser import needs_browser
from support.frameworks import needs_horovod
from support.project import ROOT

#: A loaded machine starts the processes of a search three times slower than an idle one.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def _no_empty_work_folder() -> Iterator[None]:
    yield
    with contextlib.suppress(OSError):  # another benchmark uses the folder
        os.removedirs(ROOT / "build" / "benchmarks")


def run(script: str, *arguments: str, output: Path, file: str = "results.json") -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", *arguments, "--output", str(output)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=850, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{script} did not end: {(error.stdout or b'').decode()[-4000:]}") from None
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    document: dict[str, Any] = json.loads((output / file).read_text(encoding="utf-8"))
    return document


@pytest.mark.benchmark
def test_ddp_step_is_compared_with_torchrun(tmp_path: Path) -> None:
    measured = run("vs_ray_train.py", "--only", "ddp", output=tmp_path)
    assert measured["rows"]
    for row in measured["rows"]:
        assert row["cells"].keys() == {"torchrun", "raysgd"}
        assert all(cell["value"] > 0 for cell in row["cells"].values()), row
    assert (tmp_path / "index.md").exists()


@pytest.mark.benchmark
def test_scale_is_measured_with_few_workers(tmp_path: Path) -> None:
    document = run("scale.py", output=tmp_path, file="scale.json")
    points = [*document["simulated"], *document["saving"], document["real"], document["real_saving"]]
    assert [point["workers"] for point in points] == [1, 8, 8, 4, 4]
    assert all(point["reports_per_s"] > 0 for point in points), points
    assert "error" not in document["trainers"], document["trainers"]
    assert (tmp_path / "scale.md").exists()


@pytest.mark.alone  # three processes import torch within the benchmark's own limits
def test_recovery_is_measured_with_a_spare(tmp_path: Path) -> None:
    arguments = ("--only", "kill", "--system", "raysgd_spare")
    document = run("recovery.py", *arguments, output=tmp_path, file="recovery.json")
    row = next(row for row in document["rows"] if row["key"] == "kill_spare")
    cell = row["cells"]["raysgd"]
    assert not {"failed", "error"} & cell.keys(), cell
    assert cell["n"] == 2 and cell["value"] > 0
    assert (tmp_path / "recovery.md").exists()


def test_steps_of_models_are_measured(tmp_path: Path) -> None:
    document = run("gpu_models.py", output=tmp_path, file="gpu_models.json")
    seconds = document["models"]["tiny"]["seconds"]
    assert seconds.keys() == {"by_hand", "engine", "accelerate", "fabric"}
    assert all(each > 0 for times in seconds.values() for each in times)
    assert "| tiny, batch 2 |" in (tmp_path / "gpu_models.md").read_text()


@pytest.mark.benchmark
def test_ingest_is_measured_from_files(tmp_path: Path) -> None:
    document = run("ingest.py", "--only", "ingest_files", output=tmp_path, file="ingest.json")
    first, later = document["rows"]
    assert (first["cells"].keys(), later["cells"].keys()) == ({"pyarrow", "raysgd"}, {"raysgd"})
    assert all(cell["value"] > 0 for row in (first, later) for cell in row["cells"].values()), document["rows"]


@pytest.mark.benchmark
def test_search_is_measured(tmp_path: Path) -> None:
    document = run("tune.py", "--system", "raysgd", output=tmp_path, file="tune.json")
    assert [row["cells"]["raysgd"]["value"] > 0 for row in document["rows"]] == [True, True]
    assert (tmp_path / "tune.md").exists()


@pytest.mark.benchmark
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


@pytest.mark.benchmark
def test_kill_in_a_backend_group_is_measured(tmp_path: Path) -> None:
    document = run(
        "backends.py", "--only", "backend_kill", "--system", "raysgd_jax", output=tmp_path, file="backends.json"
    )
    row = next(row for row in document["rows"] if row["key"] == "kill_jax")
    assert row["cells"]["raysgd"]["value"] > 0 and "failed" not in row["cells"]["raysgd"], document


@pytest.mark.benchmark
def test_start_of_scripts_is_measured(tmp_path: Path) -> None:
    document = run("run_vs_torchrun.py", output=tmp_path, file="scripts.json")
    assert document["samples"].keys() == {"torchrun", "env", "torch", "second"}
    for name, taken in document["samples"].items():
        (times,) = taken
        assert 0 < times["line"] <= times["group"] <= times["end"], name
    assert "first collective" in (tmp_path / "scripts.md").read_text(encoding="utf-8")


@needs_browser
def test_page_of_a_long_run_is_measured(tmp_path: Path) -> None:
    document = run("report_page.py", output=tmp_path, file="page.json")
    assert all(value > 0 for values in document["samples"].values() for value in values), document["samples"]
    assert "first curve" in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_start_of_the_command_is_measured(tmp_path: Path) -> None:
    document = run("command.py", output=tmp_path, file="command.json")
    medians = {name: taken[0] for name, taken in document["samples"].items()}
    assert 0 < medians["python"] < medians["help"] < medians["ls"], medians
    assert "`raysgd --help` takes" in (tmp_path / "command.md").read_text(encoding="utf-8")


@pytest.mark.jax
@pytest.mark.timeout(220)
def test_logical_workers_are_compared_with_ddp(tmp_path: Path) -> None:
    document = run("logical.py", output=tmp_path, file="logical.json")
    assert set(document["steps"]) == {"conv", "mlp"}
    assert all(set(taken) == {"ddp", "ddp_again", "logical"} for taken in document["steps"].values())
    assert "| mlp |" in (tmp_path / "logical.md").read_text(encoding="utf-8")


@pytest.mark.benchmark
def test_live_states_are_compared_with_saves_to_memory(tmp_path: Path) -> None:
    document = run("live.py", output=tmp_path, file="live.json")
    for way in ("live", "memory"):
        found = document["kills"]["2"][way]
        assert len(found["seconds"]) == 2 and all(each > 0 for each in (*found["seconds"], *found["load_s"])), found
    assert max(document["kills"]["2"]["live"]["repeated"]) <= 1
    assert document["steps"]["100 MB"].keys() == {"none", "none again", "live", "memory"}
    assert "| 2 | live state |" in (tmp_path / "live.md").read_text(encoding="utf-8")


@pytest.mark.benchmark
def test_training_by_a_file_is_compared_with_a_loop_by_hand(tmp_path: Path) -> None:
    document = run("declarative.py", output=tmp_path, file="declarative.json")
    assert set(document["steps"]) == {"by_hand", "by_hand_again", "declared"}
    assert all(each > 0 for taken in document["steps"].values() for each in taken)
    assert "| mlp |" in (tmp_path / "declarative.md").read_text(encoding="utf-8")


@pytest.mark.benchmark
def test_functions_are_compared_with_a_loop_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("optax", reason="optax is not installed: pip install raysgd[functions]")
    document = run("functions.py", output=tmp_path, file="functions.json")
    assert len(document["steps"]) == 6
    for name, found in document["steps"].items():
        assert found["ms"].keys() == {"by_hand", "by_hand_again", "raysgd"}
        assert all(each > 0 for times in found["ms"].values() for each in times)
        assert found["compilations"] == found["shapes"] == 2
        if name.startswith("small"):
            assert found["parts"]["collectives"]["raysgd"] == found["parts"]["collectives"]["by_hand"]
            assert all(each > 0 for each in (*found["parts"]["ms"].values(), *found["call_ms"]))
    assert all(each > 0 for each in document["shuffle_s"])
    assert "| perceptron, 4 devices, 2 model shards |" in (tmp_path / "functions.md").read_text(encoding="utf-8")


@pytest.mark.benchmark
@pytest.mark.timeout(900)
def test_causes_of_slowness_are_tried(tmp_path: Path) -> None:
    document = run("why.py", output=tmp_path, file="why.json")
    assert {"slow storage", "small batches", "deaths"} <= document["causes"].keys()
    assert {"DDP, dataset", "TensorFlow", "raysgd train"} <= document["healthy"].keys()
    assert "| slow storage | strong |" in (tmp_path / "why.md").read_text(encoding="utf-8")
