"""`Deployer`: the workers and devices of JAX functions, kept between fit and predict. Driver side; imports no JAX itself."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from raysgd._util.imports import import_optional
from raysgd._util.logs import get_logger
from raysgd._util.tracebacks import leaves_raysgd
from raysgd.backends.base import BackendConfig
from raysgd.backends.jax import JaxConfig
from raysgd.backends.registry import resolve_backend
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.links import BEST, LAST
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.storage import Storage
from raysgd.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.config.argument_names import TRAINER_HINTS, refuse_unknown
from raysgd.config.checks import check_bool, check_count, split_path
from raysgd.config.scaling import PlacementStrategy
from raysgd.errors import ConfigError
from raysgd.functions.left_out import PLACED_IN_WORKERS, log_unused, no_attribute
from raysgd.functions.runs import FunctionRuns, RunCallbacks
from raysgd.trainer.resume_from import FoundCheckpoint, find_checkpoint, find_newest
from raysgd.trainer.trainer import Trainer

if TYPE_CHECKING:
    from raysgd.functions.sharding import ShardingRules

#: Folder of evaluations in the working directory.
EVALUATIONS = "evaluations"


class Deployer:
    """The devices, and what all of its runs have in common.

    Workers start with the first `Trainer.fit` or `Predictor.predict` and stay up for the next ones. Close a Deployer with
    `shutdown`, or use it as a context manager.

    Args:
        jax_seed: The seed of all random numbers: those of the model, the order of examples, and those that ``collate_fn``
            draws from Python's and NumPy's generators.
        n_model_shards: The number of devices that the parameters are sharded over. The other devices hold further replicas of
            the model, which take different rows of a batch.
        verbose: Whether progress is shown, and `log_info` logs.
        workdir: The folder of runs, checkpoints and evaluations; a path or URI that all workers reach. None: runs are in
            ``~/raysgd_runs``, and evaluations are not written.
        n_processes: The number of workers, as ``num_workers``.
        host0_address: Ignored with a message: Ray places the workers.
        host0_port: Ignored, as ``host0_address``.
        process_id: Ignored, as ``host0_address``.
        n_local_devices: The number of devices of each worker: ``devices_per_worker`` on CPUs, or that of its GPUs.
        run_tensorboard: Whether metrics are written for TensorBoard, to ``tensorboard`` in the run's folder.
        wandb_init_kwargs: Arguments of ``wandb.init``; they imply ``run_wandb``.
        run_wandb: Whether metrics are logged to Weights & Biases.
        num_workers: The number of workers; ``(min, max)`` for elastic training. 1 by default.
        devices_per_worker: The number of virtual devices of each worker on CPUs. GPUs and TPUs are those that it was given.
        cpus_per_worker: As for `raysgd.Trainer`, like the following arguments.
        gpus_per_worker: The number of GPUs of each worker.
        resources_per_worker: Further Ray resources of each worker, by name.
        placement_strategy: How Ray places the workers.
        runtime_env: Ray runtime environment of the workers.
        collate_per_worker: Whether each worker loads and collates the rows of its own devices alone, which saves time where
            examples are large. Then ``collate_fn`` must return arrays of the same shapes and types in each batch, and a row must
            not depend on the other ones. By default every worker collates whole batches.
        deterministic: Make batches in the training thread, so that nothing depends on the time.
        backend_args: A `raysgd.JaxConfig`, or a dict of its fields.
        run_config: Further settings of the runs. With ``workdir`` it may have neither ``name`` nor ``storage_path``.
        failure_config: How failures are handled.
        checkpoint_config: How checkpoints are written. Which ones are kept is decided by the arguments of `Trainer.fit`.

    Raises:
        ConfigError: An argument cannot work, or there are more shards than devices.
        UsageError: It is called inside a train_func.
    """

    @leaves_raysgd
    @refuse_unknown("Deployer", TRAINER_HINTS)
    def __init__(
        self,
        jax_seed: int,
        n_model_shards: int = 1,
        verbose: bool = True,
        workdir: str | os.PathLike[str] | None = None,
        n_processes: int | None = None,
        host0_address: str | None = None,
        host0_port: int | None = None,
        process_id: int | None = None,
        n_local_devices: int | None = None,
        run_tensorboard: bool = False,
        wandb_init_kwargs: Mapping[str, Any] | None = None,
        *,
        run_wandb: bool = False,
        num_workers: int | tuple[int, float] | None = None,
        devices_per_worker: int | None = None,
        cpus_per_worker: float = 1,
        gpus_per_worker: float = 0,
        resources_per_worker: Mapping[str, float] | None = None,
        placement_strategy: PlacementStrategy = "PACK",
        runtime_env: Mapping[str, Any] | None = None,
        collate_per_worker: bool = False,
        deterministic: bool = False,
        backend_args: BackendConfig | Mapping[str, Any] | None = None,
        run_config: RunConfig | None = None,
        failure_config: FailureConfig | None = None,
        checkpoint_config: CheckpointConfig | None = None,
    ) -> None:
        self.jax_seed = check_count("jax_seed", jax_seed, minimum=0)
        self.n_model_shards = check_count("n_model_shards", n_model_shards, minimum=1)
        workers = _number_of_workers(num_workers, n_processes)
        log_unused(
            "Ray places the workers on its nodes",
            host0_address=host0_address,
            host0_port=host0_port,
            process_id=process_id,
        )
        devices_per_worker = _devices_of_worker(devices_per_worker, n_local_devices, gpus_per_worker)
        backend = _backend(backend_args, devices_per_worker)
        scaling = ScalingConfig(num_workers=workers, gpus_per_worker=gpus_per_worker)
        self._devices_per_worker = _count_devices(backend, gpus_per_worker)
        #: The number of workers for which the rows of a batch are counted.
        self.num_workers = scaling.min_workers if math.isinf(scaling.max_workers) else int(scaling.max_workers)
        self.workdir = None if workdir is None else absolute(os.fspath(workdir))
        self._verbose = verbose
        self._rng: Any = None
        loggers = RunCallbacks(run_tensorboard, run_wandb, wandb_init_kwargs, verbose)
        self.checkpoint_config = checkpoint_config or CheckpointConfig()
        trainer = Trainer(
            num_workers=workers,
            backend=backend,
            cpus_per_worker=cpus_per_worker,
            gpus_per_worker=gpus_per_worker,
            resources_per_worker=resources_per_worker,
            placement_strategy=placement_strategy,
            workers_per_replica=_workers_per_replica(scaling, self._devices_per_worker, n_model_shards),
            runtime_env=runtime_env,
            seed=jax_seed,
            deterministic=deterministic,
            run_config=_run_config(self.workdir, run_config),
            failure_config=failure_config,
            checkpoint_config=checkpoint_config,
        )
        self.collate_per_worker = check_bool("collate_per_worker", collate_per_worker)
        #: Starts the runs of `Trainer` and `Predictor`.
        self.runs = FunctionRuns(trainer, loggers)

    @property
    def evaluations_folder(self) -> str | None:
        """The folder that has a folder of evaluation results for each epoch; None without a ``workdir``."""
        return None if self.workdir is None else Storage.from_uri(self.workdir).child(EVALUATIONS).uri

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The axes of the mesh, data and model, and their sizes with all workers."""
        num_devices = (self._devices_per_worker or 1) * self.num_workers
        return {"data": max(1, num_devices // self.n_model_shards), "model": self.n_model_shards}

    @property
    def mesh(self) -> Any:
        """The axes of the mesh, as a `jax.sharding.AbstractMesh`: the devices are in the workers."""
        import_optional("jax", "functions")
        from jax.sharding import AbstractMesh

        return AbstractMesh(tuple(self.axis_sizes.values()), tuple(self.axis_sizes))

    def gen_rng(self) -> Any:
        """Return a new random key for the script itself, such as one for its first parameters. They follow from ``jax_seed``."""
        import_optional("jax", "functions")
        import jax

        self._rng, key = jax.random.split(jax.random.PRNGKey(self.jax_seed) if self._rng is None else self._rng)
        return key

    def log_info(self, info: Any, title: str | None = None, step: int | None = None) -> None:
        """Log a text, unless ``verbose`` is False."""
        if self._verbose:
            shown = "" if step is None else f" (step {step})"
            get_logger().info("%s%s%s", "" if title is None else f"{title}: ", info, shown)

    def get_local_global_micro_batch_size(self, per_device_batch_size: int) -> tuple[int, int]:
        """Return how many rows one worker takes at a time, and how many all workers take."""
        check_count("per_device_batch_size", per_device_batch_size, minimum=1)
        rows = per_device_batch_size * self.axis_sizes["data"]
        return max(per_device_batch_size, rows // self.num_workers), rows

    def get_accumulate_grad_batches(self, global_batch_size: int, per_device_batch_size: int) -> int:
        """Return the ``accumulate_grad_batches`` with which an update takes so many rows.

        Raises:
            ConfigError: They are not a multiple of the rows that all devices take at a time.
        """
        _, rows = self.get_local_global_micro_batch_size(per_device_batch_size)
        if global_batch_size < 1 or global_batch_size % rows:
            raise ConfigError(
                f"global_batch_size={global_batch_size} is not a multiple of the {rows} rows that all devices take with "
                f"per_device_batch_size={per_device_batch_size}: give a multiple."
            )
        return global_batch_size // rows

    @leaves_raysgd
    def get_sharding_rules(self, params_shape_or_params: Any = None, *, params: Any = None) -> ShardingRules:
        """Return how the parameters are sharded, as a list of rules whose text is a table.

        Args:
            params_shape_or_params: The tree of parameters: arrays, or `jax.ShapeDtypeStruct`s. Or a module of nnx.
            params: The same, by a shorter name.

        Raises:
            ConfigError: A leaf is not an array of floating-point numbers.
            ImportError: JAX is not installed.
        """
        if (params is None) == (params_shape_or_params is None):
            raise ConfigError("get_sharding_rules() needs one tree of parameters: give params.")
        params = params_shape_or_params if params is None else params
        import_optional("jax", "functions")
        from raysgd.functions.models import Model
        from raysgd.functions.sharding import ShardingRules, plan_sharding

        like = Model.like(params)
        return ShardingRules(plan_sharding(like.params, self.axis_sizes, declared=like.declared))

    def get_lr_schedule_fn(
        self,
        train_size: int,
        per_device_batch_size: int,
        n_epochs: int,
        learning_rate: float,
        schedule_type: str = "linear",
        warmup_ratio: float = 0.0,
        warmup_steps: int | None = None,
        init_learning_rate: float = 0.0,
        end_learning_rate: float = 0.0,
        *,
        accumulate_grad_batches: int = 1,
    ) -> Callable[[Any], Any]:
        """Return a schedule that warms up and decays over all updates of a training.

        Args:
            train_size: The number of examples.
            per_device_batch_size: As for `Trainer.fit`.
            n_epochs: As for `Trainer.fit`.
            learning_rate: The highest one.
            schedule_type: The decay, ``"linear"`` or ``"cosine"``.
            warmup_ratio: The part of all updates that warm up.
            warmup_steps: The number of updates that warm up, in place of ``warmup_ratio``.
            init_learning_rate: The first one, if there is a warm-up.
            end_learning_rate: The last one.
            accumulate_grad_batches: As for `Trainer`.

        Raises:
            ConfigError: The decay is not known, or the warm-up is longer than the training.
        """
        from raysgd.functions.schedules import make_schedule

        rows = per_device_batch_size * self.axis_sizes["data"] * accumulate_grad_batches
        num_updates = n_epochs * math.ceil(train_size / rows)
        num_warmup = int(num_updates * warmup_ratio) if warmup_steps is None else warmup_steps
        rates = (init_learning_rate, learning_rate, end_learning_rate)
        return make_schedule(schedule_type, num_updates, num_warmup, rates)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    @leaves_raysgd
    def save_ckpt(
        self, ckpt_dir: str | os.PathLike[str], params: Any, opt_state: Any = None, float_dtype: Any = None, **info: Any
    ) -> Checkpoint:
        """Save parameters in a folder, in place of the checkpoint that is there. Runs in the driver.

        Args:
            ckpt_dir: A path or URI.
            params: A tree of arrays, or a module of nnx.
            opt_state: The state of an optimizer.
            float_dtype: The type of floating-point numbers in the checkpoint.
            info: What `load_ckpt` returns next to the arrays, such as ``step`` and ``epoch_idx``: numbers, texts, arrays.

        Returns:
            The checkpoint, which `Predictor.predict` takes as ``params``.
        """
        import_optional("jax", "functions")
        from raysgd.functions import checkpoints

        return checkpoints.save(absolute(os.fspath(ckpt_dir)), params, opt_state, float_dtype, info)

    @leaves_raysgd
    def load_ckpt(
        self,
        ckpt_dir: str | os.PathLike[str] | Checkpoint,
        params_sharding_rules: Any = None,
        optimizer: Any = None,
        float_dtype: Any = None,
        load_params: bool = True,
        load_opt_state: bool = True,
        update_rng: bool = False,
        *,
        like: Any = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load a checkpoint of `save_ckpt` or of `Trainer.fit` into the memory of the driver, or open one of orbax or redco.

        Args:
            ckpt_dir: A path, a URI or a checkpoint. Of a folder of orbax's CheckpointManager the newest step is opened.
            params_sharding_rules: Ignored with a message: a Trainer or Predictor shards the arrays in the workers.
            optimizer: The optimizer whose state is loaded; None: it is not loaded.
            float_dtype: The type that floating-point numbers are converted to.
            load_params: Whether to load the parameters.
            load_opt_state: Whether to load the state of the optimizer.
            update_rng: Whether the information has the random key, with which ``Trainer(last_ckpt_info=...)`` continues.
            like: The parameters, or the module of nnx, whose structure ``params`` gets; `jax.ShapeDtypeStruct`s will do.
                None: they are nested dicts.

        Returns:
            ``params``, of NumPy arrays, and ``opt_state``, by name, each None if it is not loaded; and the information:
            ``step``, ``epoch_idx`` and what `save_ckpt` was given. The arrays of orbax are `StoredArray`s: a Trainer or
            Predictor that gets them reads in each worker what its devices need.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            CheckpointError: It is not of `raysgd.functions`, and orbax did not write it.
        """
        import_optional("jax", "functions")
        from raysgd.functions import checkpoints

        log_unused(PLACED_IN_WORKERS, params_sharding_rules=params_sharding_rules)
        return checkpoints.load(
            ckpt_dir if isinstance(ckpt_dir, Checkpoint) else absolute(os.fspath(ckpt_dir)),
            like=like,
            optimizer=optimizer,
            float_dtype=float_dtype,
            load_params=load_params,
            load_opt_state=load_opt_state,
            update_rng=update_rng,
        )

    @leaves_raysgd
    def load_last_ckpt(
        self,
        optimizer: Any = None,
        params_sharding_rules: Any = None,
        float_dtype: Any = None,
        load_params: bool = True,
        load_opt_state: bool = True,
        update_rng: bool = True,
    ) -> tuple[dict[str, Any], dict[str, Any]] | tuple[None, None]:
        """Load the newest checkpoint of a fit in ``workdir``, as `load_ckpt` does; ``(None, None)`` if there is none."""
        if self.workdir is None:
            raise ConfigError(
                "load_last_ckpt() needs Deployer(workdir=...), where the newest checkpoint is looked for."
            )
        newest = find_newest(Storage.from_uri(self.workdir)).checkpoint
        if newest is None:
            return None, None
        return self.load_ckpt(
            newest, params_sharding_rules, optimizer, float_dtype, load_params, load_opt_state, update_rng
        )

    @leaves_raysgd
    def load_params_shape(self, ckpt_dir: str | os.PathLike[str] | Checkpoint) -> Any:
        """Return the shapes of a checkpoint's parameters, as nested dicts of `jax.ShapeDtypeStruct`."""
        import_optional("jax", "functions")
        from raysgd.functions.trees import shapes_of

        return shapes_of(self.load_ckpt(ckpt_dir)[0]["params"])

    def find_checkpoint(self, resume_from: Any, best_by: RetentionPolicy | None) -> FoundCheckpoint:
        """Find the checkpoint that ``fit(resume_from=...)`` means; errors as for `raysgd.trainer.resume_from.find_checkpoint`."""
        if resume_from in (LAST, BEST) and self.workdir is None:
            raise ConfigError(
                f"resume_from={resume_from!r} needs Deployer(workdir=...), where the checkpoint is looked for."
            )
        if isinstance(resume_from, (str, os.PathLike)) and resume_from not in (LAST, BEST):
            resume_from = absolute(os.fspath(resume_from))
        return find_checkpoint(resume_from, self.workdir, best_by)

    if not TYPE_CHECKING:  # else type checkers would find any attribute

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    def shutdown(self) -> None:
        """End the workers and release their resources. May be called again."""
        try:
            self.runs.end_epochs()
        finally:
            self.runs.trainer.shutdown()

    def __enter__(self) -> Deployer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.runs.end_epochs()
        finally:
            self.runs.trainer.__exit__(kind, error, traceback)


def _number_of_workers(num_workers: Any, n_processes: Any) -> Any:
    if n_processes is None:
        return 1 if num_workers is None else num_workers
    check_count("n_processes", n_processes, minimum=1)
    if num_workers not in (None, n_processes):
        raise ConfigError(
            f"n_processes={n_processes} and num_workers={num_workers} are two numbers of workers; give num_workers alone."
        )
    return n_processes


def _devices_of_worker(devices_per_worker: int | None, n_local_devices: Any, gpus_per_worker: float) -> int | None:
    """Return the number of virtual devices, of the two arguments that may give it."""
    if n_local_devices is None:
        return devices_per_worker
    check_count("n_local_devices", n_local_devices, minimum=1)
    name, other = (
        ("gpus_per_worker", gpus_per_worker) if gpus_per_worker else ("devices_per_worker", devices_per_worker)
    )
    if other not in (None, n_local_devices):
        raise ConfigError(
            f"n_local_devices={n_local_devices} and {name}={other} are two numbers of devices of a worker; give {name} alone."
        )
    return devices_per_worker if gpus_per_worker else n_local_devices


def _backend(backend_args: Any, devices_per_worker: int | None) -> JaxConfig:
    if devices_per_worker is not None:
        if backend_args is not None:
            raise ConfigError(
                "devices_per_worker and backend_args exclude each other: give "
                "backend_args=raysgd.JaxConfig(devices_per_worker=...)."
            )
        backend_args = {"devices_per_worker": devices_per_worker}
    backend = resolve_backend("jax", backend_args)
    if not isinstance(backend, JaxConfig):
        raise ConfigError(f"backend_args={backend!r} is not a raysgd.JaxConfig; raysgd.functions runs on JAX.")
    return replace(backend, keep_group=True)  # JAX keeps what it compiled as long as its group exists


def _count_devices(backend: JaxConfig, gpus_per_worker: float) -> int | None:
    """Return the number of devices of a worker; None if the driver does not know it."""
    platform = backend.platform or ("cuda" if gpus_per_worker else "cpu")
    if platform == "cpu":
        return backend.devices_per_worker
    return None if platform == "tpu" else max(1, int(gpus_per_worker))


def _workers_per_replica(scaling: ScalingConfig, devices: int | None, n_model_shards: int) -> int:
    """Return how many workers hold one replica of the model, or several, between them.

    Raises:
        ConfigError: The devices are not a multiple of the shards.
    """
    if devices is None:
        return 1
    for workers in (scaling.min_workers, scaling.max_workers):
        total = workers * devices
        if math.isfinite(total) and total % n_model_shards:
            why = "is more than" if n_model_shards > total else "does not divide"
            raise ConfigError(
                f"n_model_shards={n_model_shards} {why} the {total:g} devices of {workers:g} worker"
                f"{'s' * (workers != 1)} with {devices} each: give another number of shards, or change num_workers or "
                "devices_per_worker."
            )
    return n_model_shards // math.gcd(n_model_shards, devices)


def absolute(workdir: str) -> str:
    """Return an absolute path; a URI as it is."""
    return workdir if "://" in workdir else os.path.abspath(os.path.expanduser(workdir))


def _run_config(workdir: str | None, given: RunConfig | None) -> RunConfig:
    config = RunConfig() if given is None else given
    if workdir is None:
        return config
    if config.name is not None or config.storage_path is not None:
        raise ConfigError(
            "workdir and run_config=RunConfig(name=..., storage_path=...) exclude each other: runs are in workdir; give one of "
            "both."
        )
    above, name = split_path("workdir", workdir)
    return RunConfig(name=name, storage_path=above, detached=config.detached, ray_address=config.ray_address)
