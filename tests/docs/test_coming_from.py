"""The programs of ``doc/coming-from/`` run, resume in the form of their library, and survive the death of a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysgd.testing import FaultPlan, Kill
from support.project import ROOT
from support.runs import make_trainer, quiet
from support.snippets import run_snippets, snippets

#: Those about programs; tests/integration/test_imported_trainings.py has those about files.
PAGES = [page for page in sorted((ROOT / "doc" / "coming-from").glob("*.md")) if "def train_func" in page.read_text()]
NEEDED = {"accelerate.md": "accelerate", "lightning.md": "pytorch_lightning", "transformers.md": "transformers"}


@pytest.mark.fault
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_program_of_a_page_runs_and_resumes(
    page: Path, ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name in NEEDED:
        pytest.importorskip(NEEDED[page.name])
    monkeypatch.chdir(tmp_path)
    train_func = run_snippets(snippets(page, "python"))["train_func"]
    plan = FaultPlan([Kill(rank=1, step=4)])
    with make_trainer(tmp_path, 2, "torch", seed=0) as trainer:
        trainer.run(train_func, {"lr": 0.01, "epochs": 2}, callbacks=quiet())
        checkpoint = trainer.get_last_checkpoint()
        config = {"lr": 0.01, "epochs": 5}
        results = list(trainer.run_generator(plan.wrap(train_func), config, callbacks=quiet(), resume_from=checkpoint))
    plan.assert_all_fired()
    assert results[-1]["attempt"] == 2
    assert all(result["epoch"] >= 2 for result in results), "the epochs before the checkpoint were trained again"
    losses = [result["loss"] for result in results if "loss" in result]
    assert len(losses) >= 3 and min(losses) < checkpoint.metrics["loss"]
