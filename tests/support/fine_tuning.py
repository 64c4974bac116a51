"""Fine-tuning of a tiny language model with LoRA: the values of a file, and what a plain loop computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from raysgd.declarative.args import as_values
from raysgd.declarative.reading import args_of, merge
from raysgd.declarative.sft import Conversations
from raysgd.session.rank_state import seed_generators
from support.declared_runs import loop_of
from support.group_sessions import group_session
from support.tiny_language_models import make_folder, write_lines

LORA = {"r": 4, "lora_alpha": 8, "init_lora_weights": "gaussian"}
STEPS, PACKS_PER_STEP, LENGTH = 3, 4, 100


def make_files(folder: Path, **given: Any) -> Path:
    """Write a model and rows to a folder."""
    make_folder(folder / "model", **given)
    lines = [
        {
            "messages": [
                {"role": "user", "content": "x" * (1 + number % 5)},
                {"role": "assistant", "content": "abc" * (number % 4)},
            ]
        }
        for number in range(40)
    ]
    write_lines(
        folder / "rows.jsonl", [*lines, *({"prompt": "ab", "completion": "c" * number} for number in range(20))]
    )
    return folder


def values_of(folder: Path, **changes: Any) -> dict[str, Any]:
    given = {
        "path": str(folder / "rows.jsonl"),
        "tokenizer": str(folder / "model"),
        "max_length": LENGTH,
        "packing": True,
    }
    base = {
        "model": {"type": "raysgd.declarative.sft.CausalLM", "args": {"name": str(folder / "model"), "lora": LORA}},
        "optimizer": {
            "type": "torch.optim.AdamW",
            "args": {"lr": 0.05},
            "grad_reduction": "per-token-mean",
            "loss_reduction": "per-token-mean",
        },
        "dataset": {"type": "raysgd.declarative.sft.Conversations", "train_args": given},
        "dataset_sampler": {"train_args": {"shuffle": False}},
        "dataloader": {"train_args": {"collate_fn": "raysgd.declarative.sft.collate"}},
        "grad_accumulation_steps": PACKS_PER_STEP,
        "micro_batch_size": 1,
        "max_train_steps": STEPS,
        "seed": 0,
    }
    return as_values(args_of(merge(base, {name.replace("__", "."): value for name, value in changes.items()})))


def losses_of_a_plain_loop(folder: Path) -> list[float]:
    """Train with transformers and PEFT alone: each document by itself, the loss over all tokens of a step."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **LORA)
    model = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    rows = Conversations(str(folder / "rows.jsonl"), str(folder / "model"), max_length=LENGTH, packing=True)
    assert len(rows) > STEPS * PACKS_PER_STEP
    losses = []
    for step in range(STEPS):
        documents = []
        for place in range(step * PACKS_PER_STEP, (step + 1) * PACKS_PER_STEP):
            row = rows[place]
            sizes = torch.diff(
                torch.cat([torch.where(row["position_ids"] == 0)[0], torch.tensor([len(row["labels"])])])
            )
            documents += zip(row["input_ids"].split(sizes.tolist()), row["labels"].split(sizes.tolist()), strict=True)
        assert len(documents) > PACKS_PER_STEP
        num = sum(int((labels >= 0).sum()) for _, labels in documents)
        total = 0.0
        for ids, labels in documents:
            loss = model(input_ids=ids[None], labels=labels[None]).loss * int((labels >= 0).sum()) / num
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train_on_ranks(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Train in a process of a `RankGroup`, with checkpoints in a folder; return the metrics."""
    with group_session(folder):
        seed_generators(0, 0)
        return loop_of(values).train()
