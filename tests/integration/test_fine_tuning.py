"""Fine-tuning of a language model by a file on workers: the losses are those of a plain loop under all strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysgd.declarative.entry import Training
from raysgd.declarative.reading import args_of
from raysgd.declarative.strategies import engine_fields
from raysgd.declarative.values import Importer
from raysgd.engine.config import EngineConfig
from support.fine_tuning import PACKS_PER_STEP, STEPS, losses_of_a_plain_loop, make_files, values_of
from support.runs import make_trainer, quiet

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]


def test_losses_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    folder = make_files(tmp_path / "files")
    expected = losses_of_a_plain_loop(folder)
    engines: list[dict[str, Any]] = [{}, {"zero_stage": 1}, {"zero_stage": 3, "activation_checkpointing": "full"}]
    with make_trainer(tmp_path, 2, "torch", seed=0) as trainer:
        for engine in engines:
            values = values_of(
                folder,
                grad_accumulation_steps=PACKS_PER_STEP // 2,
                compute_config__runtime_ngpus=2,
                engine=engine,
                checkpoint__no_save=True,
            )
            config = EngineConfig.of(engine_fields(args_of(values), Importer()))
            found = trainer.run(Training({}, config, "."), values, callbacks=quiet())
            assert found["finished_train_steps"] == STEPS
            assert found["train_loss"] == pytest.approx(expected[-1], rel=1e-5), engine
