"""`train` and `evaluate`: a declarative training as a run of a `raysgd.Trainer`. Driver side; only a plan imports torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from raysgd._util.logs import get_logger
from raysgd.callbacks.base import Callback
from raysgd.callbacks.progress.callback import ProgressCallback
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.links import list_manifests
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import read_manifest
from raysgd.config import CheckpointConfig, FailureConfig, RunConfig
from raysgd.config.checks import check_choice, from_mapping, split_path
from raysgd.declarative.args import TrainerArgs, as_values
from raysgd.declarative.checking import check_names, working_in
from raysgd.declarative.fields import FieldError, of_field
from raysgd.declarative.loggers import make_callbacks
from raysgd.declarative.reading import Tree, args_of, merge
from raysgd.declarative.strategies import Strategies, check_sizes, decide, list_warnings
from raysgd.declarative.values import Importer
from raysgd.engine.config import EngineConfig
from raysgd.errors import CheckpointNotFoundError, ConfigError
from raysgd.trainer.resume_from import FoundCheckpoint, find_checkpoint
from raysgd.trainer.trainer import Trainer

PLAN_FILES = ("plan.txt", "plan.json")


@dataclass(frozen=True)
class Training:
    """The train_func of a declarative training.

    Attributes:
        base: Values of the training that a config replaces.
        engine: The engine's config.
        folder: The working directory of the driver, from which modules are imported.
        allowed: See `raysgd.declarative.values.Importer`.
        stage: None: it trains; else what it evaluates.
        metric: The metric of a search, whose trials report results with it alone; None: all results are reported.
    """

    base: Mapping[str, Any]
    engine: EngineConfig
    folder: str
    allowed: tuple[str, ...] | None = None
    stage: str | None = None
    metric: str | None = None

    @property
    def __name__(self) -> str:
        return "training" if self.stage is None else "evaluation"

    def __call__(self, config: dict[str, Any]) -> dict[str, Any]:
        """Run on one worker. The config has values of the training, with dots in their names in a search."""
        args = args_of(merge(self.base, config) if self.base else config)
        with working_in(self.folder):
            from raysgd.declarative.loop import TrainingLoop

            loop = TrainingLoop(args, self.engine, Importer(self.allowed, args), metric=self.metric)
            return loop.train() if self.stage is None else loop.evaluate(self.stage)


def train(
    args: TrainerArgs | Mapping[str, Any],
    *,
    callbacks: Sequence[Callback] = (),
    allow_import: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Train as `TrainerArgs` say, on workers of a Ray cluster.

    Args:
        args: The training; a dict has its fields as a YAML file has them.
        callbacks: Further callbacks of the run.
        allow_import: Modules from which components may be imported, with all below them. None: any.

    Returns:
        The newest metrics, ``finished_train_steps`` and ``best_loss``; with ``run_mode="compile"`` the paths of the plan's files;
        with ``search`` the best value of all steps and trials, with its step, config and checkpoint.

    Raises:
        ConfigError: A value cannot work, or a training begins in a folder that has checkpoints of another one.
        CheckpointNotFoundError: ``checkpoint.resume_from`` is a path, and there is no checkpoint.
    """
    job = _Job.of(args, allow_import)
    with working_in(os.getcwd()):
        strategies = job.decide()
        if job.args.run_mode == "compile":
            return write_plan(job.args, strategies)
        if job.args.search is not None:
            from raysgd.declarative.searching import search

            given = [*job.callbacks, *callbacks]
            return search(job.args, job.args.search, job.training({}, strategies), job.make_trainer(strategies), given)
        start = find_start(job.args)
        at = start.checkpoint
        if at is not None and (metrics := finished(job.args, at)) is not None:
            get_logger().info("the training is finished already, in %s; nothing was changed.", at.path)
            return metrics
        if at is None:
            check_unused(job.args)
        with job.make_trainer(strategies) as trainer:
            found: dict[str, Any] = trainer.run(
                job.training({}, strategies),
                as_values(job.args),
                callbacks=[*job.callbacks, *callbacks],
                resume_from=start,
            )
    return found


def plan_training(args: TrainerArgs, *, allow_import: Sequence[str] | None = None) -> Any:
    """Return the `raysgd.engine.Plan` of a training, which ``run_mode: compile`` writes. Nothing is started.

    Raises:
        ConfigError: A component cannot be made, or the model fits nowhere.
    """
    importer = Importer(allow_import, args)
    with Tree().naming_places(), working_in(os.getcwd()):
        check_names(args, importer)
        return decide(replace(args, run_mode="compile"), importer).plan


def evaluate(
    args: TrainerArgs | Mapping[str, Any],
    stage: Literal["val", "test"] = "val",
    *,
    allow_import: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Compute the loss of the validation or test data with the weights of ``checkpoint.resume_from``.

    Raises:
        ConfigError: A value cannot work, or there is no such dataset.
        CheckpointNotFoundError: There is no checkpoint.
    """
    check_choice("stage", stage, ("val", "test"))
    job = _Job.of(args, allow_import)
    if not job.args.dataset.args_of(stage):
        raise ConfigError(
            f"there is no data to evaluate: dataset.{stage}_args is empty; give the arguments of the dataset."
        )
    with working_in(os.getcwd()):
        start = find_start(job.args)
        if start.checkpoint is None:
            raise CheckpointNotFoundError(
                f"there is no checkpoint to evaluate in {job.args.checkpoint.save_dir}: give checkpoint.resume_from, which is "
                "last, best or a path."
            )
        strategies = job.decide()
        with job.make_trainer(strategies, keeps_links=False) as trainer:
            training = job.training({}, strategies, stage)
            found: dict[str, Any] = trainer.run(
                training, as_values(job.args), callbacks=job.callbacks, resume_from=start
            )
    return found


def export(
    args: TrainerArgs | Mapping[str, Any],
    output: str | os.PathLike[str],
    *,
    allow_import: Sequence[str] | None = None,
) -> str:
    """Write the model with the weights of ``checkpoint.resume_from`` to a new folder, by its ``save_pretrained``.

    The model is made as for the training, in this process. Without ``resume_from`` the weights are those of the last checkpoint.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        ConfigError: A value cannot work, the folder is not empty, or the model has no ``save_pretrained``.
    """
    args = args_of(as_values(args) if isinstance(args, TrainerArgs) else args)
    saved = replace(args.checkpoint, resume_from=args.checkpoint.resume_from or "last")
    start = find_start(replace(args, checkpoint=saved)).checkpoint
    if start is None:
        raise CheckpointNotFoundError(f"there is no checkpoint to export in {saved.save_dir}.")
    with working_in(os.getcwd()):
        from raysgd.declarative.components import make_model
        from raysgd.torch.exporting import load_model, new_folder

        model: Any = make_model(args, Importer(allow_import, args))
        if not callable(getattr(model, "save_pretrained", None)):
            raise ConfigError(f"{args.model.type} has no save_pretrained: write its weights by `raysgd ckpt export`.")
        with new_folder(output) as folder:
            load_model(model, start)
            model.save_pretrained(str(folder))
    return str(Path(output).absolute())


def merge_checkpoint(checkpoint: str | os.PathLike[str], output: str | os.PathLike[str]) -> str:
    """Write a checkpoint that ranks saved in shards as one with whole tensors, to a folder in ``output``; return its path.

    Any number of workers can resume from it under any strategies, as they can from the checkpoint itself. The whole state must
    fit into the memory of this process.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        ConfigError: It cannot be merged.
    """
    from raysgd.session.merging import merge_parts

    found = find_checkpoint(checkpoint).checkpoint
    assert found is not None, "of a path there is one, or an error"
    folder = Storage.from_uri(str(found.path))
    return merge_parts(folder, read_manifest(folder), Storage.from_uri(output), allow_pickle=False)


@dataclass(frozen=True)
class _Job:
    args: TrainerArgs
    importer: Importer
    allowed: tuple[str, ...] | None
    callbacks: list[Callback]

    @classmethod
    def of(cls, args: TrainerArgs | Mapping[str, Any], allow_import: Sequence[str] | None) -> _Job:
        args = args_of(as_values(args) if isinstance(args, TrainerArgs) else args)
        importer = Importer(allow_import, args)
        with Tree().naming_places(), working_in(os.getcwd()):
            missing = check_names(args, importer)
            callbacks, warnings = make_callbacks(args, importer)
        for text in (*list_warnings(args), *warnings, *missing):
            get_logger().warning(text)
        callbacks.append(ProgressCallback(mode="auto" if args.enable_progress_bar else "off"))
        return cls(args, importer, None if allow_import is None else tuple(allow_import), callbacks)

    def decide(self) -> Strategies:
        strategies = decide(self.args, self.importer)
        if strategies.plan is not None:
            get_logger().info(strategies.plan.reason)
        return strategies

    def training(self, base: Mapping[str, Any], strategies: Strategies, stage: str | None = None) -> Training:
        return Training(base, strategies.config, os.getcwd(), self.allowed, stage)

    def make_trainer(self, strategies: Strategies, *, keeps_links: bool = True) -> Trainer:
        """Make the Trainer of the training."""
        args = self.args
        given = {name: value for name, value in args.trainer.items() if name != "num_workers"}
        saved = args.checkpoint
        runs, name = split_folder(saved.save_dir)
        run_config = RunConfig(
            name=name,
            storage_path=runs,
            detached=given.pop("detached", False),
            ray_address=given.pop("ray_address", None),
        )
        own = {
            "num_to_keep": saved.keep_last_n_checkpoints,
            "scope": "folder",
            "keep_best": {"loss": "min"} if saved.save_best else {},
            "links": keeps_links and saved.symlink_best_and_last,
        }
        more = given.pop("checkpoint_config", None) or {}
        checkpoint = from_mapping(CheckpointConfig, {**own, **more}, "trainer.checkpoint_config")
        failure = from_mapping(FailureConfig, given.pop("failure_config", None) or {}, "trainer.failure_config")
        each = strategies.config.workers_per_replica
        workers = args.num_workers
        check_sizes(args, workers, each)
        if isinstance(workers, tuple):  # more replicas of the model would have no rows
            workers = workers[0], min(workers[1], args.rows_per_step // args.micro_batch_size * each)
        return Trainer(
            num_workers=workers,
            workers_per_replica=strategies.config.workers_per_replica,
            seed=args.seed,
            run_config=run_config,
            checkpoint_config=checkpoint,
            failure_config=failure,
            **given,
        )


def split_folder(save_dir: str) -> tuple[str, str]:
    """Return the folder, or URI, that ``checkpoint.save_dir`` is in, and its name.

    Raises:
        FieldError: It is the root of a file system or a bucket, or its name cannot be a run's.
    """
    with of_field("checkpoint", "save_dir"):
        return split_path("checkpoint.save_dir", save_dir)


def find_start(args: TrainerArgs) -> FoundCheckpoint:
    """Return the checkpoint that ``checkpoint.resume_from`` means.

    Raises:
        CheckpointNotFoundError: It is a path, and there is no checkpoint.
    """
    saved = args.checkpoint
    return find_checkpoint(saved.resume_from, saved.save_dir, RetentionPolicy(None, "loss", "min"))


def check_unused(args: TrainerArgs) -> None:
    """Check that a training which begins does not save in the folder of another one, whose best checkpoint is not its own.

    Raises:
        FieldError: The folder has checkpoints.
    """
    saved = args.checkpoint
    if not saved.no_save and list_manifests(Storage.from_uri(saved.save_dir)):
        raise FieldError(
            ("checkpoint", "save_dir"),
            f"{saved.save_dir} has checkpoints of an earlier training; give checkpoint.resume_from: last to "
            "resume it, or another folder.",
        )


def finished(args: TrainerArgs, start: Checkpoint) -> dict[str, Any] | None:
    """Return the metrics of a checkpoint after which there is nothing to train; None if there is."""
    steps, epochs = start.metrics.get("step"), start.metrics.get("epochs")
    is_over = (args.max_train_steps is not None and steps is not None and steps >= args.max_train_steps) or (
        args.max_epochs is not None and epochs is not None and epochs >= args.max_epochs
    )
    return {**start.metrics, "finished_train_steps": steps} if is_over else None


def write_plan(args: TrainerArgs, strategies: Strategies) -> dict[str, str]:
    """Write the plan, the shapes of the parameters and the memory to ``gen_savedir``; return the files by name."""
    folder = Path(args.gen_savedir)
    folder.mkdir(parents=True, exist_ok=True)
    plan = strategies.plan
    memory = plan.chosen.memory
    description = {
        "engine": plan.config.given(),
        "num_workers": plan.num_workers,
        "workers_per_replica": plan.config.workers_per_replica,
        "memory_per_device_bytes": plan.memory_per_device,
        "memory_bytes": {name: value for name, value in vars(memory).items() if isinstance(value, (int, float))},
        "step_s": plan.chosen.step_s,
        "parameters": {name: list(shape) for name, shape in plan.parameters.items()},
    }
    files = {name: str(folder / name) for name in PLAN_FILES}
    Path(files["plan.txt"]).write_text(f"{plan}\n", encoding="utf-8")
    Path(files["plan.json"]).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    return files
