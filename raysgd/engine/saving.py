"""What the engine saves in a checkpoint, and how it is restored under other strategies. Worker side.

Every rank saves the same tree, in which each tensor lies once, in shards: a tensor that several ranks hold in full is divided
among the replicas, and of a tensor of another stage there is only the description. Parameters are named as in the
model without strategies, and numbered as in the user's optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from raysgd._util.logs import get_logger
from raysgd._util.text import with_article
from raysgd.checkpoint.codecs.torch import AbsentTensor, is_dtensor
from raysgd.engine.composing import Composed
from raysgd.engine.model.local_tensors import make_dtensor
from raysgd.engine.model.precision import LossScale
from raysgd.engine.optimizer.engine_optimizer import EngineOptimizer
from raysgd.engine.optimizer.parameters import Change, list_names
from raysgd.engine.optimizer.schedule import Schedule
from raysgd.errors import CheckpointError
from raysgd.session import api
from raysgd.torch.model import unwrap
from raysgd.torch.restoring import restore

_logger = get_logger()
#: The names under which the engine saves its parts.
SAVED_NAMES = ("model", "optimizer", "lr_scheduler", "engine")


@dataclass(frozen=True)
class EngineState:
    """The state of a loop that is saved: its model, its optimizer and schedule if it has them, and the loss scale."""

    composed: Composed
    optimizer: EngineOptimizer | None
    schedule: Schedule | None
    loss_scale: LossScale

    def save(self) -> dict[str, Any]:
        """Return the state, with tensors as this rank has them."""
        composed = self.composed
        self._follow()
        engine = self.own_values(self.loss_scale.state_dict())
        state = {"model": unwrap(composed.model).state_dict(), "engine": engine}
        if self.optimizer is not None and composed.numbers is not None:
            state["optimizer"] = composed.numbers.state_of(self.optimizer.inner)
        if self.schedule is not None:
            state["lr_scheduler"] = self.schedule.scheduler.state_dict()
        return state

    def own_values(self, loss_scale: Any) -> dict[str, Any]:
        """Return the engine's own part of the state, with this state of the loss scale."""
        engine: dict[str, Any] = {"loss_scale": loss_scale, "tied": self.composed.tied, "given": self._given()}
        if self.optimizer is not None and self.composed.numbers is not None:
            self.composed.data_parallel.shards.take_parameters()
            engine["masters"] = self._masters()
        return engine

    def live_parts(self) -> dict[str, Any]:
        """Return what a live state holds where each rank has all of it, under the names of `save`."""
        parts: dict[str, Any] = {"model": unwrap(self.composed.model), "engine": _LiveEngine(self)}
        if self.optimizer is not None:
            parts["optimizer"] = _LiveOptimizer(self)
        if self.schedule is not None:
            parts["lr_scheduler"] = self.schedule.scheduler
        return parts

    def _follow(self) -> None:
        """Follow what the loop has added to the model and to the optimizer's groups."""
        if self.optimizer is not None and self.composed.numbers is not None:
            parameters = dict(unwrap(self.composed.model).named_parameters())
            self.composed.numbers.follow(self.optimizer.inner, parameters)

    def _given(self) -> dict[str, Any]:
        """Return what the program gave to the optimizer and to the scheduler, before any step."""
        given: dict[str, Any] = {} if self.schedule is None else {"lr_scheduler": self.schedule.given}
        if self.optimizer is not None and self.composed.numbers is not None:
            given["optimizer"] = self.composed.numbers.describe(self.optimizer.inner)
        return given

    def load(self, state: Any) -> None:
        """Restore what `save` returned, maybe on other ranks and under other strategies.

        What this program gives to the optimizer and the scheduler differently than the one that saved counts.

        Raises:
            CheckpointError: It is a checkpoint of another model or optimizer, or the engine did not save it.
        """
        if not isinstance(state, dict) or "engine" not in state:
            raise CheckpointError(
                "the checkpoint was not saved by engine.save_checkpoint: load it by raysgd.load_checkpoint()."
            )
        composed, own = self.composed, unwrap(self.composed.model).state_dict()
        self._follow()
        self._check_parts(state)
        self._check_model(state, own)
        given = state["engine"]["given"]
        changes: list[dict[str, Change]] = []
        is_other = False
        if self.optimizer is not None and composed.numbers is not None:
            changes = composed.numbers.load(
                self.optimizer.inner, state["optimizer"], given["optimizer"], composed.data_parallel.shards
            )
        if self.schedule is not None:
            is_other = self.schedule.load(state["lr_scheduler"], given["lr_scheduler"], changes)
        saved = {**state["model"], **state["engine"].get("masters", {})}
        restore({name: value for name, value in saved.items() if name in own}, into=composed.model)
        self.loss_scale.load_state_dict(state["engine"]["loss_scale"])
        composed.data_parallel.shards.take_parameters()
        restore(saved, into=self._masters())
        _report_changes(changes, is_other)

    def _check_parts(self, state: dict[str, Any]) -> None:
        """Check that the loop that saved the state had a scheduler and an optimizer if this one has them."""
        for name, value in (("optimizer", self.optimizer), ("lr_scheduler", self.schedule)):
            if value is not None and name not in state:
                raise CheckpointError(f"the checkpoint has no {name}, because the loop that saved it had none.")
        if self.optimizer is None or "lr_scheduler" not in state:
            return
        given = state["engine"]["given"]["lr_scheduler"]
        if self.schedule is None:
            raise CheckpointError(
                f"the checkpoint has the state of {with_article(given['type'])}, and there is no scheduler here: give "
                "lr_scheduler_fn, or load model and optimizer alone by raysgd.load_checkpoint()."
            )
        self.schedule.check(given)

    def _check_model(self, state: dict[str, Any], own: Mapping[str, Any]) -> None:
        """Check that the model of all stages has the names that were saved, and that what is one parameter here was one."""
        saved, names = set(state["model"]), self.composed.names | set(own)
        kinds = {
            "does not have": saved - names,
            "has in addition": names - saved,
            "has in other shapes": _reshaped(state["model"], own),
        }
        if found := [f"{what} {list_names(which)}" for what, which in kinds.items() if which]:
            raise CheckpointError(
                f"the checkpoint is that of another model: the {type(unwrap(self.composed.model)).__name__} here "
                f"{', and '.join(found)}. Make the same model, or load what fits by raysgd.load_checkpoint() and "
                "model.load_state_dict(..., strict=False)."
            )
        tied = state["engine"]["tied"]
        for name, first in self.composed.tied.items():
            if tied.get(name, name) != tied.get(first, first):
                raise CheckpointError(
                    f"{first} and {name} are one parameter of the model, and were two when the checkpoint was saved."
                )

    def _masters(self) -> dict[str, torch.Tensor]:
        """Return the master weights, which are in another type than their parameters, by the names of these."""
        tensors = self.composed.data_parallel.shards.tensor_of
        return {
            name: tensors[parameter].detach()
            for name, parameter in unwrap(self.composed.model).named_parameters()
            if parameter in tensors and tensors[parameter].dtype != parameter.dtype
        }


class _LiveOptimizer:
    """The optimizer of a live state, whose parameters have the numbers of a checkpoint."""

    def __init__(self, of: EngineState) -> None:
        assert of.optimizer is not None
        self._of, self.inner = of, of.optimizer.inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        self._of._follow()
        assert self._of.composed.numbers is not None
        return self._of.composed.numbers.state_of(self.inner)


class _LiveEngine:
    """The engine's own part of a live state."""

    def __init__(self, of: EngineState) -> None:
        self._of = of

    def live_tensors(self) -> Iterable[torch.Tensor]:
        return self._of.composed.data_parallel.shards.tensor_of.values()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        return partial(self._of.own_values, self._of.loss_scale.state_dict())


def _reshaped(saved: Mapping[str, Any], own: Mapping[str, Any]) -> set[str]:
    """Return the names of tensors that have other shapes than those that were saved, or numbers of another kind."""
    return {
        f"{name} ({tuple(saved[name].shape)} {str(saved[name].dtype).removeprefix('torch.')} was saved)"
        for name, value in own.items()
        if isinstance(value, torch.Tensor)
        and name in saved
        and hasattr(saved[name], "shape")
        and (tuple(value.shape), _kind(value.dtype)) != (tuple(saved[name].shape), _kind(saved[name].dtype))
    }


def _kind(dtype: Any) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _report_changes(changes: Sequence[Mapping[str, Change]], has_schedule: bool) -> None:
    """Log which settings of this program count in place of those of the program that saved the checkpoint."""
    found = {key: f"{key} {each.new} (was {each.old})" for group in changes for key, each in group.items()}
    if has_schedule:
        found["lr_scheduler"] = "the schedule of the learning rate"
    if found and api.world_rank() == 0:
        _logger.warning(
            "This program gives other settings than the one that saved the checkpoint, and they count: %s. All else is resumed.",
            ", ".join(found.values()),
        )


def spread(state: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Return a state in which each replica has its rows of the tensors that all hold in full, and all stages the same names."""
    replicas = mesh["dp"]
    return {key: _complete(_spread(dict(value), replicas), mesh["pp"]) for key, value in state.items()}


def _spread(tree: Any, replicas: DeviceMesh) -> Any:
    if isinstance(tree, dict):
        return {key: _spread(value, replicas) for key, value in tree.items()}
    if not isinstance(tree, torch.Tensor) or is_dtensor(tree) or not tree.ndim:
        return tree
    from torch.distributed.tensor import Shard

    own, _ = Shard(0)._split_tensor(tree.detach(), replicas.size(), with_padding=False, contiguous=False)
    return make_dtensor(own[replicas.get_local_rank()], replicas, [Shard(0)], tree.shape)


def _complete(tree: dict[Any, Any], stages: DeviceMesh) -> dict[Any, Any]:
    """Return a tree with what the other stages of the pipeline have in addition: descriptions of tensors, and small values."""
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
    """Return a tree with whole tensors in place of shards, in host memory. All ranks call it.

    Args:
        tree: A state, equal on all ranks but for the shards of its tensors.
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
    if is_dtensor(tree):
        whole = tree.full_tensor()
        return whole.cpu() if is_kept else None
    return tree


def _outline(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _outline(value) for key, value in tree.items()}
    if isinstance(tree, torch.Tensor) and tree.ndim:
        return AbsentTensor(tuple(tree.shape), tree.dtype)
    return tree.cpu() if isinstance(tree, torch.Tensor) else tree


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
