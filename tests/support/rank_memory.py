"""Measures what each rank of a gloo group holds for small models, under DDP, FSDP2 and tensor parallelism.

``python -m support.rank_memory RANK WORLD_SIZE STORE OUT`` is one rank; `measure_ranks` starts them all. One group serves all
models: starting processes and importing torch and transformers takes most of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORLD_SIZES = (2, 4)
STRATEGIES = ("zero_0", "zero_3", "tensor")
#: Models whose layers torch's ``parallelize_module`` can share as they are: others have Conv1D layers or fixed head counts.
TENSOR_PARALLEL = ("llama", "opt", "mlp")


def measure_ranks(folder: Path, timeout_s: float) -> dict[str, Any]:
    """Start the ranks, wait for them and return what rank 0 measured: ``{"<model> <strategy> <ranks>": bytes by kind}``."""
    out = folder / "measured.json"
    count = max(WORLD_SIZES)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "support.rank_memory", str(rank), str(count), str(folder / "store"), str(out)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        errors = [process.communicate(timeout=timeout_s)[1] for process in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    failed = [error for process, error in zip(ranks, errors, strict=True) if process.returncode]
    assert not failed, failed[0][-3000:]
    return dict(json.loads(out.read_text()))


def main(rank: int, world_size: int, store: str, out: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from support.planned_models import small_models

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    meshes = {}
    for count in WORLD_SIZES:
        group = dist.new_group(list(range(count)))
        if rank < count:
            meshes[count] = DeviceMesh.from_group(group, "cpu", mesh=list(range(count)))
    measured = {}
    for name, one in small_models().items():
        for strategy in STRATEGIES:
            if strategy == "tensor" and name not in TENSOR_PARALLEL:
                continue
            for count, mesh in meshes.items():
                torch.manual_seed(0)
                model = one.make().train()
                measured[f"{name} {strategy} {count}"] = _measure(model, one.batch(one.num_rows), strategy, mesh)
    if rank == 0:
        Path(out).write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def _measure(model: Any, batch: dict[str, Any], strategy: str, mesh: Any) -> dict[str, float]:
    import torch
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.nn.parallel import DistributedDataParallel

    trained = model
    if strategy == "zero_0":
        trained = DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    elif strategy == "zero_3":
        _shard(model, mesh)
    else:
        _share_layers(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    held: dict[str, float] = {"parameters": _count_bytes([*model.parameters(), *model.buffers()])}
    if strategy == "zero_0":
        _step(trained, batch)
    else:
        tracker = FSDPMemTracker(model, optimizer) if strategy == "zero_3" else MemTracker()
        tracker.track_external(model, optimizer, *batch.values())
        with tracker:
            _step(trained, batch)
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        bytes_of = {getattr(kind, "name", kind): size for kind, size in peak.items()}
        held["activations"] = bytes_of["ACT"] + bytes_of["TEMP"]
        held["peak"] = bytes_of["Total"] - sum(one.nbytes for one in batch.values())
    held["gradients"] = _count_bytes(one.grad for one in model.parameters() if one.grad is not None)
    optimizer.step()
    held["optimizer"] = _count_bytes(one for state in optimizer.state.values() for one in state.values())
    return held


def _count_bytes(tensors: Any) -> float:
    """Sum this rank's elements of tensors.

    Storages are not counted: FSDP2's gradients are views of one storage for each block, and under tensor parallelism the
    embedding's gradient is a view of a gradient of the whole vocabulary.
    """
    from torch.distributed.tensor import DTensor

    return float(sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors))


def _step(model: Any, batch: dict[str, Any]) -> None:
    import torch

    out = model(**batch)
    (out if isinstance(out, torch.Tensor) else out.loss).backward()


def _shard(model: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    from raysgd.engine.planning.layout import find_layout

    for _, block in find_layout(model).blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _share_layers(model: Any, mesh: Any) -> None:
    from torch import nn
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from raysgd.engine.planning.layout import find_layout

    plan: dict[str, Any] = {}
    for name, (kind, _) in find_layout(model).kinds.items():
        module, _, parameter = name.rpartition(".")
        if parameter != "weight":
            continue
        if kind == "vocabulary":
            is_embedding = isinstance(model.get_submodule(module), nn.Embedding)
            plan[module] = (
                RowwiseParallel(input_layouts=Replicate())
                if is_embedding
                else ColwiseParallel(output_layouts=Replicate())
            )
        else:
            plan[module] = ColwiseParallel() if kind == "column" else RowwiseParallel()
    parallelize_module(model, mesh, plan)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # a tied weight has become two


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
