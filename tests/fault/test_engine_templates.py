"""A template whose worker is killed in the middle of an epoch resumes after the step that was saved."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.testing import FaultPlan, Kill
from support.runs import make_trainer, quiet, travels_by_value

travels_by_value(__name__)


def train_func(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from raysgd import PreTrainer

    x = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
    y = x.prod(1, keepdim=True)

    class Template(PreTrainer):
        num_calls = 0

        def train_valid_test_datasets_provider(self) -> Any:
            return TensorDataset(x, y), TensorDataset(x[:7], y[:7]), None

        def model_optimizer_lr_scheduler_provider(self) -> Any:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.2), nn.Linear(16, 1)), None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            self.num_calls += 1
            while self.num_calls == 7 and not raysgd.list_checkpoints():
                time.sleep(0.02)  # until the checkpoint of step 5 is on storage
            return nn.functional.mse_loss(model(batch[0]), batch[1])

    engine = raysgd.Engine(zero_stage=config["zero_stage"])
    # Twelve batches of each of two workers make an epoch, and a checkpoint comes after every fifth.
    return Template(engine=engine, batch_size=2, steps=18, learning_rate=0.01, log_interval=1, save_interval=5).train()


@pytest.mark.fault
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("num_workers", "zero_stage"), [(2, 0), (2, 2), ((1, 2), 3)], ids=str)
def test_template_resumes_after_a_kill(ray_cluster: Any, tmp_path: Path, num_workers: Any, zero_stage: int) -> None:
    config = {"zero_stage": zero_stage}
    plan = FaultPlan([Kill(rank=1, step=9)])
    with make_trainer(tmp_path, num_workers, "torch", seed=0) as trainer:
        whole = list(trainer.run_generator(train_func, config, callbacks=quiet())) if num_workers == 2 else []
        stream = trainer.run_generator(plan.wrap(train_func), config, callbacks=quiet())
        results = list(stream)
        metrics = stream.get_returns()
    plan.assert_all_fired()
    assert metrics["step"] == 18 and metrics["eval_loss"] == results[-1]["eval_loss"]
    second = [result["step"] for result in results if result["attempt"] == 2]
    if num_workers == 2:
        assert second == list(range(6, 19)), "it did not resume after the checkpoint of step 5"
        latest = {result["step"]: result["loss"] for result in results}
        assert latest == pytest.approx({result["step"]: result["loss"] for result in whole}, rel=1e-6)
        assert metrics["eval_loss"] == pytest.approx(whole[-1]["eval_loss"], rel=1e-6)
    else:
        # One worker continues: 20 rows were trained on, so it skips ten batches of its own.
        assert second == list(range(6, 19))
        assert [result["epoch"] for result in results if result["attempt"] == 2][:10] == [0] * 10
