"""The parameters of a user's optimizer: replaced by those that the engine makes, and numbered as they were. Worker side."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from raysgd.engine.optimizer_shards import OptimizerShards
from raysgd.errors import CheckpointError, ConfigError
from raysgd.torch.restoring import place_like

#: Settings of an optimizer's groups that say how steps are computed, not which.
_OF_KERNELS = ("fused", "foreach", "capturable")


class OptimizerNumbers:
    """The numbers of an optimizer's parameters, as ``state_dict`` counts them; also of those that other ranks update.

    Args:
        optimizer: The user's, as it was given.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups: list[list[Any]] = [group["params"] for group in optimizer.param_groups]
        self._has_all = True

    def replace(self, replaced: Mapping[Any, torch.Tensor]) -> None:
        """Follow a replacement of all parameters that this rank has; the others are of other stages of a pipeline."""
        self._has_all = all(each in replaced for group in self._groups for each in group)
        self._groups = [[replaced.get(each, each) for each in group] for group in self._groups]

    def _numbers(self, optimizer: Optimizer) -> tuple[dict[Any, int], list[list[int]]]:
        """Return the number of each parameter, and those of each group."""
        groups = [group["params"] for group in optimizer.param_groups] if self._has_all else self._groups
        of = {parameter: number for number, parameter in enumerate(itertools.chain(*groups))}
        return of, [[of[each] for each in group] for group in groups]

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state under these numbers: of its own parameters, and the settings of all groups."""
        of, of_groups = self._numbers(optimizer)
        state = {of[each]: dict(values) for each, values in optimizer.state.items() if each in of}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": numbers}
            for group, numbers in zip(optimizer.param_groups, of_groups, strict=True)
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load(self, optimizer: Optimizer, saved: Mapping[str, Any], shards: OptimizerShards) -> None:
        """Restore what `state_of` returned, maybe on other ranks and under other strategies.

        Raises:
            CheckpointError: It was saved for other groups of parameters.
        """
        of, of_groups = self._numbers(optimizer)
        if [group["params"] for group in saved["param_groups"]] != of_groups:
            raise CheckpointError(
                f"state['optimizer'] was saved for groups of {[len(group['params']) for group in saved['param_groups']]} "
                f"parameters; this optimizer has {[len(numbers) for numbers in of_groups]}."
            )
        state: dict[int, Any] = {}
        groups, place = [], 0
        for group, of_saved in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            places = range(place, place + len(group["params"]))
            own = {key: group[key] for key in _OF_KERNELS if key in group}  # a strategy, or what the device can
            groups.append({**of_saved, **own, "params": list(places)})
            for index, parameter in zip(places, group["params"], strict=True):
                number = of[parameter]
                if number in saved["state"]:
                    where = f"state['optimizer']['state'][{number}]"
                    state[index] = {
                        key: place_like(key, value, shards.tensor_of.get(parameter, parameter), f"{where}[{key!r}]")
                        for key, value in saved["state"][number].items()
                    }
            place = places.stop
        with shards.in_place(optimizer, with_gradients=False):
            optimizer.load_state_dict({"state": state, "param_groups": groups})


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
