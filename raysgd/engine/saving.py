"""What the engine saves in a checkpoint, and how it is restored under other strategies. Worker side.

Every rank saves the same tree, in which each tensor lies once, in pieces: a tensor that several ranks hold in full is divided
among the copies of the model, and of a tensor of another stage there is only the description. Parameters are named as in the
model without strategies, and numbered as in the user's optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from raysgd.checkpoint.codecs.torch import AbsentTensor
from raysgd.errors import CheckpointError
from raysgd.torch.restoring import place_like

#: Settings of an optimizer's groups that say how steps are computed, not which.
_OF_KERNELS = ("fused", "foreach", "capturable")


class OptimizerNumbers:
    """The numbers of an optimizer's parameters before the engine replaced any, as ``state_dict`` counts them.

    Args:
        optimizer: The user's, as it was given.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups: list[list[int]] = []
        self.of: dict[torch.Tensor, int] = {}
        for group in optimizer.param_groups:
            first = len(self.of)
            self.of |= {parameter: first + place for place, parameter in enumerate(group["params"])}
            self.groups.append(list(range(first, len(self.of))))

    def replace(self, replaced: Mapping[Any, torch.Tensor]) -> None:
        """Follow a replacement of parameters."""
        self.of |= {new: self.of[old] for old, new in replaced.items() if old in self.of}

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state under these numbers: of its own parameters, and the settings of all groups."""
        state = {self.of[parameter]: dict(values) for parameter, values in optimizer.state.items()}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": numbers}
            for group, numbers in zip(optimizer.param_groups, self.groups, strict=True)
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Restore what `state_of` returned, maybe on other ranks and under other strategies.

        Raises:
            CheckpointError: It was saved for other groups of parameters.
        """
        if [group["params"] for group in saved["param_groups"]] != self.groups:
            raise CheckpointError(
                f"state['optimizer'] was saved for groups of {[len(group['params']) for group in saved['param_groups']]} "
                f"parameters; this optimizer has {[len(numbers) for numbers in self.groups]}."
            )
        state: dict[int, Any] = {}
        groups, place = [], 0
        for group, of_saved in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            places = range(place, place + len(group["params"]))
            own = {key: group[key] for key in _OF_KERNELS if key in group}  # a strategy, or what the device can
            groups.append({**of_saved, **own, "params": list(places)})
            for index, parameter in zip(places, group["params"], strict=True):
                number = self.of[parameter]
                if number in saved["state"]:
                    where = f"state['optimizer']['state'][{number}]"
                    state[index] = {
                        key: place_like(key, value, parameter, f"{where}[{key!r}]")
                        for key, value in saved["state"][number].items()
                    }
            place = places.stop
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def spread(tree: Any, mesh: DeviceMesh) -> Any:
    """Return a tree in which each copy of the model has its rows of the tensors that all hold in full."""
    if isinstance(tree, dict):
        return {key: spread(value, mesh) for key, value in tree.items()}
    if not isinstance(tree, torch.Tensor) or isinstance(tree, DTensor) or not tree.ndim:
        return tree
    copies = mesh["dp"]
    own, _ = Shard(0)._split_tensor(tree.detach(), copies.size(), with_padding=False, contiguous=False)
    return DTensor.from_local(
        own[copies.get_local_rank()],
        copies,
        [Shard(0)],
        run_check=False,
        shape=tree.shape,
        stride=torch.empty(tree.shape, device="meta").stride(),
    )


def complete(tree: dict[Any, Any], mesh: DeviceMesh) -> dict[Any, Any]:
    """Return a tree with what the other stages of the pipeline have in addition: descriptions of tensors, and small values."""
    stages = mesh["pp"]
    if stages.size() == 1:
        return tree
    outlines: list[Any] = [None] * stages.size()
    dist.all_gather_object(outlines, _outline(tree), group=stages.get_group())
    merged: Any = {}
    for outline in outlines:
        merged = _merge(merged, outline)
    filled: dict[Any, Any] = _fill(merged, tree)
    return filled


def collect(tree: Any, *, is_kept: bool) -> Any:
    """Return a tree with whole tensors in place of pieces, in host memory. All ranks call it.

    Args:
        tree: A state, equal on all ranks but for the pieces of its tensors.
        is_kept: Whether this rank needs the result.

    Raises:
        CheckpointError: A tensor is in another stage of the pipeline.
    """
    if isinstance(tree, dict):
        return {key: collect(value, is_kept=is_kept) for key, value in tree.items()}
    if isinstance(tree, AbsentTensor):
        raise CheckpointError(
            "a merged checkpoint cannot be saved with pipeline_parallel, whose stages hold different tensors: save without "
            "merged=True, and merge it afterwards by `raysgd ckpt merge`."
        )
    if isinstance(tree, DTensor):
        whole = tree.full_tensor()
        return whole.cpu() if is_kept else None
    return tree


def _outline(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _outline(value) for key, value in tree.items()}
    if isinstance(tree, torch.Tensor) and tree.ndim:
        return AbsentTensor(tuple(tree.shape), tree.dtype)
    return tree.detach().cpu() if isinstance(tree, torch.Tensor) else tree


def _merge(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _merge(one.get(key, other.get(key)), other.get(key, one.get(key))) for key in {**one, **other}}
    return one


def _fill(outline: Any, tree: Any) -> Any:
    if isinstance(outline, dict):
        own = tree if isinstance(tree, dict) else {}
        return {
            key: _fill(value, own.get(key)) for key, value in sorted(outline.items(), key=lambda item: str(item[0]))
        }
    return outline if tree is None or not isinstance(tree, torch.Tensor) or not tree.ndim else tree
