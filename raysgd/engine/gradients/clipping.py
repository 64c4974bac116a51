"""The gradients of an optimizer's step: their norm over all ranks, clipping, and hiding unfinished ones. Worker side."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.engine.model.local_tensors import local_of
from raysgd.errors import UsageError

#: The sets of axes over which parameters are divided.
_DIVIDED: tuple[tuple[str, ...], ...] = ((), ("dp",), ("tp",), ("dp", "tp"))


class Gradients:
    """The gradients of what an optimizer updates.

    Args:
        parameters: Returns the model's, as they are now.
        shards: What the optimizer updates in place of parameters.
        mesh: Returns the mesh of all workers.
        is_sharded: Whether data-parallel ranks may hold shards of gradients.
        counted_elsewhere: Ids of tensors whose gradients another rank counts in the norm.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.Tensor]],
        shards: Mapping[torch.Tensor, torch.Tensor],
        mesh: Callable[[], DeviceMesh],
        *,
        is_sharded: bool,
        counted_elsewhere: Collection[int],
    ) -> None:
        self._parameters, self._shards, self._mesh = parameters, shards, mesh
        self._is_sharded, self._counted_elsewhere = is_sharded, counted_elsewhere
        self._known_norm: torch.Tensor | None = None  # of gradients that the loop has not changed since, by `_noted`
        # Not ids: a gradient that takes the place of another may get its id, and have as many changes.
        self._noted: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def updated(self) -> list[torch.Tensor]:
        """Return what is updated: the model's parameters, or what is in their place."""
        return [self._shards.get(each, each) for each in self._parameters()]

    def found(self) -> list[torch.Tensor]:
        """Return the gradients that there are."""
        return [each.grad for each in self.updated() if each.grad is not None]

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients."""
        self._known_norm = None
        scale(self.found(), factor)

    def take(self) -> dict[torch.Tensor, torch.Tensor]:
        """Take all gradients away; returns them, by what they were the gradients of."""
        taken = {each: each.grad for each in self.updated() if each.grad is not None}
        for each in taken:
            each.grad = None
        return taken

    def make_zeros(self, parameters: Collection[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Return zeros for those of ``parameters`` that have a gradient, by what it is the gradient of."""
        updated = [self._shards.get(each, each) for each in parameters]
        return {each: torch.zeros_like(each.grad) for each in updated if each.grad is not None}

    def norm(self) -> torch.Tensor:
        """Return the norm of all gradients over all ranks; it is computed once, unless they change."""
        if self._known_norm is not None and not self.are_changed():
            return self._known_norm
        counted = [
            each.grad for each in self.updated() if each.grad is not None and id(each) not in self._counted_elsewhere
        ]
        return global_norm(counted, self._mesh(), is_sharded=self._is_sharded)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip all gradients by their norm, which is returned."""
        norm = self.norm()
        if max_norm != float("inf"):  # an infinite norm would make all gradients NaN
            self.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def note(self, norm: torch.Tensor | None = None) -> None:
        """Remember which gradients there are, and their norm if it is known."""
        self._known_norm = norm
        self._noted = [(weakref.ref(each), each._version) for each in map(local_of, self.found())]

    def are_changed(self) -> bool:
        """Return whether a gradient was changed or replaced since `note`."""
        found = [local_of(each) for each in self.found()]
        return len(found) != len(self._noted) or any(
            noted() is not each or version != each._version
            for each, (noted, version) in zip(found, self._noted, strict=True)
        )


def global_norm(gradients: Sequence[torch.Tensor], mesh: DeviceMesh, *, is_sharded: bool) -> torch.Tensor:
    """Return the Euclidean norm of all gradients as one vector; the same on all ranks.

    Args:
        gradients: Of this rank's parameters. A DTensor counts once, however many ranks hold parts of it.
        mesh: The mesh of all workers. The gradients of its stages are added up.
        is_sharded: Whether data-parallel ranks may hold parts of gradients.
    """
    device = torch.device(mesh.device_type)  # where the ranks communicate; offloaded gradients are on the CPU
    # By the axes over which a gradient is divided: each sum is added over these.
    parts_of: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        local, axes = local_of(gradient), tuple[str, ...]()
        if is_dtensor(gradient):
            names = gradient.device_mesh.mesh_dim_names or ()
            axes = tuple(
                name for name, place in zip(names, gradient.placements, strict=True) if not place.is_replicate()
            )
        if local.numel():
            parts_of.setdefault(axes, []).append(local)
    parts = torch.zeros(len(_DIVIDED), dtype=torch.float32, device=device)
    for number, divided in enumerate(_DIVIDED):
        if divided in parts_of:
            # Few operations, however many gradients there are: each takes a GPU some microseconds.
            norms = torch._foreach_norm(parts_of[divided], dtype=torch.float32)
            parts[number] = torch.stack([norm.to(device) for norm in norms]).square().sum()
    # All ranks make the same collectives, whatever gradients they have.
    for axis in ("dp", "tp"):
        if _size(mesh, axis) > 1 and (is_sharded or axis != "dp"):
            places = [number for number, divided in enumerate(_DIVIDED) if axis in divided]
            over_axis = parts[places]
            dist.all_reduce(over_axis, group=mesh.get_group(axis))
            parts[places] = over_axis
    total = parts.sum()
    if _size(mesh, "pp") > 1:
        dist.all_reduce(total, group=mesh.get_group("pp"))
    return total.sqrt()


def _size(mesh: DeviceMesh, axis: str) -> int:
    """Return the ranks along an axis; ``mesh[axis]`` would make a mesh, which takes half a millisecond."""
    assert mesh.mesh_dim_names is not None
    return mesh.size(mesh.mesh_dim_names.index(axis))


def scale(gradients: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply gradients in place."""
    if isinstance(factor, float) and factor == 1:
        return
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        local = local_of(gradient)
        by_device.setdefault(local.device, []).append(local)
    for device, tensors in by_device.items():
        torch._foreach_mul_(tensors, factor.to(device) if isinstance(factor, torch.Tensor) else factor)


class HostFlag:
    """A truth value that a device computes, on its way to the host: nobody waits for the device before it is asked.

    Attributes:
        value: The value on the device, a scalar of bool.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self._on_host, self._copied = value, None
        if value.is_cuda:
            self._on_host = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._on_host.copy_(value, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def ask(self) -> bool:
        """Wait until the device has computed the value, but for nothing that it has been given since; returns the value."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._on_host)


class HiddenGradients:
    """Gradients of a step that is not complete: sums over some of its batches, of this rank maybe.

    A loop that clips, scales or reads gradients after each batch finds none, and acts on the complete ones alone. The smallest
    one is zeros instead: ``clip_grad_value_`` raises an error if there is none at all.
    """

    def __init__(self) -> None:
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._zeros: tuple[torch.Tensor, torch.Tensor] | None = None  # and whose they are

    def hide(self, tensors: Iterable[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """Take the gradients of tensors away, of which the loop finds those of ``parameters``."""
        for each in tensors:
            if each.grad is not None:
                self._hidden.append((each, each.grad))
                each.grad = None
        smallest = min((each for each in parameters if each.requires_grad), key=torch.Tensor.numel, default=None)
        if smallest is not None:
            smallest.grad = torch.zeros_like(smallest)
            self._zeros = smallest, smallest.grad

    def is_strange(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has got a gradient since its own was hidden."""
        return tensor.grad is not None and not (self._zeros is not None and tensor.grad is self._zeros[1])

    def restore(self) -> None:
        """Give the tensors their gradients again, so that a backward pass adds to them.

        Raises:
            UsageError: One of them has got another gradient.
        """
        owners = [each for each, _ in self._hidden] + ([] if self._zeros is None else [self._zeros[0]])
        if any(self.is_strange(each) for each in owners):
            raise UsageError(
                "a parameter got a gradient between the batches of one optimizer step (accumulation_steps), which did not come "
                "from engine.backward: call engine.backward(loss) in place of loss.backward(), and change gradients when the "
                "step is complete."
            )
        if self._zeros is not None:
            self._zeros[0].grad = None
        for each, gradient in self._hidden:
            each.grad = gradient
        self.drop()

    def drop_strange(self, tensors: Iterable[torch.Tensor]) -> None:
        """Drop the gradients that tensors have got since theirs were hidden."""
        for each in tensors:
            if self.is_strange(each):
                each.grad = None

    def drop(self) -> None:
        """Forget the gradients."""
        self._hidden.clear()
        self._zeros = None

    def num_bytes(self) -> int:
        """Return what the gradients take in memory."""
        storages = [local_of(each).untyped_storage() for _, each in self._hidden]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())  # those of a bucket share one
