"""What all trials of a search have in common. Made in the driver, used there and in the trials' processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import ray
from ray.tune import PlacementGroupFactory

from raysgd._util.text import with_article
from raysgd.controller.requests import TrainerSpec
from raysgd.data.plan import DatasetPlan
from raysgd.errors import ConfigError
from raysgd.trainer.spec import ARGUMENTS, TrainerLike, change_spec, make_spec, num_workers_from_json
from raysgd.workers.pickling import Packed
from raysgd.workers.placement.capacity import NOTHING, slot_bundle
from raysgd.workers.placement.cluster import check_feasible

#: Where a trial's config has arguments of its Trainer: under a key, or returned by a function of the config.
ArgumentsFrom = str | Callable[[dict[str, Any]], Mapping[str, Any]] | None
#: Arguments of a Trainer that a trial cannot change: its files belong in the trial's folder.
_FIXED_ARGUMENTS = ("run_config",)


@dataclass(frozen=True)
class Work:
    """The function, the data and the callbacks of a search's trials. It is put into the object store once for all of them.

    Attributes:
        train_func: The pickled function. Trials' processes do not unpickle it, so they need nothing that it imports.
        parameters: Names of its arguments other than the config, which `ray.tune.with_parameters` gives.
        datasets: The plan of ``dataset=``, or a function of the config that returns a dataset.
        callbacks: A pickled list, unpickled for each run.
        reduce: Metrics to compute over all ranks.
        resume_from: Where a trial starts from: a `Checkpoint`, a state without models and optimizers, or None.
    """

    train_func: Packed
    parameters: tuple[str, ...]
    datasets: DatasetPlan | Callable[[dict[str, Any]], Any] = field(repr=False)
    callbacks: bytes = field(repr=False)
    reduce: Mapping[str, str] | None
    resume_from: Any = field(repr=False)

    def dataset(self, config: dict[str, Any]) -> Any:
        """Return the plan or the dataset of a trial with this config."""
        return self.datasets(config) if callable(self.datasets) else self.datasets


@dataclass(frozen=True)
class Recipe:
    """The settings of a search's trials. It is small, since it travels with the trainable.

    Attributes:
        spec: The settings of the Trainer that was converted.
        arguments_from: Which of them a trial's config changes.
        work: A reference to the `Work` in the object store.
        is_by_folds: Whether a trial is one run for each fold of its dataset.
    """

    spec: TrainerSpec
    arguments_from: ArgumentsFrom
    work: Any
    is_by_folds: bool = False

    def spec_for(self, config: dict[str, Any]) -> TrainerSpec:
        """Return the settings of a trial's Trainer.

        Raises:
            ConfigError: The config has arguments that a Trainer does not have, or values that cannot work.
        """
        if self.arguments_from is None:
            return self.spec
        source = "trainer_args_from(config)" if callable(self.arguments_from) else f"config[{self.arguments_from!r}]"
        try:
            return self._changed(source, config)
        except ConfigError:
            raise
        except Exception as error:  # raised by the user's function, or by a value that no check covers
            raise ConfigError(
                f"{source} does not give arguments of Trainer: {type(error).__name__}: {error}"
            ) from error

    def _changed(self, source: str, config: dict[str, Any]) -> TrainerSpec:
        name = self.arguments_from
        given = name(config) if callable(name) else config.get(str(name), {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"{source} is {with_article(type(given).__name__)}; give a dict of arguments of Trainer.")
        allowed = [name for name in ARGUMENTS if name not in _FIXED_ARGUMENTS]
        for name in given:
            if name not in allowed:
                raise ConfigError(f"{source} has {name!r}; a trial's Trainer can have {', '.join(allowed)}.")
        changed = dict(given)
        if "backend_args" in changed and "backend" not in changed:
            own = {field.name: getattr(self.spec.backend, field.name) for field in fields(self.spec.backend)}
            changed |= {"backend": self.spec.backend.name, "backend_args": {**own, **changed["backend_args"]}}
        if "num_workers" in changed:  # Tune may have written the config as JSON
            changed["num_workers"] = num_workers_from_json(changed["num_workers"])
        return change_spec(self.spec, changed)

    def resources(self, config: dict[str, Any]) -> PlacementGroupFactory:
        """Return the resources that Tune reserves for a trial.

        Raises:
            InfeasibleError: The cluster can never hold a trial.
        """
        try:
            spec = self.spec_for(config)
            if ray.is_initialized() and not spec.failure_config.wait_for_nodes_s:
                check_feasible(spec.scaling, spec.failure_config.num_spares)
        except ConfigError:
            if self.arguments_from is None:  # every trial would fail
                raise
            # Only this trial is wrong, and raises the error when it begins.
            return PlacementGroupFactory([dict(NOTHING)])
        return bundles_of(spec)


def bundles_of(spec: TrainerSpec) -> PlacementGroupFactory:
    """Return a trial's placement group: an empty bundle for its own process, and one for each worker and spare."""
    scaling = spec.scaling
    bundles = [slot_bundle(scaling)] * (scaling.min_workers + spec.failure_config.num_spares)
    return PlacementGroupFactory([{}, *bundles], strategy=scaling.placement_strategy)


def trial_resources(trainer: TrainerLike | None = None, **arguments: Any) -> PlacementGroupFactory:
    """Return the resources of a Tune function that makes a Trainer itself, for `ray.tune.with_resources`.

    Args:
        trainer: A `raysgd.Trainer` with the settings of the one that the function makes.
        **arguments: Without ``trainer``: the arguments of `raysgd.Trainer`, such as ``num_workers``.

    Raises:
        ConfigError: The arguments cannot work.
    """
    return bundles_of(make_spec(**arguments) if trainer is None else trainer._spec)
