"""`Trainer`: one train_func on many workers. Driver side; the user's handle on everything."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError

from raysgd._util.console import tell
from raysgd._util.wording import with_article
from raysgd.backends.base import BackendConfig
from raysgd.backends.registry import resolve_backend
from raysgd.callbacks.base import Callback
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.config.checks import check_component, check_count
from raysgd.errors import ConfigError, RaySGDError, SerializationError, UsageError
from raysgd.session import context
from raysgd.trainer import assembly
from raysgd.trainer.assembly import TrainerSpec
from raysgd.trainer.channel import Channel
from raysgd.trainer.class_control import ClassControl
from raysgd.trainer.control import INTERRUPT_PATIENCE_S
from raysgd.trainer.restoring import restore_run
from raysgd.trainer.stream import ResultStream
from raysgd.trainer.table import ResourceTable
from raysgd.workers.placement import describe_bundle


class Trainer(ClassControl):
    """Runs a single-machine train_func on many workers.

    Nothing is started before the first `run`, `start` or ``with``; the workers then stay up, so that the next run starts in
    processes that have everything imported. Leave it with `shutdown`, or use it as a context manager.

    Args:
        num_workers: Number of workers; ``(min, max)`` for elastic training, where ``max`` may be ``math.inf``.
        backend: ``"torch"`` or ``"none"``, or a `BackendConfig`.
        backend_args: Settings of the backend: its config, or a dict of its fields.
        cpus_per_worker: Logical CPUs of each worker.
        gpus_per_worker: GPUs of each worker; below 1 it shares one.
        resources_per_worker: Further Ray resources of each worker, by name.
        placement_strategy: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``.
        runtime_env: Ray runtime environment of the workers.
        seed: Seeds Python, NumPy and the framework, with ``seed + rank`` on each rank.
        deterministic: Ask the framework for bit-identical repetition; slower.
        run: Where the runs' files go.
        failure: What to do about failures.
        checkpoint: Which checkpoints to keep.

    Raises:
        ConfigError: A setting that cannot work.
        UsageError: Inside a train_func.
    """

    def __init__(
        self,
        num_workers: int | tuple[int, float] = 1,
        backend: str | BackendConfig = "torch",
        backend_args: BackendConfig | Mapping[str, Any] | None = None,
        *,
        cpus_per_worker: float = 1,
        gpus_per_worker: float = 0,
        resources_per_worker: Mapping[str, float] | None = None,
        placement_strategy: str = "PACK",
        runtime_env: Mapping[str, Any] | None = None,
        seed: int | None = None,
        deterministic: bool = False,
        run: RunConfig | None = None,
        failure: FailureConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
    ) -> None:
        session = context.installed()
        if session is not None and session.in_worker:
            raise UsageError(
                "a Trainer inside train_func would wait for workers that cannot come; make it in the driver."
            )
        if seed is not None:
            check_count("seed", seed, minimum=0)
        scaling = ScalingConfig(
            num_workers=num_workers,
            cpus_per_worker=cpus_per_worker,
            gpus_per_worker=gpus_per_worker,
            resources_per_worker=resources_per_worker or {},
            placement_strategy=placement_strategy,
        )
        spec = TrainerSpec(
            scaling,
            resolve_backend(backend, backend_args),
            _instance("run", run, RunConfig),
            _instance("failure", failure, FailureConfig),
            _instance("checkpoint", checkpoint, CheckpointConfig),
            None if runtime_env is None else dict(runtime_env),
            seed,
            deterministic,
        )
        self._set_up(spec)

    def _set_up(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._channel = None
        self._stream = None
        self._runs_uri: str | None = None
        self._goes_on_from: Checkpoint | None = None
        self._class_name: str | None = None
        self._is_closed = False

    @classmethod
    def attach(cls, name: str) -> Trainer:
        """Take hold of a Trainer that was made, maybe by another driver, with ``RunConfig(name=name, detached=True)``.

        Its run goes on whether or not anybody has hold of it: `stream` gives its results from the first one on, `status`,
        `pause`, `resume` and `cancel` do what they say, `shutdown` ends all of it. When its run is over the Trainer can be
        given another one; ``FailureConfig(on_resize=...)`` is a function, which that has not.

        Raises:
            ConfigError: It is no name.
            UsageError: There is no such Trainer in the cluster, or no cluster.
        """
        check_component("Trainer.attach(name)", name)
        assembly.connect_ray(joins=True)
        channel = Channel.attach(name)
        trainer = cls.__new__(cls)
        trainer._set_up(assembly.spec_of(channel.settings))
        trainer._channel = channel
        return trainer

    @classmethod
    def restore(cls, run_dir: str | os.PathLike[str], **changes: Any) -> Trainer:
        """The Trainer of a run that is over, failed or lost, whose next `run` goes on from that run's newest checkpoint.

        Newer ones that are not what their manifests say are passed over, with a warning. The run's own files stay as they
        are: the next has a folder beside them. ``train_func``, its config and callbacks are to be given again.

        Args:
            run_dir: The run's folder, path or URI.
            **changes: Arguments of `Trainer` that shall be others than they were, such as ``num_workers``.

        Raises:
            CheckpointNotFoundError: The folder is no run's.
            ConfigError: An argument was left out of the run's files for what is in it, and is not given.
        """
        restored = restore_run(run_dir, changes)
        trainer = cls(**restored.arguments)
        trainer._runs_uri, trainer._goes_on_from = restored.runs_uri, restored.checkpoint
        for line in restored.passed_over:
            tell(line)
        return trainer

    # -- runs -----------------------------------------------------------------------------------------------------

    def run(
        self,
        train_func: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        dataset: Any = None,
        callbacks: Sequence[Callback] = (),
        checkpoint: Any = None,
        reduce: Mapping[str, str] | None = None,
        returns: str = "first",
    ) -> Any:
        """Run train_func on all workers and return what it returned on rank 0, as if it had been called directly.

        Ctrl-C ends the run, keeps its checkpoints, gives all resources back and raises ``KeyboardInterrupt``; a second one
        does not wait for anything.

        Args:
            train_func: A function of zero or one argument, the config.
            config: What it is given; every worker gets a copy of its own.
            dataset: What `raysgd.get_dataset` gives the workers: a pyarrow Table, a pandas DataFrame, a dict of NumPy arrays
                or torch tensors, a list of dicts, a map-style torch Dataset, a `ray.data.Dataset`; a dict of such by
                name; or for cross-validation a tuple of such or of (train, validation) pairs.
            callbacks: Callbacks for this run; live progress comes by itself.
            checkpoint: Where to start from: a `Checkpoint`, a path, or a state.
            reduce: Metrics to be made of all ranks, such as ``{"loss": "mean"}``; of ``mean sum min max last first``.
            returns: ``"all"`` returns the list of all ranks' values.

        Raises:
            Exception: What train_func raised, as its own type; its ``__cause__`` has the worker's traceback and rank.
            InfeasibleError: The cluster can never hold the workers.
            WorkerDiedError: Processes died more often than ``FailureConfig`` allows.
            TrainerBusyError: Another run is live.
            TrainerClosedError: The Trainer was shut down.
            ConfigError: An argument that cannot work; or a detached Trainer of that name has a live run.
        """
        stream = None
        try:
            stream = self.run_generator(
                train_func,
                config,
                dataset=dataset,
                callbacks=callbacks,
                checkpoint=checkpoint,
                reduce=reduce,
                returns=returns,
            )
            return stream.get_returns()
        except KeyboardInterrupt:
            if stream is None and not self._spec.run.detached:  # nothing has begun that could end in peace
                self._release(patience_s=0)
            else:
                self._interrupted(stream)
            raise

    def run_generator(
        self,
        train_func: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        dataset: Any = None,
        callbacks: Sequence[Callback] = (),
        checkpoint: Any = None,
        reduce: Mapping[str, str] | None = None,
        returns: str = "first",
    ) -> ResultStream:
        """Start a run and return the stream of its results at once. Arguments and errors as for `run`."""
        self._check_free()
        channel = self._connect()
        runs_uri = self._runs_uri or assembly.runs_folder(self._spec, train_func)
        self._stream = assembly.begin_run(
            channel,
            self._spec,
            train_func,
            config,
            runs_uri=runs_uri,
            dataset=dataset,
            callbacks=callbacks,
            checkpoint=self._goes_on_from if checkpoint is None else checkpoint,
            reduce=reduce,
            returns=returns,
            on_problem=tell,
        )
        self._goes_on_from = None
        self._runs_uri = runs_uri  # only now: a function that was refused gives its name to no folder
        return self._stream

    def to_trainable(
        self,
        train_func: Callable[..., Any],
        dataset: Any = None,
        *,
        callbacks: Sequence[Callback] = (),
        checkpoint: Any = None,
        reduce: Mapping[str, str] | None = None,
        trainer_args_from: str | Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        cross_validate: bool = False,
    ) -> Any:
        """A trainable for `ray.tune.run` and `ray.tune.Tuner`, whose trials are runs of train_func with the trial's config.

        Each trial has workers of its own, with all settings of this Trainer, in a placement group that Tune asks for. What
        train_func reports are the trial's results, what it saves its checkpoints; the run's files are in the trial's
        folder. Idle workers of this Trainer itself are ended, lest they hold what trials need.

        Args:
            train_func: As for `run`; further arguments come by `ray.tune.with_parameters`.
            dataset: As for `run`, stored once for all trials; or a function of the config that gives each trial its own.
            callbacks: For each trial, in its process; Tune's own are given to Tune.
            checkpoint: Where each trial starts from.
            reduce: As for `run`.
            trainer_args_from: Which arguments of the Trainer the config has: the name of a dict of such in it, as for
                ``config={"trainer": {"num_workers": tune.choice([1, 2])}}``, or a function of the config that gives one.
            cross_validate: A trial is a run for each pair of a dataset that `raysgd.data.to_cv` makes, with the datasets
                ``train`` and ``validation`` and ``config["fold"]``, and has a result for each: of the numbers that each
                fold reported last the mean so far, as ``<name>_std`` their standard deviation, and the last under ``fold``.

        Raises:
            ConfigError: An argument that cannot work.
            SerializationError: train_func or a callback does not pickle.
            TrainerBusyError: A run of this Trainer is live.
        """
        self._check_free()
        # Of a layer above this one, and not imported by those who do without Tune.
        integration = importlib.import_module("raysgd.tune_integration")
        trainable = integration.make_trainable(
            self,
            train_func,
            dataset,
            callbacks=callbacks,
            checkpoint=checkpoint,
            reduce=reduce,
            trainer_args_from=trainer_args_from,
            cross_validate=cross_validate,
        )
        self._release()
        return trainable

    # -- life -----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End a live run, all workers, and give the resources back. May be called again."""
        self._is_closed = True
        self._release()

    def __enter__(self) -> Trainer:
        self._check_open()
        self._connect()
        return self

    def __exit__(  # a detached run that is not over goes on
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._spec.run.detached and not self._is_closed and self._is_live:
            self._let_go()
        else:
            self.shutdown()

    def __repr__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            "a Trainer holds processes and cannot be pickled; a train_func that mentions one has it as a global or a "
            "closure variable: pass what it needs in the config."
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _take_hold(self) -> None:
        """Of a run that is live, also one of another driver."""
        with contextlib.suppress(RaySGDError, RayError):
            if (self._stream is None or not self._stream.is_live) and self._is_live:
                self._stream = None
                self.stream()

    def _let_go(self) -> None:
        """What is detached goes on without this driver."""
        self._channel, self._is_closed = None, True

    def _interrupted(self, stream: ResultStream | None) -> None:
        """The first Ctrl-C: end in peace. The second lets go of everything at once. A detached run goes on."""
        if stream is None or self._spec.run.detached:
            name = self._spec.run.name
            tell(f"interrupted: the run goes on; Trainer.attach({name!r}) takes hold of it, and .cancel() ends it")
            self._let_go()
            return
        tell("interrupted: ending the run, keeping its checkpoints (Ctrl-C again to kill)")
        try:
            stream.cancel()
            stream.wait_closed(INTERRUPT_PATIENCE_S)
        finally:
            self._release(patience_s=0)

    def _release(self, patience_s: float = INTERRUPT_PATIENCE_S) -> None:
        if self._spec.run.detached and ray.is_initialized():
            self._take_hold()
        channel, self._channel = self._channel, None
        self._class_name = None
        if channel is None or not ray.is_initialized():
            return
        try:
            if self._stream is not None:
                if self._stream.is_live:
                    self._stream.cancel()
                self._stream.wait_closed(patience_s)
        finally:
            channel.close()

    def _table(self) -> ResourceTable:
        scaling, size = self._spec.scaling, self._spec.scaling.min_workers
        count = f"{size} to {scaling.max_workers:g}" if scaling.is_elastic else f"{size}"
        title = f"Trainer: {count} x {self._spec.backend.name} worker ({describe_bundle(scaling.bundle())})"
        nodes = ["-"] * size
        up = ray.is_initialized()
        if up and self._channel is not None and not self._channel.is_gone:
            infos = self._channel.call("workers", timeout_s=10)
            nodes = ["-" if info is None else f"{info['hostname']} ({info['node_ip']})" for info in infos]
        return ResourceTable(title, scaling.bundle(), nodes, ray.cluster_resources() if up else None)


def _instance(name: str, value: Any, kind: type) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ConfigError(f"{name}={value!r} is {with_article(type(value).__name__)}; give a {kind.__name__}(...).")
    return value
