"""`Schedule`: the scheduler of a composed optimizer. It counts the optimizer's steps, and resumes. Worker side.

A checkpoint has what the program gave to the scheduler, next to the scheduler's state. If the program that loads it gives
something else, its own schedule counts: a new scheduler makes as many steps as the saved one had made.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from raysgd._util.text import with_article
from raysgd.engine.optimizer.engine_optimizer import EngineOptimizer
from raysgd.engine.optimizer.parameters import Change, plain
from raysgd.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from raysgd.engine.step import Step


class Schedule:
    """A scheduler whose ``step`` counts only where a step of the optimizer does, before it or after it.

    Args:
        make: Makes the scheduler of an optimizer; called again if the schedule has changed when a checkpoint is loaded.
        optimizer: The optimizer that is scheduled.
        given: The settings of the optimizer's groups, as the program gave them.
        steps: Knows which calls count.

    Attributes:
        scheduler: The user's scheduler.
    """

    def __init__(
        self, make: Callable[[Any], Any], optimizer: EngineOptimizer, given: Sequence[Mapping[str, Any]], steps: Step
    ) -> None:
        self._make, self._optimizer, self._given_groups = make, optimizer, given
        self.scheduler = scheduler = make(optimizer)
        kind = type(scheduler)
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigError(
                f"lr_scheduler_fn made {with_article(kind.__name__)} for another optimizer; make it for the one that it is "
                "called with."
            )
        self._given = plain(scheduler.state_dict()) if hasattr(scheduler, "state_dict") else {}
        momentum = {"momentum", "betas"} if getattr(scheduler, "cycle_momentum", False) else set()
        self._scheduled = [
            sorted(_changed(group, before) | (momentum & before.keys())) for before, group in self._with(given)
        ]

        @functools.wraps(kind.step)
        def step(self: Any, *args: Any, **kwargs: Any) -> None:
            if steps.should_schedule():
                kind.step(self, *args, **kwargs)
                steps.on_schedule()

        # By its class: a scheduler's state is all of its attributes.
        scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})

    @property
    def given(self) -> dict[str, Any]:
        """Describe what the program gave: the scheduler's type, its first state, and the settings that it changes."""
        return {"type": type(self.scheduler).__name__, "state": self._given, "scheduled": self._scheduled}

    def check(self, given: Mapping[str, Any]) -> None:
        """Check that this scheduler can resume from one of which the program gave this.

        Raises:
            CheckpointError: It follows more than the number of steps, and was of another kind.
        """
        if given["type"] != self.given["type"] and _needs_arguments(self.scheduler.step):
            raise CheckpointError(
                f"state['lr_scheduler'] is that of {with_article(given['type'])}; the lr_scheduler here is "
                f"{with_article(self.given['type'])}, which cannot resume from it."
            )

    def load(self, state: dict[str, Any], given: Mapping[str, Any], changes: Sequence[Mapping[str, Change]]) -> bool:
        """Resume at the position of a saved scheduler; the optimizer was loaded before.

        Args:
            state: That of the saved scheduler.
            given: What the program that saved it gave.
            changes: Settings of the optimizer's groups that this program gives, and the other one did not.

        Returns:
            Whether this program's schedule is another one, so that it counts.
        """
        has_other_rate = any("lr" in each for each in changes)
        if given == self.given and not has_other_rate and not _has_other_factors(self.scheduler, state):
            self.scheduler.load_state_dict(state)
            return False
        if (repeated := self._repeat(_position(state), given["scheduled"])) is not None:
            state, settings = repeated
        else:  # it follows a metric: what it has done to the rate stays
            settings = [
                _in_proportion(each["lr"], group) if "lr" in each else {} for each, group in self._with(changes)
            ]
            rates = [values.get("lr", group["lr"]) for values, group in self._with(settings)]
            own = self.scheduler.state_dict()
            changed = [key for key, value in self._given.items() if value != given["state"].get(key, value)]
            state = {**state, **{key: own[key] for key in changed}, "_last_lr": rates}
        self.scheduler.load_state_dict(state)
        for values, group in self._with(settings):
            for key, value in values.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        return True

    def _with(self, values: Sequence[Any]) -> Iterable[tuple[Any, dict[str, Any]]]:
        return zip(values, self._optimizer.param_groups, strict=True)

    def _repeat(
        self, position: int | None, also: Sequence[Sequence[str]]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """Make this program's schedule again, up to a position.

        Args:
            position: The number of steps.
            also: Settings of each group that the schedule of the other program has changed.

        Returns:
            The scheduler's state, and what it has made of the settings of each group; None: its steps follow more than
            their number.
        """
        inner = self._optimizer.inner
        optimizer = object.__new__(type(inner))
        groups = [
            {**copy.deepcopy(given), "params": group["params"]} for given, group in self._with(self._given_groups)
        ]
        vars(optimizer).update({**vars(inner), "param_groups": groups, "_opt_called": True})
        scheduler = self._make(optimizer)
        begin = _position(scheduler.state_dict())
        if position is None or begin is None or _needs_arguments(scheduler.step):
            return None
        scheduled = [{"lr", *keys} for keys in also]
        for number in range(position - begin + 1):
            if number:
                scheduler.step()
            if number in (0, 1, position - begin):
                for keys, group, given in zip(scheduled, groups, self._given_groups, strict=True):
                    keys |= _changed(group, given)
        state = scheduler.state_dict()
        if _position(state) != position:
            return None
        return state, [
            {key: group[key] for key in keys if key in group} for keys, group in zip(scheduled, groups, strict=True)
        ]


def _changed(group: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    """Return the settings of a group that are not as the program gave them."""
    return {key for key in group.keys() - {"params"} if key not in given or plain(group[key]) != plain(given[key])}


def _position(state: Mapping[str, Any]) -> int | None:
    """Return how many steps a scheduler with this state has made; None if it does not count them."""
    found = state.get("last_epoch")
    if found is None and state.get("_schedulers"):  # of torch's ChainedScheduler, which step together
        return _position(state["_schedulers"][0])
    return found if isinstance(found, int) else None


def _needs_arguments(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(
        each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters
    )


def _has_other_factors(scheduler: Any, state: Mapping[str, Any]) -> bool:
    """Return whether functions of a LambdaLR, which its state does not have, give other rates than those that were saved."""
    parts = zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ()), strict=False)
    if any(_has_other_factors(part, of_part) for part, of_part in parts):
        return True
    if not isinstance(scheduler, LambdaLR) or state["last_epoch"] < 0:
        return False
    of_functions = zip(scheduler.lr_lambdas, state["base_lrs"], strict=True)
    rates = [base * function(state["last_epoch"]) for function, base in of_functions]
    return bool(plain(rates) != plain(state["_last_lr"]))


def _in_proportion(rate: Change, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group whose rate a metric has changed: the new first rate, changed in the same proportion."""
    rates = {"lr": rate.new * (rate.saved / rate.old) if rate.old else rate.new}
    return rates | ({"initial_lr": rate.new} if "initial_lr" in group else {})
