"""The trainable that Ray Tune runs, whose trials are raysgd runs. Imported by `raysgd.Trainer.to_trainable` alone."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, cast

import ray
from ray.train._internal.session import _TrainingResult  # returned by Tune's `save`, an argument of `restore`
from ray.tune import Checkpoint as TuneCheckpoint
from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.result import DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT

from raysgd.callbacks.base import check_callbacks
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller.requests import TrainerSpec
from raysgd.controller.rounds import check_reduce
from raysgd.data.plan import DatasetPlan
from raysgd.errors import ConfigError
from raysgd.trainer import assembly
from raysgd.trainer.arguments import RunArguments, check_tuned_func, plan_data
from raysgd.trainer.resume_from import resolve_start
from raysgd.tune_integration.folds import FoldsTrial, check_folds
from raysgd.tune_integration.recipe import ArgumentsFrom, Recipe, Work
from raysgd.tune_integration.reuse import advise, note_end
from raysgd.tune_integration.trial import Trial
from raysgd.tune_integration.waiting import watch_first_trial
from raysgd.workers.pickling import Packed, dumps_named

if TYPE_CHECKING:
    from ray.train._internal.storage import StorageContext


class RaySGDTrainable(Trainable):
    """A trial. Its process is the driver of a run; it needs no resources and imports no framework.

    The interface is that of `ray.tune.Trainable`. `save` and `restore` are overridden as well, although Tune advises against
    it: the workers make checkpoints when train_func says so, and these are on storage already when Tune asks for one.
    """

    _recipe: ClassVar[Recipe]

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
        if ray.is_initialized():
            watch_first_trial(cls._recipe.work.hex(), cls._recipe.spec)
        return cls._recipe.resources(config)

    def setup(self, config: dict[str, Any], **parameters: Any) -> None:
        advise(self._recipe.work.hex())
        self._trial = (FoldsTrial if self._recipe.is_by_folds else Trial)(self._recipe, parameters)
        self._promised = self._has_reported = False  # promised: the last result said that a checkpoint comes with it
        self._trial.prepare(config, self._folder)

    def step(self) -> dict[str, Any]:
        # The end is a result of its own, as for Tune's functions. HyperBand forgets the trials it has paused if the last trial
        # of a bracket ends in the very round that the scheduler evaluates.
        self._promised = False
        result = self._trial.next()
        if result is not None:
            row, self._has_reported = {**result, DONE: False}, True
        elif not self._trial.has_new_checkpoint or not self._has_reported:
            return {RESULT_DUPLICATE: True}
        else:  # saved after the last round: Tune takes a checkpoint only with a result
            row = {**self._last, DONE: True}
        self._promised = row[SHOULD_CHECKPOINT] = self._trial.has_new_checkpoint
        return row

    def save(self, checkpoint_dir: str | None = None) -> _TrainingResult:
        """Copy the newest checkpoint of the rounds so far into a folder of the trial, unless Tune has that one already."""
        # Tune asks twice for the checkpoint of one result: first a scheduler, then Tune itself.
        if not self._trial.has_new_checkpoint and (self._promised or self._trial.is_over):
            return _TrainingResult(None, self._last)
        place = self._place
        place._check_validation_file()  # as Ray does: the search cannot use a disk that only this node has
        place._update_checkpoint_index({})
        metrics = self._trial.save_to(Storage(place.storage_filesystem, place.checkpoint_fs_path))
        if metrics is None:
            place.current_checkpoint_index -= 1
            return _TrainingResult(None, self._last)
        copied = TuneCheckpoint(place.checkpoint_fs_path, place.storage_filesystem)
        return _TrainingResult(copied, {**self._last, **metrics})

    def restore(self, checkpoint_path: Any) -> None:
        """Continue with the round after that of this checkpoint."""
        given: Any = checkpoint_path.checkpoint if isinstance(checkpoint_path, _TrainingResult) else checkpoint_path
        is_tunes = isinstance(given, TuneCheckpoint)
        folder = Storage(given.filesystem, given.path) if is_tunes else Storage.from_uri(given)
        self._iteration, self._time_total = self._trial.resume_from(folder)
        self._time_since_restore, self._iterations_since_restore = 0.0, 0
        self._restored, self._promised, self._has_reported = True, False, False

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._promised = self._has_reported = False
        self._last_result = None
        self._trial.prepare(new_config, self._folder)
        return True

    def cleanup(self) -> None:
        if self._trial.is_over:
            note_end(self._recipe.work.hex())
        self._trial.close()

    @property
    def _last(self) -> dict[str, Any]:
        """The last result, with the keys that Tune added."""
        return dict(cast("Any", self._last_result) or {})

    @property
    def _place(self) -> StorageContext:
        """Where Tune keeps this trial's files."""
        assert self._storage is not None
        return self._storage

    @property
    def _folder(self) -> Storage:
        return Storage(self._place.storage_filesystem, self._place.trial_fs_path)


def make_trainable(
    spec: TrainerSpec, run: RunArguments, *, trainer_args_from: ArgumentsFrom, cross_validate: bool
) -> type[Trainable]:
    """Make the trainable of `raysgd.Trainer.to_trainable`, which documents the arguments and errors."""
    if spec.run_config.detached:
        raise ConfigError(
            "RunConfig(detached=True) is for runs that outlive their driver, but a trial ends with its search; leave it out."
        )
    resume_from = run.resume_from
    if isinstance(resume_from, (str, PathLike)):  # trials have another working directory
        resume_from = Checkpoint.from_path(resume_from)
    _, state = resolve_start(resume_from)
    function, parameters = check_tuned_func(run.train_func)
    callbacks = check_callbacks(run.callbacks)
    reduce = check_reduce(run.reduce)
    if trainer_args_from is not None and not isinstance(trainer_args_from, str) and not callable(trainer_args_from):
        raise ConfigError(
            f"trainer_args_from={trainer_args_from!r} is neither a key of the config nor a function of it."
        )
    assembly.connect_ray(spec.run_config.ray_address)
    dataset = run.dataset
    work = Work(
        train_func=Packed.of(function, "train_func"),
        parameters=parameters,
        datasets=dataset if callable(dataset) and not hasattr(dataset, "__getitem__") else plan_data(dataset),
        callbacks=dumps_named(callbacks, "callbacks"),
        reduce=reduce,
        resume_from=resume_from if state is None else state,
    )
    if cross_validate and isinstance(work.datasets, DatasetPlan):
        check_folds(work.datasets)
    recipe = Recipe(spec, trainer_args_from, ray.put(work), is_by_folds=cross_validate)
    return type(
        work.train_func.name.rpartition(".")[2], (RaySGDTrainable,), {"_recipe": recipe, "__module__": __name__}
    )
