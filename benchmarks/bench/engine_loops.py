"""The same training loop written with the engine, by hand with torch, with Accelerate and with Fabric. Runs in workers."""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import raysgd

#: Makes one optimizer step.
Step = Callable[[], None]

#: What each case asks of a loop. ``tensor_parallel`` needs twice as many ranks.
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "bf16": {"precision": "bf16"},
    "accumulation": {"accumulation_steps": 4},
    "fsdp2": {"zero_stage": 3},
    "fsdp2_tp": {"zero_stage": 3, "tensor_parallel": 2},
}
_SHAPE = {"vocabulary": 4096, "hidden": 256, "inner": 688, "layers": 4, "heads": 4, "sequence": 128, "batch": 4}


class NotSupportedError(Exception):
    """A library has no such strategy on this machine."""


def make_model() -> nn.Module:
    """Make a small LLaMA with random weights, equal on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_SHAPE["vocabulary"],
            hidden_size=_SHAPE["hidden"],
            intermediate_size=_SHAPE["inner"],
            num_hidden_layers=_SHAPE["layers"],
            num_attention_heads=_SHAPE["heads"],
            num_key_value_heads=_SHAPE["heads"],
            use_cache=False,
        )
    )


def make_batch() -> torch.Tensor:
    """Make a batch of token numbers, [batch, sequence], another one for each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(_SHAPE["vocabulary"], (_SHAPE["batch"], _SHAPE["sequence"]), generator=generator)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


# -- the loops -----------------------------------------------------------------------------------------------------------


def by_hand(case: dict[str, Any]) -> Step:
    """Write it with torch alone."""
    model, tokens = make_model(), make_batch()
    num_batches, precision = case.get("accumulation_steps", 1), case.get("precision", "fp32")
    if case.get("zero_stage") == 3:
        _shard_by_hand(model, case.get("tensor_parallel", 1))
        called: nn.Module = model
    else:
        called = nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(called)

    def step() -> None:
        for number in range(num_batches):
            is_last = number == num_batches - 1
            quiet = contextlib.nullcontext() if is_last or called is model else called.no_sync()
            with quiet:
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    loss = called(input_ids=tokens, labels=tokens).loss / num_batches
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _shard_by_hand(model: nn.Module, tensor_parallel: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    sizes = (dist.get_world_size() // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    if tensor_parallel > 1:
        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.*.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.*.{name}"] = RowwiseParallel()
        parallelize_module(model, mesh["tp"], plan)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def with_engine(case: dict[str, Any]) -> Step:
    """Write it with raysgd's engine."""
    engine = raysgd.Engine(**case)
    model = make_model()
    model, optimizer, *_ = engine.compose(model=model, optimizer=make_optimizer(model))
    tokens = make_batch()

    def step() -> None:
        for _ in range(case.get("accumulation_steps", 1)):
            engine.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()

    return step


def with_accelerate(case: dict[str, Any]) -> Step:
    """Write it with Hugging Face Accelerate."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    if "tensor_parallel" in case:
        raise NotSupportedError("its tensor parallelism needs a model that was loaded with a plan")
    plugin = None
    if case.get("zero_stage") == 3:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision="bf16" if case.get("precision") == "bf16" else "no",
        gradient_accumulation_steps=case.get("accumulation_steps", 1),
        fsdp_plugin=plugin,
    )
    model = make_model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    if plugin is not None and not any(isinstance(each, DTensor) for each in model.parameters()):
        raise NotSupportedError(
            "it shards no models on CPUs: the plugin for FSDP2 is ignored, and each rank has a whole copy"
        )
    tokens = make_batch()

    def step() -> None:
        for _ in range(case.get("accumulation_steps", 1)):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                optimizer.step()
                optimizer.zero_grad()

    return step


def with_fabric(case: dict[str, Any]) -> Step:
    """Write it with Lightning Fabric."""
    from lightning_fabric import Fabric

    if "zero_stage" in case:
        raise NotSupportedError("its strategies for sharded models need a GPU")
    fabric = Fabric(
        accelerator="cpu",
        strategy="ddp",
        devices=dist.get_world_size(),
        precision="bf16-mixed" if case.get("precision") == "bf16" else "32-true",
    )
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, make_optimizer(model))
    tokens, num_batches = make_batch(), case.get("accumulation_steps", 1)

    def step() -> None:
        for number in range(num_batches):
            with fabric.no_backward_sync(model, enabled=number < num_batches - 1):
                fabric.backward(model(input_ids=tokens, labels=tokens).loss / num_batches)
        optimizer.step()
        optimizer.zero_grad()

    return step


LOOPS: dict[str, Callable[[dict[str, Any]], Step]] = {
    "by_hand": by_hand,
    "by_hand_again": by_hand,
    "engine": with_engine,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
}


# -- train functions -----------------------------------------------------------------------------------------------------


def measure_steps(config: dict[str, Any]) -> dict[str, Any]:
    """Take the time of steps of all loops in turn, in the same processes.

    Args:
        config: ``case``; ``rounds``, in each of which every loop makes ``steps`` steps, in a random order.

    Returns:
        ``ms``: of each loop the milliseconds of a step in each round. ``missing``: why a loop was left out.
    """
    case = CASES[config["case"]]
    loops, missing = {}, {}
    for name, make in LOOPS.items():
        try:
            loops[name] = make(case)
            loops[name]()
        except (NotSupportedError, ImportError) as error:
            loops.pop(name, None)
            missing[name] = str(error)
    taken: dict[str, list[float]] = {name: [] for name in loops}
    order = random.Random(0)
    gc.collect()
    gc.disable()
    for number in range(config["rounds"] + 1):
        for name in order.sample(sorted(loops), len(loops)):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(config["steps"]):
                loops[name]()
            dist.barrier()
            if number:  # the first round warms up
                taken[name].append(1000 * (time.perf_counter() - began) / config["steps"])
    gc.enable()
    return {"ms": taken, "missing": missing}


def measure_bytes(config: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return for each stage of ZeRO the bytes of rank 0's parameters, gradients and optimizer state after a step."""
    found = {}
    for stage in range(4):
        engine = raysgd.Engine(zero_stage=stage)
        model = make_model()
        model, optimizer, *_ = engine.compose(model=model, optimizer=make_optimizer(model))
        tokens = make_batch()
        for _ in range(2):
            optimizer.zero_grad()
            engine.backward(model(input_ids=tokens, labels=tokens).loss)
            use = engine.memory()
            optimizer.step()
        use_after = engine.memory()
        found[str(stage)] = {
            "parameters": use.parameters,
            "gradients": use.gradients,
            "optimizer": use_after.optimizer,
        }
    found["theory"] = {"parameters": sum(4 * each.numel() for each in make_model().parameters())}
    return found


def median_ratio(taken: dict[str, list[float]], name: str, base: str) -> float:
    """Return the median over the rounds of a loop's time by that of another."""
    return statistics.median(one / other for one, other in zip(taken[name], taken[base], strict=True))
