"""`mesh`: a torch device mesh over all workers, whose axes fit the workers that hold one replica of the model. Worker side."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raysgd.config.checks import check_count
from raysgd.errors import ConfigError, UsageError
from raysgd.session import context
from raysgd.session.base import Session
from raysgd.torch.devices import device

#: The axes of every mesh, outermost first: replicas of the model, stages of its layers, parts of each layer.
AXES = ("dp", "pp", "tp")
# By session: a mesh belongs to the process group of one attempt.
_meshes: weakref.WeakKeyDictionary[Session, dict[tuple[int, ...], DeviceMesh]] = weakref.WeakKeyDictionary()


def mesh(*, tensor_parallel: int | None = None, pipeline_parallel: int = 1) -> DeviceMesh:
    """Return the mesh of all workers, with the axes ``"dp"``, ``"pp"`` and ``"tp"``.

    The workers of one replica of the model, ``Trainer(workers_per_replica=...)``, are neighbours: ranks 0 and 1 with two of them.
    ``mesh()["dp"]`` is what FSDP's ``fully_shard`` takes. The first call with these sizes makes process groups, so all ranks
    call it; later calls in an attempt return the same mesh. Call it in each train_func: after a failure it is another one.

    Args:
        tensor_parallel: Size of the axis ``"tp"``; by default all workers of a replica that ``pipeline_parallel`` leaves.
        pipeline_parallel: Size of the axis ``"pp"``.

    Raises:
        ConfigError: The two sizes do not make up ``workers_per_replica``.
        UsageError: There are several workers but no torch process group.
    """
    session = context.current()
    each = session.identity.workers_per_replica
    check_count("pipeline_parallel", pipeline_parallel, minimum=1)
    size = check_count(
        "tensor_parallel", each // pipeline_parallel if tensor_parallel is None else tensor_parallel, minimum=0
    )
    if size * pipeline_parallel != each:
        needed = max(1, size) * pipeline_parallel
        raise ConfigError(
            f"mesh(tensor_parallel={tensor_parallel}, pipeline_parallel={pipeline_parallel}): {needed} workers would hold a "
            f"replica of the model, and the Trainer was made with workers_per_replica={each}; give "
            f"Trainer(..., workers_per_replica={needed}), so that data and group sizes fit."
        )
    shape = (session.identity.data_parallel_size, pipeline_parallel, size)
    made = _meshes.setdefault(session, {})
    if shape not in made:
        _check_group(session)
        made[shape] = init_device_mesh(device().type, shape, mesh_dim_names=AXES)
    return made[shape]


def _check_group(session: Session) -> None:
    if dist.is_initialized():
        return
    if session.world_size > 1:
        raise UsageError(
            f"mesh() with {session.world_size} workers needs a torch process group, but there is none: use "
            'Trainer(backend="torch").'
        )
    # Single-machine use: a group of this process alone.
    dist.init_process_group(
        "nccl" if device().type == "cuda" else "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
