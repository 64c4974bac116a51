"""What a training with the engine does not import: each import delays the first step of every worker."""

from __future__ import annotations

import json
import subprocess
import sys

#: DTensors import sympy, which takes a second or more; stages and tensor-parallel layers import FSDP.
LATER = ("sympy", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo.eval_frame", "transformers")
TRAINING = f"""
import json, sys
from raysgd.backends.torch import TorchConfig

TorchConfig().make_backend().load()

import torch
import raysgd

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
engine = raysgd.Engine(precision="bf16", clip_grad_norm=1.0, activation_checkpointing="full", accumulation_steps=2)
model, optimizer, *_ = engine.compose(model=model, optimizer=torch.optim.AdamW(model.parameters()))
for _ in range(4):
    engine.backward(model(torch.ones(3, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps([name for name in {LATER} if name in sys.modules]))
"""


def test_training_without_shards_imports_neither_dtensors_nor_fsdp() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
