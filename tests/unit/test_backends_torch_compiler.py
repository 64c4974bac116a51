"""The import of torch's compiler is deferred in workers: training needs none of it, and its first use imports all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: What a worker does before train_func, and a network of one layer.
BEGIN = """
import os, sys, threading
from raysgd.backends.torch import TorchConfig

TorchConfig().make_backend().load()

import torch
import torch.distributed as dist
from raysgd.backends.torch_compiler import is_deferred

assert is_deferred()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
x = torch.ones(3, 4)
"""

TRAINING = """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
    optimizer = kind(wrapped.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})

from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()
sharded = fully_shard(torch.nn.Linear(4, 2))
sharded(x).sum().backward()
torch.optim.SGD(sharded.parameters(), lr=0.1).step()

import raysgd

with raysgd.local():
    optimizer = torch.optim.AdamW(model.parameters())
    engine = raysgd.Engine(zero_stage=1)
    made = engine.compose(model=model, optimizer=optimizer)
dist.destroy_process_group()
assert is_deferred(), "training has imported the compiler"
assert {name for name in sys.modules if name.startswith("torch._dynamo.")} <= {"torch._dynamo.config"}
"""

#: What first uses the compiler, each in a process of its own; torch is imported once for all of them.
FIRST_USES = [
    "import torch._dynamo.config",
    "import torch._dynamo.utils, torch._dynamo.repro.after_aot",
    "torch._dynamo.config.optimize_ddp = False; assert torch._dynamo.utils.get_optimize_ddp_mode() == 'no_optimization'",
    "torch._dynamo.utils.counters",
    "assert torch.compiler.disable(lambda value: value + 1)(1) == 2",
    "[each.start() for each in (first, second)]; [each.join() for each in (first, second)]",
]

USES = """
import torch.utils.checkpoint
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # it asks the compiler to leave its functions alone
failed = []

def use(statement):
    try:
        exec(statement)
    except BaseException as error:
        failed.append(error)

first = threading.Thread(target=use, args=("import torch._dynamo.config",))
second = threading.Thread(target=use, args=("torch.compile(model, backend='aot_eager')(x)",))

def check():
    model(x).sum().backward()
    before = model.weight.detach().clone()

    @torch.compile(backend="eager")
    def step(value):
        optimizer.step()
        optimizer.zero_grad()
        return value + 1

    assert step(torch.ones(1)).item() == 2 and not torch.equal(before, model.weight)
    name = "torch._dynamo"
    assert not failed and not is_deferred() and torch._dynamo is sys.modules[name]
    assert type(torch._dynamo) is type(sys) and torch._dynamo.__file__.endswith("__init__.py")
    parts = [each for each in sys.modules if each.startswith(name + ".") and each.count(".") == 2]
    assert len(parts) > 20
    for each in parts:
        module = sys.modules[each]
        found = getattr(torch._dynamo, each.rpartition(".")[2])  # a function of the same name may have its place
        assert module.__spec__.name == each and (found is module or type(found) is not type(sys)), each
    assert torch.optim.Optimizer.zero_grad.__wrapped__.__dict__["__dynamo_disable"] is not (
        torch.optim.Optimizer.zero_grad.__wrapped__
    ), "the compiler does not leave it alone"

for use_of_it in FIRST_USES:
    if os.fork() == 0:
        try:
            exec(use_of_it)
            check()
        except BaseException as error:
            print(f"{use_of_it}: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.wait()
    print("ok" if status == 0 else f"status {status}", flush=True)
"""


def run(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_training_does_not_import_the_compiler() -> None:
    run(BEGIN + TRAINING)


@pytest.mark.nightly  # each use imports the whole compiler
@pytest.mark.timeout(200)
def test_first_use_imports_the_whole_compiler() -> None:
    out = run(f"{BEGIN}\nFIRST_USES = {FIRST_USES!r}\n{USES}")
    assert out.split() == ["ok"] * len(FIRST_USES), out
