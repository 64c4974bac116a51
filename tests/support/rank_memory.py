"""Measures what a rank of a gloo group holds for a small model that the engine has composed. Runs in `torch_ranks.RankGroup`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from support.planned_models import small_models

#: Models whose layers the engine shares.
TENSOR_PARALLEL = ("gpt2", "llama", "bert", "t5", "encoder")


def measure_rank(name: str, cases: list[tuple[str, int]]) -> dict[str, dict[str, float]] | None:
    """Measure one training step of a model under several strategies.

    Args:
        name: The model.
        cases: Strategies (``"zero_0"`` to ``"zero_3"``, ``"tensor"``) with numbers of ranks. The first ranks of the group
            take part.

    Returns:
        Bytes by kind, for each ``"<strategy> <ranks>"``; None on ranks other than 0.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from raysgd.torch.meshes import AXES

    rank, one = dist.get_rank(), small_models()[name]
    found = {}
    for strategy, count in cases:
        shape = (1, 1, count) if strategy == "tensor" else (count, 1, 1)
        mesh = DeviceMesh("cpu", torch.arange(count).reshape(shape), mesh_dim_names=AXES)  # made by all ranks
        if rank < count:
            torch.manual_seed(0)
            found[f"{strategy} {count}"] = _measure(one.make().train(), one.batch(one.num_rows), strategy, mesh)
    return found if rank == 0 else None


def _measure(model: Any, batch: dict[str, Any], strategy: str, mesh: Any) -> dict[str, float]:
    import torch
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.nn.parallel import DistributedDataParallel

    from raysgd.engine.composing import compose
    from raysgd.engine.config import EngineConfig
    from raysgd.engine.model.memory_use import KeptActivations

    stage = 0 if strategy == "tensor" else int(strategy[-1])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    shards, trained = None, model
    if strategy == "zero_0":
        trained = DistributedDataParallel(model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True)
    else:
        config = EngineConfig(zero_stage=stage, tensor_parallel=mesh["tp"].size())
        made = compose(config, lambda: mesh, model, optimizer)
        shards, trained = made.data_parallel.shards, made.model
    held = {"parameters": _count_bytes([*model.parameters(), *model.buffers()])}
    tracker: Any = None
    kept = KeptActivations(trained)
    if strategy in ("zero_3", "tensor"):
        tracker = FSDPMemTracker(model, optimizer) if strategy == "zero_3" else MemTracker()
        tracker.track_external(model, optimizer, *batch.values())
        with tracker, kept.measuring():
            _step(trained, batch)
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        bytes_of = {getattr(kind, "name", kind): size for kind, size in peak.items()}
        held["activations"] = bytes_of["ACT"] + bytes_of["TEMP"]
        held["peak"] = bytes_of["Total"] - sum(one.nbytes for one in batch.values())
    else:
        if shards is not None:
            shards.is_collecting = True
        with kept.measuring():
            _step(trained, batch)
    held["kept_activations"] = kept.num_bytes
    if shards is not None:
        shards.collect_gradients()
    updated = [] if shards is None else shards.tensor_of.values()
    held["gradients"] = _count_bytes(one.grad for one in {*updated, *model.parameters()} if one.grad is not None)
    with nullcontext() if shards is None else shards.in_place(optimizer, with_gradients=True):
        optimizer.step()
    states = [one for state in optimizer.state.values() for one in state.values()]
    held["optimizer"] = _count_bytes(states)
    known = {_local(one).untyped_storage().data_ptr() for one in model.parameters()}
    held["copies"] = _count_bytes(one for one in updated if _local(one).untyped_storage().data_ptr() not in known)
    return held


def _count_bytes(tensors: Iterable[Any]) -> float:
    """Sum this rank's elements of tensors. Storages are not counted: gradients are views of one storage for each block."""
    return float(sum(_local(one).nbytes for one in tensors))


def _local(tensor: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _step(model: Any, batch: dict[str, Any]) -> None:
    import torch

    out = model(**batch)
    (out if isinstance(out, torch.Tensor) else out.loss).backward()
