"""What all trials of a search have in common: made in the driver, used in the driver and in the trials' processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import ray
from ray.tune import PlacementGroupFactory

from raysgd._util.wording import with_article
from raysgd.data.plan import DatasetPlan
from raysgd.errors import ConfigError, InfeasibleError
from raysgd.trainer.assembly import TrainerSpec, arguments_of
from raysgd.trainer.inside import spec_of_trainer
from raysgd.trainer.trainer import Trainer
from raysgd.workers.cluster import check_feasible
from raysgd.workers.pickling import Packed
from raysgd.workers.placement import seat_bundle

#: Where a trial's config has arguments of its Trainer: under a name, or as a function tells.
ArgumentsFrom = str | Callable[[dict[str, Any]], Mapping[str, Any]] | None
#: Arguments of a Trainer that a trial cannot have for itself: its files belong into the trial's folder.
_NOT_OF_A_TRIAL = ("run",)


@dataclass(frozen=True)
class Work:
    """What trials do. It is put into the object store once for all of them.

    Attributes:
        train_func: Not opened in the trials' processes, which need nothing that it imports.
        needs: Its arguments beside the config, for `ray.tune.with_parameters`.
        datasets: What ``dataset=`` was resolved to; or a function of the config that gives what is to be resolved.
        callbacks: A pickled list, opened for each run.
        checkpoint: Where a trial starts from.
    """

    train_func: Packed
    needs: tuple[str, ...]
    datasets: DatasetPlan | Callable[[dict[str, Any]], Any] | None = field(repr=False)
    callbacks: bytes = field(repr=False)
    reduce: Mapping[str, str] | None
    checkpoint: Any = field(repr=False)


@dataclass(frozen=True)
class Recipe:
    """How trials are made. Small: it travels with the trainable.

    Attributes:
        spec: The Trainer that was converted.
        arguments_from: What of it a trial's config changes.
        work: A reference to the `Work`.
        is_by_folds: A trial is a run for each fold of its dataset.
    """

    spec: TrainerSpec
    arguments_from: ArgumentsFrom
    work: Any
    is_by_folds: bool = False

    def spec_for(self, config: dict[str, Any]) -> TrainerSpec:
        """The Trainer of a trial.

        Raises:
            ConfigError: The config has arguments that no Trainer has, or values that cannot work.
        """
        if self.arguments_from is None:
            return self.spec
        source = "trainer_args_from(config)" if callable(self.arguments_from) else f"config[{self.arguments_from!r}]"
        try:
            return self._changed(source, config)
        except ConfigError:
            raise
        except Exception as error:  # in a function of the user's, or for a value that no check knows
            raise ConfigError(f"{source} gives no arguments of Trainer: {type(error).__name__}: {error}") from error

    def _changed(self, source: str, config: dict[str, Any]) -> TrainerSpec:
        name = self.arguments_from
        given = name(config) if callable(name) else config.get(str(name), {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"{source} is {with_article(type(given).__name__)}; give a dict of arguments of Trainer.")
        arguments = arguments_of(self.spec)
        allowed = [name for name in arguments if name not in _NOT_OF_A_TRIAL]
        for name in given:
            if name not in allowed:
                raise ConfigError(f"{source} has {name!r}; a trial's Trainer can have {', '.join(allowed)}.")
        changed = dict(given)
        if "backend_args" in changed and "backend" not in changed:
            own = {field.name: getattr(self.spec.backend, field.name) for field in fields(self.spec.backend)}
            changed |= {"backend": self.spec.backend.name, "backend_args": {**own, **changed["backend_args"]}}
        if isinstance(num_workers := changed.get("num_workers"), list):  # as it is after a look through JSON
            changed["num_workers"] = tuple(math.inf if most is None else most for most in num_workers)
        return spec_of_trainer(Trainer(**{**arguments, **changed}))

    def resources(self, config: dict[str, Any]) -> PlacementGroupFactory:
        """What Tune is to reserve for a trial.

        Raises:
            InfeasibleError: No trial can ever have it.
        """
        if self.arguments_from is None:
            if ray.is_initialized():
                check_feasible(self.spec.scaling, self.spec.failure.spares)
            return bundles_of(self.spec)
        try:
            spec = self.spec_for(config)
            if ray.is_initialized():
                check_feasible(spec.scaling, spec.failure.spares)
        except (ConfigError, InfeasibleError):  # other trials may be sound: this one fails, and tells, when it begins
            return PlacementGroupFactory([{"CPU": 0.001}])
        return bundles_of(spec)


def bundles_of(spec: TrainerSpec) -> PlacementGroupFactory:
    """A placement group for a trial: its own process needs nothing, each worker and spare its bundle."""
    scaling = spec.scaling
    bundles = [seat_bundle(scaling)] * (scaling.min_workers + spec.failure.spares)
    return PlacementGroupFactory([{}, *bundles], strategy=scaling.placement_strategy)


def trial_resources(trainer: Trainer | None = None, **arguments: Any) -> PlacementGroupFactory:
    """The resources of a Tune function that makes a Trainer by itself, for `ray.tune.with_resources`.

    Args:
        trainer: A Trainer like the one it makes.
        **arguments: Or the arguments of that, such as ``num_workers``.

    Raises:
        ConfigError: The arguments cannot work.
    """
    return bundles_of(spec_of_trainer(Trainer(**arguments) if trainer is None else trainer))
