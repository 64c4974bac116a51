"""A training that ``raysgd import-config`` translated ends where the one of the other trainer ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raysgd.declarative import load_args, train
from raysgd.declarative.importing.files import as_yaml, import_config
from support.project import ROOT
from support.snippets import snippets

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]

PAGES = ROOT / "doc" / "coming-from"
#: Batches that are all rows, so that their order does not count.
ROWS = 32
LIT = """\
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Line(pl.LightningModule):
    def __init__(self, features, start):
        super().__init__()
        self.layer = torch.nn.Linear(features, 1)
        torch.nn.init.constant_(self.layer.weight, start)
        torch.nn.init.constant_(self.layer.bias, 0)

    def training_step(self, batch, index):
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch, index):
        self.log("val_loss", self.training_step(batch, index))


class Points(pl.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        x = torch.linspace(-1, 2, 32).unsqueeze(1)
        self.rows = TensorDataset(torch.cat([x, x * x], dim=1), 3 * x + 1)

    def train_dataloader(self):
        return DataLoader(self.rows, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.rows, 32)
"""


def write_page(folder: Path, page: str) -> None:
    """Write the modules of a page, by the names in their first lines."""
    for snippet in snippets(PAGES / page, "python"):
        name = snippet.code.partition("\n")[0].removeprefix("# ")
        if name.endswith(".py"):
            (folder / name).write_text(snippet.code)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("lit", "adapter", "parts"):
        sys.modules.pop(name, None)


def run(folder: Path, name: str, text: str, *words: str) -> dict[str, Any]:
    (folder / name).write_text(text)
    made = import_config(folder / name)
    (folder / "job.yaml").write_text(as_yaml(made, name))
    return train(load_args(folder / "job.yaml", [*words, "--checkpoint.save_dir", str(folder / "runs")]))


@pytest.mark.parametrize("devices", [1, 2])
def test_training_of_lightnings_cli_ends_at_the_same_loss(devices: int, folder: Path) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    import torch

    write_page(folder, "lightning-cli.md")
    (folder / "lit.py").write_text(LIT)
    trainer = {
        "max_epochs": 6,
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 0.7,
        "accelerator": "cpu",
        "devices": 1,
    }
    file = {
        "trainer": {**trainer, "devices": devices, "accumulate_grad_batches": 4 // devices},
        "model": {"class_path": "lit.Line", "init_args": {"features": 2, "start": 0.5}},
        "data": {"class_path": "lit.Points", "init_args": {"batch_size": ROWS // 4}},
        "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1, "momentum": 0.9}},
        "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 2, "gamma": 0.3}},
    }
    found = run(folder, "config.yaml", yaml.safe_dump(file))

    import lit

    class Configured(lit.Line):  # as Lightning's CLI makes it of the file
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)]

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    other = pl.Trainer(**trainer, **quiet, default_root_dir=folder)
    other.fit(Configured(2, 0.5), lit.Points(ROWS // 4))
    assert found["finished_train_steps"] == other.global_step == 6
    assert found["val_loss"] == pytest.approx(float(other.callback_metrics["val_loss"]), rel=1e-5)


def test_training_of_transformers_ends_at_the_same_loss(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")

    (folder / "adapter.py").write_text(
        """\
import torch
from transformers import GPT2Config, GPT2LMHeadModel


class Plain(torch.nn.Module):  # of one that takes num_items_in_batch, transformers divides the loss by all labels
    def __init__(self, gpt):
        super().__init__()
        self.gpt = gpt

    def forward(self, input_ids, labels):
        return {"loss": self.gpt(input_ids=input_ids, labels=labels).loss}


def make_gpt():
    torch.manual_seed(3)
    size = {"vocab_size": 20, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return Plain(GPT2LMHeadModel(GPT2Config(**size, **none, bos_token_id=0, eos_token_id=0)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = make_gpt()

    def forward(self, batch):
        return self.model(**batch)


class make_dataset(torch.utils.data.Dataset):
    def __init__(self, stage):
        pass

    def __len__(self):
        return 32

    def __getitem__(self, place):
        ids = (torch.arange(8) + place) % 20
        return {"input_ids": ids, "labels": ids}
"""
    )
    settings: dict[str, Any] = {
        "max_steps": 7, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "learning_rate": 0.02,
        "warmup_steps": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "eval_strategy": "steps", "eval_steps": 7,
        "adam_beta2": 0.95, "save_strategy": "no",
    }  # fmt: skip
    args = transformers.TrainingArguments(output_dir=str(folder / "hf"), use_cpu=True, disable_tqdm=True, **settings)
    words = ("--compute_config.runtime_ngpus=2", "--grad_accumulation_steps=2")
    found = run(folder, "args.json", args.to_json_string(), *words)
    import adapter

    data: Any = adapter.make_dataset("train")
    other = transformers.Trainer(adapter.make_gpt(), args, train_dataset=data, eval_dataset=data)
    other.train()
    [loss] = [each["eval_loss"] for each in other.state.log_history if "eval_loss" in each]
    assert found["finished_train_steps"] == 7
    assert found["val_loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("page", ["lightning-cli.md", "training-arguments.md"])
def test_file_of_a_page_becomes_the_one_below_it(page: str, folder: Path) -> None:
    before, after = [block.code for block in snippets(PAGES / page, "yaml", "json")][:2]
    name = after.partition(",")[0].removeprefix("# From ")
    (folder / name).write_text(before)
    assert as_yaml(import_config(folder / name), name) == after
    if page == "lightning-cli.md":
        pytest.importorskip("pytorch_lightning")
        write_page(folder, page)
        assert run(folder, name, before)["val_loss"] < 0.5


def test_file_of_torchtitan_by_hand_can_be_read(folder: Path) -> None:
    (after,) = snippets(PAGES / "torchtitan.md", "yaml")
    (folder / "job.yaml").write_text(after.code)
    args = load_args(folder / "job.yaml")
    assert (args.num_workers, args.compute.num_replicas, args.rows_per_step) == (16, 8, 64)
