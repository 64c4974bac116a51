"""The norm of gradients over all ranks, and clipping by it. Worker side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

#: The sets of axes over which parameters are divided.
_DIVIDED: tuple[tuple[str, ...], ...] = ((), ("dp",), ("tp",), ("dp", "tp"))


def global_norm(gradients: Sequence[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """Return the Euclidean norm of all gradients as one vector; the same on all ranks.

    Args:
        gradients: Of this rank's parameters. A DTensor counts once, however many ranks hold parts of it.
        mesh: The mesh of all workers. The gradients of its stages are added up.
    """
    device = torch.device(mesh.device_type)  # where the ranks communicate; offloaded gradients are on the CPU
    # By the axes over which a gradient is divided: each sum is added over these.
    squares: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        local: torch.Tensor = gradient
        axes: tuple[str, ...] = ()
        if isinstance(gradient, DTensor):
            local = gradient._local_tensor
            names = gradient.device_mesh.mesh_dim_names or ()
            axes = tuple(
                name for name, place in zip(names, gradient.placements, strict=True) if not place.is_replicate()
            )
        if local.numel():
            squares.setdefault(axes, []).append(local)
    total = torch.zeros((), dtype=torch.float32, device=device)
    # All ranks make the same collectives, whatever gradients they have.
    for divided in _DIVIDED:
        norms = torch._foreach_norm(squares[divided]) if divided in squares else []
        part = torch.zeros((), dtype=torch.float32, device=device)
        for norm in norms:
            part = part + norm.to(device, torch.float32) ** 2
        for axis in divided:
            if mesh[axis].size() > 1:
                dist.all_reduce(part, group=mesh[axis].get_group())
        total = total + part
    if mesh["pp"].size() > 1:
        dist.all_reduce(total, group=mesh["pp"].get_group())
    return total.sqrt()


def scale(gradients: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply gradients in place."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        by_device.setdefault(local.device, []).append(local)
    for device, tensors in by_device.items():
        torch._foreach_mul_(tensors, factor.to(device) if isinstance(factor, torch.Tensor) else factor)
