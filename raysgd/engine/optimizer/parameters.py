"""The parameters of a user's optimizer: replaced by those that the engine makes, and numbered as they were. Worker side."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from raysgd._util.text import with_article
from raysgd.checkpoint.placing import place_like
from raysgd.engine.optimizer.shards import OptimizerShards
from raysgd.errors import CheckpointError, ConfigError

#: Settings of an optimizer's groups that say how steps are computed, not which.
_OF_KERNELS = ("fused", "foreach", "capturable")
#: State that an optimizer has only if a setting is on.
_NEEDED = {
    "Adam": {"amsgrad": "max_exp_avg_sq"},
    "AdamW": {"amsgrad": "max_exp_avg_sq"},
    "RMSprop": {"centered": "grad_avg", "momentum": "momentum_buffer"},
}
#: Names that an error lists.
_MAX_NAMES = 5


@dataclass(frozen=True)
class Change:
    """A setting of an optimizer's group that another program gave differently.

    Attributes:
        old: What the program that saved the checkpoint gave.
        new: What this program gives.
        saved: What the setting was when the checkpoint was saved.
    """

    old: Any
    new: Any
    saved: Any


class OptimizerNumbers:
    """An optimizer as the program gave it: settings of its groups, names and numbers of its parameters.

    The numbers are those of ``state_dict``; also of parameters that other stages of a pipeline have.

    Args:
        optimizer: The user's, as it was given.
        names: The name of each parameter in the user's model.

    Attributes:
        given: The settings of its groups.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> None:
        self._type = type(optimizer).__name__
        self._names: dict[Any, str] = dict(names)
        self._groups: list[list[Any]] = [group["params"] for group in optimizer.param_groups]
        self._has_all = True
        self.given = [copy.deepcopy(_without_parameters(group)) for group in optimizer.param_groups]

    def replace(self, replaced: Mapping[Any, torch.Tensor]) -> None:
        """Follow a replacement of all parameters that this rank has; the others are of other stages of a pipeline."""
        self._has_all = all(each in replaced for group in self._groups for each in group)
        self._groups = [[replaced.get(each, each) for each in group] for group in self._groups]
        self._names = {replaced.get(each, each): name for each, name in self._names.items()}

    def follow(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take in the groups that the loop has added to the optimizer, and the parameters that it has added to the model."""
        for name, parameter in parameters.items():
            self._names.setdefault(parameter, name)
        self.given += [copy.deepcopy(_without_parameters(group)) for group in optimizer.param_groups[len(self.given) :]]

    def _parameters(self, optimizer: Optimizer) -> list[list[Any]]:
        return [group["params"] for group in optimizer.param_groups] if self._has_all else self._groups

    def _names_of(self, optimizer: Optimizer) -> list[list[str]]:
        return [[self._names[each] for each in group] for group in self._parameters(optimizer)]

    def describe(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what the program gave, which a checkpoint has next to the optimizer's state."""
        settings = [plain(each) for each in self.given]
        return {"type": self._type, "names": self._names_of(optimizer), "settings": settings}

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state under these numbers: of its own parameters, and the settings of all groups."""
        groups = self._parameters(optimizer)
        of = {parameter: number for number, parameter in enumerate(itertools.chain(*groups))}
        state = {of[each]: dict(values) for each, values in optimizer.state.items() if each in of}
        settings = [
            {**_without_parameters(group), "params": [of[each] for each in parameters]}
            for group, parameters in zip(optimizer.param_groups, groups, strict=True)
        ]
        return {"state": dict(sorted(state.items())), "param_groups": settings}

    def load(
        self, optimizer: Optimizer, saved: Mapping[str, Any], given: Mapping[str, Any], shards: OptimizerShards
    ) -> list[dict[str, Change]]:
        """Restore what `state_of` returned, maybe on other ranks, under other strategies and in another order.

        Settings that this program gives differently than the one that saved them stay as they are; all others are restored.

        Args:
            optimizer: The user's.
            saved: What `state_of` returned.
            given: What `describe` returned in the program that saved it.
            shards: What it updates in place of its parameters.

        Returns:
            The settings that this program gives differently, for each group.

        Raises:
            CheckpointError: It was saved for an optimizer of another kind, or for other groups of parameters.
        """
        order = self._find_groups(self._names_of(optimizer), given)
        number_of = dict(
            zip(_flat(given["names"]), _flat(each["params"] for each in saved["param_groups"]), strict=True)
        )
        state: dict[int, Any] = {}
        groups, changes, place = [], [], 0
        for group, own, at in zip(optimizer.param_groups, self.given, order, strict=True):
            settings = _without_parameters(saved["param_groups"][at])
            old = given["settings"][at]
            changes.append(
                {
                    key: Change(old[key], plain(value), plain(settings[key]))
                    for key, value in own.items()
                    if key in old and key in settings and key not in _OF_KERNELS and plain(value) != old[key]
                }
            )
            places = range(place, place + len(group["params"]))
            kept = {key: group[key] for key in _OF_KERNELS if key in group}  # a strategy, or what the device can
            new = {key: own[key] for key in changes[-1]}
            groups.append({**own, **settings, **new, **kept, "params": list(places)})
            for index, parameter in zip(places, group["params"], strict=True):
                number = number_of[self._names[parameter]]
                if number in saved["state"]:
                    where = f"state['optimizer']['state'][{number}]"
                    state[index] = {
                        key: place_like(key, value, shards.tensor_of.get(parameter, parameter), f"{where}[{key!r}]")
                        for key, value in saved["state"][number].items()
                    }
            place = places.stop
        self._check_state(changes, saved["state"].values())
        with shards.in_place(optimizer, with_gradients=False):
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        return changes

    def _find_groups(self, names_of_groups: Sequence[Sequence[str]], given: Mapping[str, Any]) -> list[int]:
        """Return the places of the saved groups that have the parameters of these ones."""
        if given["type"] != self._type:
            raise CheckpointError(
                f"state['optimizer'] was saved by {with_article(given['type'])}; the optimizer here is "
                f"{with_article(self._type)}, which has another state: give the same one, or load the model alone by "
                "raysgd.load_checkpoint()."
            )
        places: dict[tuple[str, ...], list[int]] = {}
        for place, names in enumerate(given["names"]):
            places.setdefault(tuple(sorted(names)), []).append(place)
        found = [places.get(tuple(sorted(names)), []) for names in names_of_groups]
        if len(given["names"]) == len(names_of_groups) and all(found):
            return [each.pop(0) for each in found]
        own, saved = set(_flat(names_of_groups)), set(_flat(given["names"]))
        raise CheckpointError(
            f"state['optimizer'] was saved for groups of {[len(names) for names in given['names']]} parameters, and the "
            f"optimizer here has groups of {[len(names) for names in names_of_groups]}: "
            + (f"{list_names(own - saved)} were not in it, " if own - saved else "")
            + (f"{list_names(saved - own)} are not here, " if saved - own else "")
            + ("" if own != saved else "the same parameters are in other groups, ")
            + "so it cannot be restored. Give the optimizer the same parameters; those that are not to be trained can have "
            "requires_grad=False."
        )

    def _check_state(self, changes: Sequence[Mapping[str, Change]], states: Iterable[Mapping[str, Any]]) -> None:
        """Check that no setting was switched on that needs state which an optimizer makes in its first step alone."""
        for key, needed in _NEEDED.get(self._type, {}).items():
            if any(each[key].new for each in changes if key in each) and any(needed not in state for state in states):
                raise CheckpointError(
                    f"{self._type}({key}={next(each[key].new for each in changes if key in each)!r}) needs {needed} of each "
                    f"parameter, which the checkpoint does not have: leave {key} as it was."
                )


def replace_parameters(
    optimizer: Optimizer, replaced: Mapping[nn.Parameter, torch.Tensor], *, dropped: Container[nn.Parameter] = ()
) -> None:
    """Make an optimizer update other tensors in place of its parameters: groups stay, and its state moves to them.

    Args:
        optimizer: Changed in place.
        replaced: The new tensors by the old parameters. State of a parameter's shape is distributed as the new one is.
        dropped: Parameters that other ranks update.

    Raises:
        ConfigError: It keeps its parameters in other places too, or has parameters that were not replaced.
    """
    name = type(optimizer).__name__
    is_same = all(old is new for old, new in replaced.items())
    if not is_same and (kept := sorted(key for key, value in vars(optimizer).items() if _holds(value, replaced))):
        raise ConfigError(
            f"{name} keeps its parameters in {', '.join(kept)} too, so it cannot be moved to the parameters that the engine has "
            "made; give the engine an optimizer that reads param_groups alone, as AdamW does."
        )
    new_groups = []
    for number, group in enumerate(optimizer.param_groups):
        known = [parameter in replaced or parameter in dropped for parameter in group["params"]]
        unknown = [place for place, is_known in enumerate(known) if not is_known]
        if unknown:
            raise ConfigError(
                f"{name} has parameters that are not the model's (group {number}, parameter {unknown[0]}): make the optimizer of "
                "model.parameters()."
            )
        new_groups.append([replaced[parameter] for parameter in group["params"] if parameter in replaced])
    for group, parameters in zip(optimizer.param_groups, new_groups, strict=True):
        group["params"] = parameters
    for old, new in replaced.items():
        if old is not new and old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {
                key: place_like(key, value, new, f"the optimizer's {key}") for key, value in state.items()
            }


def plain(value: Any) -> Any:
    """Return a setting in plain types, in which equal ones are equal; what is not data is named by its type."""
    if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def list_names(names: Collection[str]) -> str:
    """Return names for an error, of which there may be many."""
    listed = ", ".join(sorted(names)[:_MAX_NAMES])
    return listed if len(names) <= _MAX_NAMES else f"{listed} and {len(names) - _MAX_NAMES} more"


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _flat(lists: Iterable[Sequence[Any]]) -> list[Any]:
    return [each for values in lists for each in values]


def _holds(value: Any, parameters: Mapping[nn.Parameter, Any]) -> bool:
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, torch.Tensor) and item in parameters for item in value
    )


def refuse_optimizer(optimizer: Optimizer) -> ConfigError:
    """Return the error for an optimizer that cannot update parameters of which each rank has a part."""
    return ConfigError(
        f"{type(optimizer).__name__} needs whole parameters, and each rank has a part of them with zero_stage=1, 2 or 3 and with "
        "tensor_parallel: give zero_stage=0, which carries any optimizer, or an optimizer that updates each number by itself, as "
        "AdamW and SGD do."
    )
