"""The scripts of ``examples/functions/`` reach the scores that they name, above their baselines, on one shared Ray cluster.

They share models.py, texts.py, scans.py and reinforcement.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.project import ROOT

pytest.importorskip("jax", reason="JAX is not installed: pip install raysgd[functions]")
pytest.importorskip("optax", reason="optax is not installed: pip install raysgd[functions]")
pytest.importorskip("flax", reason="flax is not installed: pip install raysgd[flax]")

FOLDER = ROOT / "examples" / "functions"

pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Goal:
    """A score that a script prints as ``name: score (what the baseline is: baseline)``, and its bounds."""

    script: str
    name: str
    score: float
    baseline: float
    lower_is_better: bool = False


GOALS = [
    Goal("text_classification.py", "accuracy", 0.95, 0.7),
    Goal("llama_nnx.py", "perplexity", 2.2, 2.5, lower_is_better=True),
    Goal("causal_lm.py", "perplexity", 2.2, 2.5, lower_is_better=True),
    Goal("image_classification.py", "accuracy", 0.96, 0.92),
    Goal("text_to_text.py", "ROUGE-L", 0.9, 0.3),
    Goal("text_to_image.py", "recognized", 0.8, 0.2),
    Goal("image_to_text.py", "right captions", 0.9, 0.05),
    Goal("federated_averaging.py", "accuracy", 0.88, 0.35),
    Goal("meta_learning.py", "squared error after 5 steps", 0.7, 2.0, lower_is_better=True),
    Goal("differential_privacy.py", "accuracy", 0.8, 0.1),
    Goal("ppo.py", "steps", 150, 40),
    Goal("ddpg.py", "return", -400, -900),
    Goal("maddpg.py", "distance", 0.4, 0.7, lower_is_better=True),
]


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.script)
def test_script_reaches_its_score(goal: Goal, ray_cluster: dict[str, Any], tmp_path: Path) -> None:
    printed = run_in_cluster(FOLDER / goal.script, ray_cluster["gcs_address"], tmp_path)
    found = re.findall(rf"^{goal.name}: (\S+) \(.+: (\S+)\)$", printed, re.MULTILINE)
    assert len(found) == 1, printed
    score, baseline = map(float, found[0])
    if goal.lower_is_better:
        assert score <= goal.score and baseline >= goal.baseline
    else:
        assert score >= goal.score and baseline <= goal.baseline
    # Of the logits of a LLaMA from those of transformers, with the weights that were read and those that were written.
    differences = [float(each) for each in re.findall(r"^difference when .+: (\S+)$", printed, re.MULTILINE)]
    assert len(differences) == 2 * (goal.script == "llama_nnx.py") and max(differences, default=0.0) < 1e-4


def test_rouge_is_as_in_its_paper() -> None:
    rouge = load_texts().rouge
    reference = "police killed the gunman"
    found = {text: rouge([text], [reference], ["rouge2", "rougeL"]) for text in (
        "police kill the gunman", "the gunman kill police", "the gunman police killed", "nobody",
    )}  # fmt: skip
    assert [scores["rougeL"] for scores in found.values()] == [3 / 4, 2 / 4, 2 / 4, 0]
    assert [scores["rouge2"] for scores in found.values()] == pytest.approx([1 / 3, 1 / 3, 2 / 3, 0])
    assert rouge(["a b", "c"], ["a b", "d"], ["rouge1"]) == {"rouge1": 0.5}


def test_vocabulary_decodes_what_it_encoded_up_to_the_end() -> None:
    texts = load_texts()
    vocabulary = texts.Vocabulary(["a dog runs", "two dogs"])
    ids = vocabulary.encode(["two dogs", "a dog runs"], 6, has_end=True)
    assert ids.shape == (2, 6) and ids[0].tolist()[3:] == [texts.END, texts.PAD, texts.PAD]
    ids[0, 4] = ids[0, 1]
    assert vocabulary.decode(ids) == ["two dogs", "a dog runs"]
    with pytest.raises(ValueError, match="5 numbers, more than 4"):
        vocabulary.encode(["a dog runs"], 4, has_end=True)


def load_texts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("texts_of_examples", FOLDER / "texts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_in_cluster(script: Path, address: str, folder: Path) -> str:
    """Run a script as a user does, on a cluster that is running; return its output."""
    environment = {**os.environ, "RAY_ADDRESS": address}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
