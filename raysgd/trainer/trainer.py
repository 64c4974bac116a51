"""`Trainer`, the user's handle: one train_func on many workers. Driver side.

`raysgd.trainer.run_manager` starts and controls runs, `raysgd.trainer.class_api` is behind `Trainer.start` and
`Trainer.execute`, and `raysgd.trainer.assembly` builds the objects of a run.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError

from raysgd._util.tracebacks import leaves_raysgd
from raysgd.backends.base import BackendConfig
from raysgd.callbacks.base import Callback
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.config import CheckpointConfig, FailureConfig, RunConfig
from raysgd.config.argument_names import METHOD_HINTS, RUN_HINTS, RUN_OTHERWISE, TRAINER_HINTS, refuse_unknown
from raysgd.config.checks import check_component
from raysgd.config.run import BackendName, Reduction, Returns, ScoreOrder
from raysgd.config.scaling import PlacementStrategy
from raysgd.errors import SerializationError, TrainerClosedError, UsageError, WorkerError
from raysgd.result import RunInfo, RunStatus
from raysgd.session import context
from raysgd.trainer import assembly
from raysgd.trainer.arguments import RunArguments
from raysgd.trainer.channel import Channel
from raysgd.trainer.class_api import ClassApi
from raysgd.trainer.run_manager import RunManager
from raysgd.trainer.spec import make_spec, restore_run
from raysgd.trainer.stream import ResultStream
from raysgd.workers.placement.capacity import describe_bundle

if TYPE_CHECKING:
    from rich.table import Table


def interrupt(trainer: Trainer, stream: ResultStream, error: BaseException) -> None:
    """End a live run for Ctrl-C or a signal, as `Trainer.run` does: it saves and ends, and a later run gets new workers."""
    trainer._runs.interrupt(stream, error)


class Trainer:
    """Runs a single-machine train_func on many workers.

    Nothing is started before the first `run`, `start` or ``with``. The workers then stay up, so the next run starts in
    processes that have imported everything already. Close a Trainer with `shutdown`, or use it as a context manager.

    Args:
        num_workers: Number of workers; ``(min, max)`` for elastic training, where ``max`` may be ``math.inf``.
        backend: ``"torch"`` (or ``"pytorch"``), ``"horovod"``, ``"tensorflow"``, ``"jax"``, ``"env"``, ``"none"``, the name of
            an installed backend, or a `BackendConfig`.
        backend_args: Settings of the backend: its config, or a dict of the config's fields.
        cpus_per_worker: Logical CPUs of each worker.
        gpus_per_worker: GPUs of each worker; with a fraction below 1 several workers share one.
        resources_per_worker: Further Ray resources of each worker, by name.
        placement_strategy: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``.
        workers_per_replica: Workers that hold one replica of the model between them, as in tensor and pipeline parallelism. They
            have consecutive ranks and read the same rows. The group always has a multiple of them, also after failures.
        runtime_env: Ray runtime environment of the workers.
        seed: Seeds Python, NumPy and the framework, with ``seed + rank`` on each rank.
        deterministic: Ask the framework for bit-identical repetition, which is slower.
        logical_workers: The run trains to the same bits on any number of workers up to this one; needs ``deterministic=True``
            and loops over `raysgd.torch.logical_steps`. Data, random numbers and sums then belong to the logical workers.
        run_config: Where the run's files are written.
        failure_config: How failures are handled.
        checkpoint_config: Which checkpoints are kept.

    Raises:
        ConfigError: An argument cannot work, or does not exist.
        UsageError: It is called inside a train_func.
    """

    @leaves_raysgd
    @refuse_unknown("Trainer", TRAINER_HINTS)
    def __init__(
        self,
        num_workers: int | tuple[int, float] = 1,
        backend: BackendName | str | BackendConfig = "torch",
        backend_args: BackendConfig | Mapping[str, Any] | None = None,
        *,
        cpus_per_worker: float = 1,
        gpus_per_worker: float = 0,
        resources_per_worker: Mapping[str, float] | None = None,
        placement_strategy: PlacementStrategy = "PACK",
        workers_per_replica: int = 1,
        runtime_env: Mapping[str, Any] | None = None,
        seed: int | None = None,
        deterministic: bool = False,
        logical_workers: int | None = None,
        run_config: RunConfig | None = None,
        failure_config: FailureConfig | None = None,
        checkpoint_config: CheckpointConfig | None = None,
    ) -> None:
        session = context.installed()
        if session is not None and session.in_worker:
            raise UsageError(
                "a Trainer inside train_func would wait for workers that can never start; make it in the driver."
            )
        spec = make_spec(
            num_workers=num_workers,
            backend=backend,
            backend_args=backend_args,
            cpus_per_worker=cpus_per_worker,
            gpus_per_worker=gpus_per_worker,
            resources_per_worker=resources_per_worker,
            placement_strategy=placement_strategy,
            workers_per_replica=workers_per_replica,
            runtime_env=runtime_env,
            seed=seed,
            deterministic=deterministic,
            logical_workers=logical_workers,
            run_config=run_config,
            failure_config=failure_config,
            checkpoint_config=checkpoint_config,
        )
        self._connect_parts(RunManager(spec))

    def _connect_parts(self, runs: RunManager) -> None:
        self._spec = runs.spec
        self._runs = runs
        self._latest = runs.latest
        self._class_api = ClassApi(runs)

    @classmethod
    def attach(cls, name: str) -> Trainer:
        """Attach to a Trainer that was made, maybe by another driver, with ``RunConfig(name=name, detached=True)``.

        Its run continues whether or not a driver is attached. `stream` gives its results from the first one on; `status`,
        `pause`, `resume` and `cancel` control it; `shutdown` ends the run and the Trainer. After a run the Trainer can start
        another one. ``FailureConfig(on_resize=..., retry_on=...)`` is code; it is not restored by `attach`.

        Raises:
            ConfigError: The argument cannot be a name.
            UsageError: There is no such Trainer in the cluster, or no cluster.
        """
        check_component("Trainer.attach(name)", name)
        assembly.connect_ray(must_exist=True)
        channel = Channel.attach(name)
        trainer = cls.__new__(cls)
        trainer._connect_parts(RunManager(channel.settings.spec, channel=channel))
        return trainer

    @classmethod
    def restore(cls, run_dir: str | os.PathLike[str], **changes: Any) -> Trainer:
        """Make the Trainer of an earlier run again; its next `run` resumes from that run's newest checkpoint.

        Checkpoints that do not match their manifests are skipped with a warning. The files of the earlier run stay as they
        are; the next run has a folder of its own next to them. Give train_func, its config and its callbacks again.

        Args:
            run_dir: The folder of the run, path or URI. The run may be finished, failed or lost.
            **changes: Arguments of `Trainer` that replace those of the run, such as ``num_workers``.

        Raises:
            CheckpointNotFoundError: The folder is not that of a run.
            ConfigError: The run's files leave out an argument, a secret or a function, and it is not given.
        """
        restored = restore_run(run_dir, changes)
        trainer = cls(**restored.arguments)
        trainer._connect_parts(RunManager(trainer._spec, runs_uri=restored.runs_uri, resume_from=restored.found))
        return trainer

    # -- runs ----------------------------------------------------------------------------------------------------------

    @leaves_raysgd
    @refuse_unknown("Trainer.run", RUN_HINTS, RUN_OTHERWISE)
    def run(
        self,
        train_func: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        dataset: Any = None,
        callbacks: Sequence[Callback] | None = (),
        resume_from: Any = None,
        reduce: Mapping[str, Reduction] | None = None,
        returns: Returns = "first",
        checkpoint_config: CheckpointConfig | None = None,
    ) -> Any:
        """Run train_func on all workers and return what it returned on rank 0, as if it had been called directly.

        Ctrl-C makes ``should_stop()`` true: the run saves and ends within ``FailureConfig(stop_grace_s)``. Then all resources are
        released and ``KeyboardInterrupt`` is raised. SIGTERM does the same and exits. A second signal ends the run at once.

        Args:
            train_func: A function of zero or one argument, the config.
            config: The argument of train_func; every worker gets its own copy.
            dataset: What `raysgd.get_dataset` gives the workers: a pyarrow Table, a pandas DataFrame, a dict of NumPy arrays
                or torch tensors, a list of dicts, a map-style torch Dataset, or a `ray.data.Dataset`; a dict of these by
                name; or for cross-validation a tuple of these or of (train, validation) pairs.
            callbacks: Callbacks for this run. Live progress is shown without one.
            resume_from: Where to start from: a `Checkpoint`, its path, or any state that `raysgd.save_checkpoint` takes. The
                folder of a run, or of a Trainer's runs, means the newest checkpoint there; ``"last"`` and ``"best"`` those of
                this Trainer's ``run_config.name``, which may have none. Of several, damaged ones are skipped.
            reduce: Metrics to compute over all ranks, such as ``{"loss": "mean", "val/acc": "max"}``; one of ``mean sum min max
                last first``. A nested metric is named by its keys, with ``/``. With ``workers_per_replica``, one rank of each
                replica of the model counts in ``mean`` and ``sum``.
            returns: ``"all"`` returns the list of all ranks' values.
            checkpoint_config: Which checkpoints of this run are kept; None: as for the Trainer.

        Raises:
            Exception: What train_func raised, as its own type; its ``__cause__`` has the worker's traceback and rank.
            ImportError: The package of a callback is not installed; the text names the extra to install.
            InfeasibleError: The cluster can never hold the workers.
            WorkerDiedError: Processes died more often than ``FailureConfig`` allows.
            TrainerBusyError: Another run is live.
            TrainerClosedError: The Trainer was shut down.
            ConfigError: An argument cannot work or does not exist, or a detached Trainer of that name has a live run.
        """
        stream = None
        try:
            self._class_api.check_no_instances()
            arguments = RunArguments(
                train_func, config, dataset, callbacks, resume_from, reduce, returns, checkpoint_config
            )
            stream = self._runs.begin(arguments)
            return stream.get_returns()
        except (KeyboardInterrupt, SystemExit) as error:  # by Ctrl-C, or by the handler of a signal
            self._runs.interrupt(stream, error)
            raise

    @leaves_raysgd
    @refuse_unknown("Trainer.run_generator", RUN_HINTS, RUN_OTHERWISE)
    def run_generator(
        self,
        train_func: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        dataset: Any = None,
        callbacks: Sequence[Callback] | None = (),
        resume_from: Any = None,
        reduce: Mapping[str, Reduction] | None = None,
        returns: Returns = "first",
        checkpoint_config: CheckpointConfig | None = None,
    ) -> ResultStream:
        """Start a run and return the stream of its results at once. Arguments and errors as for `run`."""
        self._class_api.check_no_instances()
        arguments = RunArguments(
            train_func, config, dataset, callbacks, resume_from, reduce, returns, checkpoint_config
        )
        return self._runs.begin(arguments)

    @leaves_raysgd
    @refuse_unknown("Trainer.to_trainable", RUN_HINTS, RUN_OTHERWISE)
    def to_trainable(
        self,
        train_func: Callable[..., Any],
        dataset: Any = None,
        *,
        callbacks: Sequence[Callback] | None = (),
        resume_from: Any = None,
        reduce: Mapping[str, Reduction] | None = None,
        trainer_args_from: str | Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        cross_validate: bool = False,
    ) -> Any:
        """Make a trainable for `ray.tune.run` and `ray.tune.Tuner`; its trials run train_func with the trial's config.

        Each trial has its own workers, with all settings of this Trainer, in a placement group that Tune reserves. What
        train_func reports is the trial's results, what it saves the trial's checkpoints. The run's files are in the trial's
        folder. This call stops this Trainer's idle workers, so that their resources are free for trials.

        Args:
            train_func: As for `run`; further arguments come by `ray.tune.with_parameters`.
            dataset: As for `run`, stored once for all trials; or a function of the config that returns a trial's dataset.
            callbacks: Callbacks for each trial, in its process. Give Tune's own callbacks to Tune.
            resume_from: Where each trial starts from.
            reduce: As for `run`.
            trainer_args_from: Arguments of the Trainer to take from the trial's config: the key of a dict in it, as for
                ``config={"trainer": {"num_workers": tune.choice([1, 2])}}``, or a function of the config that returns one.
            cross_validate: Run once for each pair of a dataset that `raysgd.data.to_cv` makes, with the datasets ``train`` and
                ``validation`` and ``config["fold"]``. A trial then has one result per fold: the mean over the folds so far of
                each number that a fold reported last, its standard deviation as ``<name>_std``, and the last under ``fold``.

        Raises:
            ConfigError: An argument cannot work or does not exist.
            SerializationError: train_func or a callback does not pickle.
            TrainerBusyError: A run of this Trainer is live.
        """
        self._runs.check_idle()
        self._class_api.check_no_instances()
        # An import of a higher layer, which imports Ray Tune. It uses spec and runs, never this module: no cycle.
        integration = importlib.import_module("raysgd.tune_integration.trainable")
        trainable = integration.make_trainable(
            self._spec,
            RunArguments(train_func, None, dataset, callbacks, resume_from, reduce),
            trainer_args_from=trainer_args_from,
            cross_validate=cross_validate,
        )
        self._runs.release()
        return trainable

    # -- the latest run ------------------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> str | None:
        """The folder of the latest run, or None."""
        return self._latest.run_dir

    @property
    def run_info(self) -> RunInfo | None:
        """The description of the latest run that this process started or streamed, with its ``warnings``; None without one."""
        return self._latest.run_info

    @leaves_raysgd
    def status(self) -> RunStatus:
        """Return the state of the latest run.

        Raises:
            WorkerError: The controller process has died.
        """
        return self._latest.status()

    @leaves_raysgd
    def stream(self, from_iteration: int = 0) -> ResultStream:
        """Return a stream of the latest run's results: those so far, and those to come.

        Args:
            from_iteration: The ``training_iteration`` of the first result.

        Raises:
            UsageError: There was no run.
            WorkerError: The controller process has died.
        """
        return self._latest.open_stream(from_iteration)

    @leaves_raysgd
    def pause(self) -> RunStatus:
        """Pause the latest run at its next checkpoint, release its workers, and wait until that is done.

        No step is repeated: all ranks leave train_func at the same ``save_checkpoint``. If the run ends before it saves
        again, it is not paused, as the returned status shows. A pause does not count as a failure.

        Raises:
            UsageError: There was no run.
            WorkerError: The controller process has died.
        """
        return self._latest.pause()

    @leaves_raysgd
    def resume(self) -> None:
        """Resume a paused run; returns at once. If the run is not paused yet, the pause is withdrawn.

        Raises:
            UsageError: There was no run.
            WorkerError: The controller process has died.
        """
        self._latest.resume()

    @leaves_raysgd
    def cancel(self) -> None:
        """End the latest run now; returns at once. Its checkpoints stay.

        Raises:
            UsageError: There was no run.
            WorkerError: The controller process has died.
        """
        self._latest.cancel()

    def list_checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints of the latest run that are on storage, oldest first, when all are written."""
        return self._latest.list_checkpoints()

    @leaves_raysgd
    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint of the latest run, which is over. ``last`` and ``best`` do not lead to it any more.

        Raises:
            UsageError: It is not one of that run.
            CheckpointError: It could not be deleted.
        """
        self._latest.delete_checkpoint(checkpoint)

    def get_last_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint of the latest run, or None."""
        return self._latest.newest_checkpoint()

    def get_best_checkpoint(self, metric: str | None = None, mode: ScoreOrder | None = None) -> Checkpoint | None:
        """Return the best checkpoint on storage of the latest run, or of the runs that it was resumed from; None without one.

        Args:
            metric: Metric to rank by, ``val/acc`` for a nested one. None: ``CheckpointConfig.score_attribute``; without that
                the newest is best.
            mode: ``"max"`` or ``"min"``. None: ``CheckpointConfig.score_order``.

        Raises:
            MissingMetricError: There are checkpoints, and none has the metric.
        """
        return self._latest.best_checkpoint(metric, mode)

    # -- the class API -------------------------------------------------------------------------------------------------

    @leaves_raysgd
    def start(self, ExecutionClass: type | None = None, *args: Any, **kwargs: Any) -> None:
        """Start the workers; with a class, form a process group and make an instance on each worker.

        The instances live until the next `start` or `shutdown`. `run` needs workers without instances.

        Raises:
            Exception: What the class's constructor raised.
            InfeasibleError: The cluster can never hold the workers.
        """
        self._class_api.start(ExecutionClass, args, kwargs)

    @leaves_raysgd
    def execute(self, fn: Callable[..., Any]) -> list[Any]:
        """Call ``fn(instance)`` on every worker (``fn()`` if no class was given); return the results by rank.

        Raises:
            Exception: What ``fn`` raised, as its own type; its ``__cause__`` has the worker's traceback and rank.
        """
        return self._class_api.execute("execute", fn, first_only=False)

    @leaves_raysgd
    def execute_single(self, fn: Callable[..., Any]) -> Any:
        """Call ``fn`` on rank 0 only, and return its result."""
        return self._class_api.execute("execute_single", fn, first_only=True)[0]

    # -- life ----------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End a live run and all workers, and release the resources. May be called again."""
        self._runs.shutdown()

    def __enter__(self) -> Trainer:
        self._runs.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._runs.leave(error)

    def __repr__(self) -> str:
        from raysgd._util.tables import as_text  # not for a cold start

        return as_text(*self._table())

    def _repr_html_(self) -> str:
        from raysgd._util.tables import as_html

        return as_html(*self._table())

    if not TYPE_CHECKING:  # type checkers would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            advice = f"; {METHOD_HINTS[name]}." if name in METHOD_HINTS else ""
            raise AttributeError(f"'Trainer' object has no attribute {name!r}{advice}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            "a Trainer holds processes and cannot be pickled; a train_func that mentions one has it as a global or a "
            "closure variable: pass what it needs in the config."
        )

    def _table(self) -> tuple[str, Table]:
        from raysgd.trainer.table import resource_table

        scaling = self._spec.scaling
        size = scaling.min_workers
        count = f"{size} to {scaling.max_workers:g}" if scaling.is_elastic else f"{size}"
        title = f"Trainer: {count} x {self._spec.backend.name} worker ({describe_bundle(scaling.bundle())})"
        nodes = ["-"] * size
        is_connected = ray.is_initialized()
        channel = self._latest.channel
        if is_connected and channel is not None and not channel.is_gone:
            # The controller is still starting, or has just died, or its cluster is gone.
            with contextlib.suppress(GetTimeoutError, TrainerClosedError, WorkerError):
                infos = channel.call("workers", timeout_s=10)
                nodes = ["-" if info is None else f"{info['hostname']} ({info['node_ip']})" for info in infos]
        return title, resource_table(scaling.bundle(), nodes, ray.cluster_resources() if is_connected else None)
