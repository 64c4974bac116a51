"""Examples with transformers.

``08_five_lines.py`` has the plain script's losses, ``09_text_classification.py`` learns, and ``10_causal_lm.py`` survives a
death.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import raysgd
from support.examples import run_example
from support.project import ROOT
from support.runs import make_trainer, quiet

pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

FIVE_LINES = ROOT / "examples" / "08_five_lines.py"


def namespace_of(source: str) -> dict[str, Any]:
    """Run a script but for its ``main``; functions are pickled by value, as in a notebook."""
    found: dict[str, Any] = {"__name__": "example"}
    code = compile(source, str(FIVE_LINES), "exec")
    exec(code, found)
    for value in found.values():
        if callable(value) and getattr(value, "__module__", None) == "example":
            value.__module__ = "__main__"
    return found


def without_added_lines(source: str) -> str:
    """Return the script as it was: without the lines marked ``# +``, and with those behind ``# -``."""
    kept = [line for line in source.splitlines() if not line.endswith("  # +")]
    return "\n".join(re.sub(r"^( *)# - ", r"\1", line) for line in kept) + "\n"


@pytest.mark.timeout(300)
def test_losses_are_those_of_the_script_without_the_added_lines(ray_cluster: Any, tmp_path: Path) -> None:
    source = FIVE_LINES.read_text(encoding="utf-8")
    plain_source = without_added_lines(source)
    assert "engine" not in plain_source.partition("def train_func")[2].partition("def make_config")[0]
    plain, script = namespace_of(plain_source), namespace_of(source)
    config = {**script["make_config"](1, 1), "rows": 128, "shuffle": False, "train_steps": 8, "warmup_steps": 3}
    expected = plain["train_func"](config)
    assert len(expected) == 4 and len(set(expected)) == 4
    for workers in (1, 2):
        of_worker = {**config, "micro_batch_size": config["micro_batch_size"] // workers}
        with make_trainer(tmp_path, workers, "torch", seed=0) as trainer:
            by_rank = trainer.run(script["train_func"], of_worker, callbacks=quiet(), returns="all")
        losses = [sum(step) / workers for step in zip(*by_rank, strict=True)]
        assert losses == pytest.approx(expected, rel=1e-6), f"{workers} workers"


@pytest.mark.timeout(300)
def test_five_lines_run_as_a_script(tmp_path: Path) -> None:
    printed = run_example("08_five_lines.py", "--epochs", "2", folder=tmp_path)
    first, last = re.findall(r"32 steps, loss of the first one (\S+), of the last one (\S+)", printed)[0]
    assert 0 < float(last) < float(first) + 0.2


@pytest.mark.timeout(300)
def test_sentences_are_classified(tmp_path: Path) -> None:
    printed = run_example("09_text_classification.py", "--zero-stage", "3", folder=tmp_path)
    (accuracy,) = re.findall(r"accuracy on 99 sentences: (\S+)", printed)
    assert float(accuracy) >= 0.9
    (run,) = Path(tmp_path, "raysgd_runs").glob("*")
    (run_dir,) = [path for path in (run, *run.iterdir()) if (path / "events.jsonl").exists()]
    metrics = raysgd.load_run(run_dir).metrics
    assert metrics["eval_rows"].dropna().unique().tolist() == [101.0]


@pytest.mark.fault
@pytest.mark.timeout(300)
def test_language_model_learns_while_a_worker_is_killed(tmp_path: Path) -> None:
    printed = run_example("10_causal_lm.py", "--steps", "60", folder=tmp_path)
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+), ", printed)}
    assert list(losses) == [10, 20, 30, 40, 50, 60] and losses[60] < losses[10] - 0.3
    before, _, after = printed.partition("resumed after step")
    assert "step 10: loss" in before and "4 workers" in before and " with 2 workers" in after.splitlines()[0]
    (run_dir,) = {path.parent for path in Path(tmp_path, "raysgd_runs").rglob("events.jsonl")}
    run = raysgd.load_run(run_dir)
    assert run.metrics["step"].tolist() == list(range(1, 61)), "a step was lost or made twice"
    assert (run.events["kind"] == "failure").sum() == 1
    assert "it writes: def " in printed and (tmp_path / "causal_lm" / "model.safetensors").exists()
