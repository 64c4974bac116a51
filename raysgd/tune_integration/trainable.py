"""What Ray Tune runs: a trainable whose trials are raysgd runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, cast

import ray
from ray.train._internal.session import _TrainingResult  # what Tune's `save` gives, and `restore` takes
from ray.tune import Checkpoint as TuneCheckpoint
from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.result import DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT

from raysgd.callbacks.base import Callback
from raysgd.callbacks.checks import check_callbacks
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.storage import Storage
from raysgd.controller.reducing import check_reduce
from raysgd.data.plan import DatasetPlan
from raysgd.errors import ConfigError
from raysgd.trainer import assembly
from raysgd.trainer.given import check_tuned_func, plan_data, resolve_start
from raysgd.trainer.inside import spec_of_trainer
from raysgd.trainer.trainer import Trainer
from raysgd.tune_integration.folds import FoldsTrial
from raysgd.tune_integration.recipe import ArgumentsFrom, Recipe, Work
from raysgd.tune_integration.trial import Trial
from raysgd.workers.pickling import Packed, dumps_named

if TYPE_CHECKING:
    from ray.train._internal.storage import StorageContext


class RaySGDTrainable(Trainable):
    """A trial. Its process drives a run, as a script with a Trainer would; it needs no resources, and no framework.

    Tune's interface is that of `ray.tune.Trainable`. Where a method is overridden that Tune means to be left alone, it is
    for checkpoints, which are made by the workers when train_func says so, and are on storage when Tune asks for them.
    """

    _recipe: ClassVar[Recipe]

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
        return cls._recipe.resources(config)

    def setup(self, config: dict[str, Any], **parameters: Any) -> None:
        self._trial = (FoldsTrial if self._recipe.is_by_folds else Trial)(self._recipe, parameters)
        self._promised = self._has_reported = False
        self._trial.prepare(config, self._folder)

    def step(self) -> dict[str, Any]:
        # The end is told by itself, as Tune's functions tell it: schedulers that pause trials judge a round, and HyperBand
        # forgets those that it has paused where the last of a bracket comes to its end in the round that is judged.
        self._promised = False
        result = self._trial.next()
        if result is not None:
            row, self._has_reported = {**result, DONE: False}, True
        elif not self._trial.has_new_checkpoint or not self._has_reported:
            return {RESULT_DUPLICATE: True}
        else:  # saved after the last round: Tune takes checkpoints with results only
            row = {**self._last, DONE: True}
        self._promised = row[SHOULD_CHECKPOINT] = self._trial.has_new_checkpoint
        return row

    def save(self, checkpoint_dir: str | None = None) -> _TrainingResult:
        """The newest checkpoint of the rounds so far, in a folder of the trial; none where Tune has that already."""
        # Where it was given with this result already, Tune asks twice: a scheduler, and then Tune itself.
        if not self._trial.has_new_checkpoint and (self._promised or self._trial.is_over):
            return _TrainingResult(None, self._last)
        place = self._place
        place._check_validation_file()  # as Ray does: a disk of this node alone is of no use to the search
        place._update_checkpoint_index({})
        metrics = self._trial.save_to(Storage(place.storage_filesystem, place.checkpoint_fs_path))
        if metrics is None:
            place.current_checkpoint_index -= 1
            return _TrainingResult(None, self._last)
        copied = TuneCheckpoint(place.checkpoint_fs_path, place.storage_filesystem)
        return _TrainingResult(copied, {**self._last, **metrics})

    def restore(self, checkpoint_path: Any) -> None:
        """Have the next round be the one after this checkpoint's."""
        given: Any = checkpoint_path.checkpoint if isinstance(checkpoint_path, _TrainingResult) else checkpoint_path
        is_tunes = isinstance(given, TuneCheckpoint)
        folder = Storage(given.filesystem, given.path) if is_tunes else Storage.from_uri(given)
        self._iteration, self._time_total = self._trial.go_on_from(folder)
        self._time_since_restore, self._iterations_since_restore = 0.0, 0
        self._restored, self._promised, self._has_reported = True, False, False

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._promised = self._has_reported = False
        self._last_result = None
        self._trial.prepare(new_config, self._folder)
        return True

    def cleanup(self) -> None:
        self._trial.close()

    @property
    def _last(self) -> dict[str, Any]:
        """The last result, with what Tune has added."""
        return dict(cast("Any", self._last_result) or {})

    @property
    def _place(self) -> StorageContext:
        """Where Tune has this trial's files."""
        assert self._storage is not None
        return self._storage

    @property
    def _folder(self) -> Storage:
        return Storage(self._place.storage_filesystem, self._place.trial_fs_path)


def make_trainable(
    trainer: Trainer,
    train_func: Callable[..., Any],
    dataset: Any = None,
    *,
    callbacks: Sequence[Callback] = (),
    checkpoint: Any = None,
    reduce: dict[str, str] | None = None,
    trainer_args_from: ArgumentsFrom = None,
    cross_validate: bool = False,
) -> type[Trainable]:
    """See `raysgd.Trainer.to_trainable`."""
    spec = spec_of_trainer(trainer)
    if spec.run.detached:
        raise ConfigError(
            "RunConfig(detached=True) is for runs that outlive their driver; a trial ends with its search."
        )
    if isinstance(checkpoint, (str, PathLike)):  # here, since trials have another working directory
        checkpoint = Checkpoint.from_path(checkpoint)
    resolve_start(checkpoint)
    function, needs = check_tuned_func(train_func)
    check_callbacks(callbacks)
    if trainer_args_from is not None and not isinstance(trainer_args_from, str) and not callable(trainer_args_from):
        raise ConfigError(f"trainer_args_from={trainer_args_from!r}; give a name in the config, or a function of it.")
    assembly.connect_ray()
    work = Work(
        train_func=Packed.of(function, "train_func"),
        needs=needs,
        datasets=dataset if callable(dataset) and not hasattr(dataset, "__getitem__") else plan_data(dataset),
        callbacks=dumps_named(list(callbacks), "callbacks"),
        reduce=check_reduce(reduce),
        checkpoint=checkpoint,
    )
    if cross_validate and isinstance(work.datasets, DatasetPlan) and work.datasets.folds is None:
        raise ConfigError(
            "cross_validate=True is for a tuple of (train, validation) pairs, as raysgd.data.to_cv makes them."
        )
    recipe = Recipe(spec, trainer_args_from, ray.put(work), is_by_folds=cross_validate)
    return type(
        work.train_func.name.rpartition(".")[2], (RaySGDTrainable,), {"_recipe": recipe, "__module__": __name__}
    )
