"""Fine-tuning of a language model by a file on two ranks: the losses of a plain loop under all strategies, and an export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.declarative.entry import export
from support.fine_tuning import PACKS_PER_STEP, STEPS, losses_of_a_plain_loop, make_files, train_on_ranks, values_of
from support.torch_ranks import RankGroup

peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    with RankGroup(2) as group:
        yield group


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize(
    "engine",
    [{}, {"zero_stage": 2}, {"zero_stage": 3, "activation_checkpointing": "full"}],
    ids=["ddp", "zero 2", "fsdp"],
)
def test_losses_are_those_of_a_plain_loop(
    ranks: RankGroup, files: Path, tmp_path: Path, engine: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    values = values_of(
        files,
        grad_accumulation_steps=PACKS_PER_STEP // 2,
        compute_config__runtime_ngpus=2,
        engine=engine,
    )
    expected = losses_of_a_plain_loop(files)
    for metrics in ranks.run(train_on_ranks, tmp_path, values):
        assert metrics["finished_train_steps"] == STEPS
        assert metrics["train_loss"] == pytest.approx(expected[-1], rel=1e-5)
    values["checkpoint"]["resume_from"] = str(tmp_path / "checkpoint_000001")
    merged = AutoModelForCausalLM.from_pretrained(export(values, tmp_path / "merged")).state_dict()
    values["model"]["args"]["exports"] = "adapter"
    base = AutoModelForCausalLM.from_pretrained(files / "model")
    adapted = peft.PeftModel.from_pretrained(base, export(values, tmp_path / "adapter")).merge_and_unload()
    for name, value in adapted.state_dict().items():
        torch.testing.assert_close(merged[name], value)
