"""`TrainerArgs`: a whole training as data, with the names and defaults of nnScaler's Trainer. No torch, in any process.

Each field is declared once, with its type and its default; the docstring of its class says what it means. `fields`
has the types, by which pydantic reads and checks the values, and `raysgd.declarative.schema` makes help and a JSON schema of the
declarations. Values of components' arguments are not looked at here: `raysgd.declarative.values` makes objects of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic.dataclasses import dataclass

from raysgd import config
from raysgd.backends.registry import resolve_backend
from raysgd.config.argument_names import check_known, nearest
from raysgd.config.checks import check_bool, check_choice, split_path
from raysgd.declarative.fields import (
    CONFIG,
    Amount,
    Args,
    Bool,
    Count,
    FieldError,
    FullName,
    List,
    Maybe,
    Path,
    Section,
    Seed,
    Settings,
    Text,
    UnknownFieldError,
    of_field,
)
from raysgd.declarative.hooks import HOOKS
from raysgd.declarative.values import is_full_name, read_none, read_settings
from raysgd.engine.config import EngineConfig
from raysgd.errors import ConfigError

RunMode = Literal["run", "compile"]
SaveType = Literal["sharded", "deduped", "merged"]
Interval = Literal["epoch", "step"]
LossReduction = Literal["mean", "sum", "row-mean", "per-token-mean"]
GradReduction = Literal["mean", "sum", "row-mean", "per-token-mean"]
TensorType = Literal["param", "buffer", "input"]
TensorPrecision = Literal["fp32", "fp16", "bf16", "none"]
#: Names of strategies; anything else with a dot in it is a function of the user.
POLICIES = ("autodist", "data", "dp", "tp", "pp", "hybrid")
#: Arguments of `raysgd.Trainer`, and of its `raysgd.RunConfig`, that the field ``trainer`` may have.
_OF_WORKERS = ("num_workers", "cpus_per_worker", "gpus_per_worker", "resources_per_worker", "placement_strategy")
_TRAINER_ARGUMENTS = (
    *_OF_WORKERS, "backend", "backend_args", "runtime_env", "deterministic", "detached", "ray_address", "failure_config",
    "checkpoint_config",
)  # fmt: skip
#: The loggers that are callbacks of raysgd, and their arguments.
LOGGERS = {
    "TensorBoardLogger": ("name", "root_dir"),
    "WandbLogger": ("name", "project", "entity", "dir", "mode"),
}
#: Fields of nnScaler that say nothing here: a file may have them, and is read without them.
NOT_NEEDED = {
    "gen_reuse": "no code is generated",
    "broadcast_strategy": "all workers start from equal weights",
    "instance_name": "a run is named by checkpoint.save_dir",
    "dummy_sample_gen_fn": "a plan takes rows of the dataset",
    "debug": "one reduction gives all replicas of the model the same gradients",
    "log_progress_every_n_train_steps": "enable_progress_bar shows a line each second where there is no terminal",
    "model.parallel_modules": "pas_policy and engine divide the model as a whole",
    "compute_config.use_end2end": "the model's forward always takes a batch and returns the loss",
    "compute_config.constant_folding": "the model is not traced into code",
    "compute_config.trace_strategy": "the model is not traced into code",
    "compute_config.inference_only": "a training needs gradients",
    "compute_config.zero_ngroups": "the optimizer's state is divided among all replicas of the model",
    "compute_config.use_async_reducer": "gradients are always reduced during the backward pass",
    "compute_config.reducer_bucket_cap_mb": "buckets have the sizes that reproducible sums need",
}


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ComputeConfig(Section):
    """The devices of a training, and how a replica of the model is divided among them.

    Attributes:
        plan_ngpus: Workers that hold one replica of the model between them. What they share is decided by ``pas_policy``.
        runtime_ngpus: All workers; a multiple of ``plan_ngpus``. None: ``plan_ngpus``.
        use_zero: Whether the optimizer's state is divided among the replicas of the model: the engine's ``zero_stage=1``, or 2
            with ``zero_use_reduce_scatter``.
        zero_use_reduce_scatter: Whether gradients are divided, too.
        pas_config: Given to an own function of ``pas_policy``.
        user_config: Values of yours; hooks find them in ``train_args``.
    """

    plan_ngpus: Count = 1
    runtime_ngpus: Maybe[Count] = None
    use_zero: Bool = False
    zero_use_reduce_scatter: Bool = False
    pas_config: Settings = field(default_factory=dict)
    user_config: Settings = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_workers % self.plan_ngpus:
            raise FieldError(
                ("runtime_ngpus",),
                f"runtime_ngpus={self.runtime_ngpus} is not a multiple of plan_ngpus={self.plan_ngpus}, the workers that hold "
                f"one replica of the model; give {self.plan_ngpus * -(-self.num_workers // self.plan_ngpus)}.",
            )

    @property
    def num_workers(self) -> int:
        return self.plan_ngpus if self.runtime_ngpus is None else self.runtime_ngpus

    @property
    def num_replicas(self) -> int:
        """Replicas of the model that take different batches."""
        return self.num_workers // self.plan_ngpus


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ComponentConfig(Section):
    """A part of a training, which a class or function makes.

    Attributes:
        type: Its full name.
        args: Its arguments.
    """

    type: FullName
    args: Args = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class _OfStages(Section):
    """What is made for training, validation and test by one class or function; without arguments for a stage as for training."""

    type: FullName
    train_args: Args = field(default_factory=dict)
    val_args: Args = field(default_factory=dict)
    test_args: Args = field(default_factory=dict)

    def args_of(self, stage: str) -> Mapping[str, Any]:
        """Return the arguments for ``"train"``, ``"val"`` or ``"test"``."""
        found: Mapping[str, Any] = getattr(self, f"{stage}_args")
        return found or self.train_args


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ModelConfig(ComponentConfig):
    """The model: a class or function by its full name, and its arguments.

    Attributes:
        type: Makes a torch module, whose ``forward`` takes a batch and returns the loss: a tensor, the first value of a tuple, or
            ``.loss`` or ``["loss"]`` of an object or dict.
        args: Its arguments.
    """


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class OptimizerConfig(ComponentConfig):
    """The optimizer, and what its steps are made of.

    Attributes:
        type: Makes the optimizer; its first argument is the model's parameters.
        args: Its other arguments.
        clip_gnorm: Limit of the gradients' global norm. 0 or None: gradients are not clipped.
        loss_reduction: The training loss that is reported: ``"mean"`` or ``"sum"`` over all micro-batches of a step, or
            ``"row-mean"``: over all rows. A validation loss is the mean over all rows. ``"per-token-mean"``: both are the sum of
            all losses over the number of tokens.
        grad_reduction: ``"mean"`` or ``"sum"`` over all micro-batches of a step; ``"row-mean"``: of the mean over all rows, where
            micro-batches have different numbers of them; ``"per-token-mean"``: the sum of all gradients over the number of
            tokens. A loss is the sum over the tokens of its micro-batch then; the model returns their number next to it, as
            ``num_tokens``, or ``aggregate_outputs_fn`` returns the number of the step.
        aggregate_outputs_fn: Full name of a function ``fn(loss_outputs, sync_group) -> AggregatedOutputs``.
    """

    clip_gnorm: Maybe[Amount] = 0.0
    loss_reduction: LossReduction = "mean"
    grad_reduction: GradReduction = "mean"
    aggregate_outputs_fn: Maybe[FullName] = None

    @property
    def counts_tokens(self) -> bool:
        """Whether the number of tokens is that of the model's outputs."""
        return self.aggregate_outputs_fn is None and "per-token-mean" in (self.grad_reduction, self.loss_reduction)


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class DatasetConfig(_OfStages):
    """The datasets: one class or function, called with different arguments.

    Attributes:
        type: Makes a torch dataset.
        train_args: Its arguments for training.
        val_args: For validation; empty: there is none.
        test_args: For `raysgd.declarative.evaluate` with ``stage="test"``; empty: there is none.
    """

    def args_of(self, stage: str) -> Mapping[str, Any]:
        """Return the arguments of a stage; empty: it has no dataset."""
        found: Mapping[str, Any] = getattr(self, f"{stage}_args")
        return found


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class DataloaderConfig(_OfStages):
    """The loader of batches. ``dataset``, ``batch_size`` and ``sampler`` are set by the loop.

    Attributes:
        type: Makes the loader; takes ``dataset``, ``batch_size`` and ``sampler``.
        train_args: Its other arguments.
        val_args: The same for validation; empty: ``train_args``.
        test_args: The same for test; empty: ``train_args``.
    """

    type: FullName = "torch.utils.data.DataLoader"

    def __post_init__(self) -> None:
        for name in ("train_args", "val_args", "test_args"):
            given = read_settings(getattr(self, name))
            if "batch_size" in given:
                raise FieldError(
                    (name, "batch_size"), f"{name}.batch_size cannot be set: give micro_batch_size, which it always is."
                )
            is_default = self.type == type(self).type  # another loader may take them
            for key in (key for key in ("shuffle", "batch_sampler") if is_default and given.get(key)):
                raise FieldError(
                    (name, key),
                    f"{name}.{key} cannot be set: dataset_sampler decides on the order and micro_batch_size on the batches; give "
                    f"dataset_sampler.{name}.shuffle.",
                )


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class DatasetSamplerConfig(_OfStages):
    """The sampler, which splits a dataset among the replicas of the model. ``dataset``, ``num_replicas``, ``rank`` are ignored.

    Attributes:
        type: Makes the sampler; takes ``dataset``, ``num_replicas`` and ``rank``.
        train_args: Its other arguments.
        val_args: The same for validation; empty: ``train_args``.
        test_args: The same for test; empty: ``train_args``.
    """

    type: FullName = "torch.utils.data.DistributedSampler"


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class LRSchedulerConfig(ComponentConfig):
    """The scheduler of the learning rate.

    Attributes:
        type: Makes the scheduler; its first argument is the optimizer.
        args: Its other arguments.
        interval: Whether it makes a step after each ``"epoch"`` or each optimizer ``"step"``.
    """

    interval: Interval = "epoch"


_RESUME_FROM = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}


def _read_resume_from(value: Any) -> Any:
    """Return which checkpoint is meant, which may be written with options of how nnScaler loads it."""
    if not isinstance(value, Mapping):
        return value
    for name in value:
        if name not in ("checkpoint", "with_merged", "convert_fn"):
            raise UnknownFieldError(
                (str(name),), f"there is no such field{nearest(name, ('checkpoint', 'with_merged'))}."
            )
    if read_none(value.get("convert_fn")) is not None:
        raise FieldError(
            ("convert_fn",),
            "resume_from.convert_fn is not supported: checkpoints are those of raysgd. Save the converted weights as a file, and "
            "give tracing_from_weights.",
        )
    if isinstance(found := value.get("checkpoint", "last"), Mapping):
        raise FieldError(("checkpoint",), "resume_from.checkpoint is a mapping; give last, best or a path.")
    return found


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class CheckpointConfig(Section):
    """Settings of checkpoints: when they are saved, and which are kept.

    Attributes:
        save_dir: Folder, or URI, of the checkpoints: each run of this training has a folder in it.
        no_save: Whether no checkpoints are saved.
        save_type: ``"sharded"`` and ``"deduped"`` are the same here: each rank saves what it holds, and each tensor lies in the
            checkpoint once. ``"merged"``: rank 0 saves whole tensors.
        save_last: Whether the newest checkpoint is always kept, and one is saved at the end of the training.
        save_best: Whether the checkpoint with the lowest validation loss is kept, in addition to the newest ones.
        symlink_best_and_last: Whether ``last`` and ``best`` in ``save_dir`` lead to them. Without them ``resume_from`` finds both
            all the same.
        every_n_train_steps: Optimizer steps between two checkpoints.
        every_n_epochs: Epochs between two checkpoints. If neither is given: 1.
        keep_last_n_checkpoints: The newest ones of all runs in ``save_dir`` to keep; None: all.
        resume_from: ``last``, ``best``, or the path of a checkpoint or of a run; also as ``{checkpoint: last}``. Without a
            last or best one, training starts from the beginning.
    """

    save_dir: Path = "./checkpoints"
    no_save: Bool = False
    save_type: SaveType = "sharded"
    save_last: Bool = True
    save_best: Bool = True
    symlink_best_and_last: Bool = True
    every_n_train_steps: Maybe[Count] = None
    every_n_epochs: Maybe[Count] = None
    keep_last_n_checkpoints: Maybe[Count] = None
    resume_from: Annotated[Maybe[Path], BeforeValidator(_read_resume_from), WithJsonSchema(_RESUME_FROM)] = None

    def __post_init__(self) -> None:
        with of_field("save_dir"):
            split_path("save_dir", self.save_dir)
        if self.every_n_train_steps is not None and self.every_n_epochs is not None:
            raise FieldError(
                ("every_n_epochs",),
                "every_n_train_steps and every_n_epochs are both given, and a checkpoint is saved by one of them; leave out one.",
            )

    @property
    def epochs_between(self) -> int | None:
        """Epochs between two checkpoints; None if steps decide."""
        return (self.every_n_epochs or 1) if self.every_n_train_steps is None else None


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class LogConfig(ComponentConfig):
    """A logger.

    Attributes:
        type: ``TensorBoardLogger``, ``WandbLogger``, or the full name of a class: a callback of raysgd, or a logger with the
            methods ``setup(config)``, ``log_metrics(metrics, step, tag=...)`` and ``finalize()``, which rank 0 calls.
        args: Its arguments.
    """

    type: FullName | Literal["TensorBoardLogger", "WandbLogger"]

    def __post_init__(self) -> None:
        if (name := self.known_logger) is not None:
            with of_field("args", names=self.args):
                check_known(name, self.args, LOGGERS[name], {})
                self.make_known()

    def make_known(self) -> Any:
        """Make the callback of a known logger."""
        from raysgd.callbacks.tensorboard import TensorBoardCallback  # not for a start without them
        from raysgd.callbacks.wandb import WandbCallback

        given: dict[str, Any] = {name: str(value) for name, value in self.args.items() if value is not None}
        if self.known_logger == "WandbLogger":
            return WandbCallback(**given)
        return TensorBoardCallback(subdir=given.get("name", "tensorboard"))

    @property
    def known_logger(self) -> str | None:
        """The name of a known logger, whatever module of nnScaler it is said to be in."""
        module, _, name = self.type.rpartition(".")
        return name if name in LOGGERS and f"{module}.".startswith((".", "nnscaler.")) else None


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class HookConfig(ComponentConfig):
    """Hooks in a class.

    Attributes:
        type: Full name of a class, a `raysgd.declarative.TrainHook`.
        args: Its arguments.
    """


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class SearchConfig(Section):
    """A search with Ray Tune.

    Attributes:
        space: Names of fields, and what is tried: ``{"optimizer.args.lr": {"loguniform": [1e-4, 1e-1]}}``, by the functions of
            ``ray.tune``, or a list of values.
        metric: What is optimized. None: ``val_loss``, or ``train_loss`` without validation data.
        mode: ``"min"`` or ``"max"``.
        num_samples: Samples of the space.
        max_concurrent_trials: Trials at the same time; None: as many as fit.
        time_budget_s: Seconds after which the search ends.
        scheduler: Class and arguments of a scheduler of Ray Tune; None: every trial runs to its end.
        search_alg: The same of a search algorithm; None: random and grid search.
    """

    space: Annotated[Settings, Field(min_length=1)]
    metric: Maybe[Text] = None
    mode: Literal["min", "max"] = "min"
    num_samples: Count = 1
    max_concurrent_trials: Maybe[Count] = None
    time_budget_s: Maybe[Amount] = None
    scheduler: Maybe[ComponentConfig] = None
    search_alg: Maybe[ComponentConfig] = None


def _read_hook(value: Any) -> Any:
    """Return hooks in a class, or functions by the names of hooks if there is no ``type``."""
    value = {"type": value} if isinstance(value := read_none(value), str) else value
    if not isinstance(value, Mapping):
        return value
    if "type" in value:
        return HookConfig(**value)
    for name in value:
        if name not in HOOKS:
            raise UnknownFieldError((str(name),), f"there is no such hook{nearest(name, HOOKS)}.")
    return value


def _check_policy(name: str) -> str:
    return name if is_full_name(name) else check_choice("pas_policy", name, POLICIES)


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class TrainerArgs(Section):
    """A training: its model, data and loop by the names of classes and functions, as nnScaler's Trainer has them.

    What raysgd adds stands at the end.

    Attributes:
        init_module: A module that every worker imports first.
        vars: Values of yours, to which references lead: ``$(vars.width)`` is the value, ``$!(vars.tokenizer)`` the object that is
            made of it, once.
        compute_config: The devices. None: one worker.
        gen_savedir: Where ``run_mode="compile"`` writes the plan.
        pas_policy: How ``plan_ngpus`` workers divide a replica of the model: ``"autodist"``: as the engine's plan chooses;
            ``"dp"`` (or ``"data"``), ``"tp"``, ``"pp"``, ``"hybrid"`` (tensor and pipeline parallel); or the full name of a
            function that gets the `ComputeConfig` and returns fields of `raysgd.EngineConfig`.
        run_mode: ``"run"``, or ``"compile"``, which writes the plan, shapes and memory without training.
        tracing_from_weights: File of weights, ``.safetensors`` or torch's, that the model starts from.
        model: The model.
        optimizer: The optimizer.
        dataset: The datasets.
        dataloader: The loader of batches.
        dataset_sampler: The sampler.
        lr_scheduler: The scheduler of the learning rate. None: the rate stays.
        checkpoint: When checkpoints are saved.
        log: Loggers.
        hook: Hooks, in a class, or as functions: their full names by the names of hooks.
        precision: One type for all tensors, or one each for ``param``, ``buffer`` and ``input``; ``"none"``: as they are.
        micro_batch_size: Rows of a forward pass.
        global_batch_size: Rows of an optimizer step. None: ``micro_batch_size`` times replicas and accumulation.
        grad_accumulation_steps: Micro-batches of a replica per optimizer step. None: 1, or what ``global_batch_size`` needs.
        max_epochs: Epochs to train.
        max_train_steps: Optimizer steps to train.
        max_val_steps: Steps of a validation, which have as many micro-batches as optimizer steps.
        val_every_n_train_steps: Optimizer steps between two validations.
        val_every_n_epochs: Epochs between two validations. With every checkpoint there is one in any case.
        enable_progress_bar: Whether results are shown.
        seed: Of all generators and of the order of the data.
        init_env_fn: Full name of a function that is called first in every worker, with the loop.
        trainer: Arguments of `raysgd.Trainer`, such as ``num_workers: [2, 8]`` for elastic training, ``cpus_per_worker``,
            ``failure_config``; and ``detached``, ``ray_address``, ``backend``.
        engine: Further fields of `raysgd.EngineConfig`, such as ``activation_checkpointing`` or ``compile``.
        search: A search with Ray Tune.
    """

    FURTHER: ClassVar[Mapping[str, str]] = {
        **{each.name: f"engine.{each.name}" for each in dataclasses.fields(EngineConfig)},
        **{name: f"trainer.{name}" for name in _TRAINER_ARGUMENTS},
    }

    init_module: Maybe[Text] = None
    vars: Args = field(default_factory=dict)
    compute_config: Maybe[ComputeConfig] = None
    gen_savedir: Path = "./.nnscaler"
    pas_policy: Annotated[Text, AfterValidator(_check_policy)] = "autodist"
    run_mode: RunMode = "run"
    tracing_from_weights: Maybe[Path] = None
    model: ModelConfig
    optimizer: OptimizerConfig
    dataset: DatasetConfig
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    dataset_sampler: DatasetSamplerConfig = field(default_factory=DatasetSamplerConfig)
    lr_scheduler: Maybe[LRSchedulerConfig] = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: List[LogConfig] = field(default_factory=list)
    hook: Annotated[HookConfig | dict[str, FullName] | None, BeforeValidator(_read_hook)] = None
    precision: Maybe[TensorPrecision | dict[TensorType, TensorPrecision]] = None
    micro_batch_size: Count = 1
    global_batch_size: Maybe[Count] = None
    grad_accumulation_steps: Maybe[Count] = None
    max_epochs: Maybe[Count] = None
    max_train_steps: Maybe[Count] = None
    max_val_steps: Maybe[Count] = None
    val_every_n_train_steps: Maybe[Count] = None
    val_every_n_epochs: Maybe[Count] = 1
    enable_progress_bar: Bool = True
    seed: Maybe[Seed] = None
    init_env_fn: Maybe[FullName] = None
    trainer: Settings = field(default_factory=dict)
    engine: Settings = field(default_factory=dict)
    search: Maybe[SearchConfig] = None

    def __post_init__(self) -> None:
        if self.max_epochs is None and self.max_train_steps is None:
            raise FieldError(
                ("max_epochs",),
                "neither max_epochs nor max_train_steps is given, so the training would not end; give one of them.",
            )
        inputs, parameters = self.precision_of("input"), self.precision_of("param")
        if inputs in ("fp16", "bf16") and parameters not in (inputs, "fp16"):
            raise FieldError(
                ("precision",),
                f"precision: inputs in {inputs} do not go with parameters in {parameters or 'fp32'}; give param: {inputs} "
                "too, or leave out input.",
            )
        self.accumulation()
        self._check_trainer()

    def _check_trainer(self) -> None:
        given = self.trainer
        with of_field("trainer", names=given):
            check_known("trainer", given, _TRAINER_ARGUMENTS, {})
            of_workers = {name: given[name] for name in _OF_WORKERS if name in given}
            config.ScalingConfig(**of_workers | {"num_workers": self.num_workers})
            config.RunConfig(name="any", **{name: given[name] for name in ("detached", "ray_address") if name in given})
            check_bool("deterministic", given.get("deterministic", False))
            resolve_backend(given.get("backend", "torch"), given.get("backend_args"))
            if not isinstance(given.get("runtime_env") or {}, Mapping):
                raise ConfigError(f"runtime_env={given['runtime_env']!r} is not a mapping; give its fields by name.")
        for name, kind in (("failure_config", config.FailureConfig), ("checkpoint_config", config.CheckpointConfig)):
            inner = given.get(name) or {}
            if not isinstance(inner, Mapping):
                raise FieldError(
                    ("trainer", name), f"trainer.{name}={inner!r} is not a mapping; give its fields by name."
                )
            with of_field("trainer", name, names=inner):
                kind(**inner)
                if taken := sorted({"num_to_keep", "keep_best", "links"} & set(inner)):
                    raise ConfigError(
                        f"{taken[0]} is set by the section checkpoint: give keep_last_n_checkpoints, save_best or "
                        "symlink_best_and_last there."
                    )

    @property
    def num_workers(self) -> int | tuple[int, float]:
        """All workers; of an elastic training their smallest and largest number."""
        given = self.trainer.get("num_workers", self.compute.num_workers)
        return tuple(given) if isinstance(given, list) else given

    @property
    def compute(self) -> ComputeConfig:
        """The devices; one worker if none are given."""
        return ComputeConfig() if self.compute_config is None else self.compute_config

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step, over all replicas of the model."""
        return self.micro_batch_size * self.compute.num_replicas * self.accumulation()

    def accumulation(self) -> int:
        """Return the micro-batches of a replica per optimizer step, as nnScaler counts them.

        Raises:
            FieldError: The global batch size does not divide, or the two settings do not agree.
        """
        micro, replicas, given = self.micro_batch_size, self.compute.num_replicas, self.grad_accumulation_steps
        if self.global_batch_size is None:
            return given or 1
        if self.global_batch_size % (micro * replicas):
            compute = self.compute
            raise FieldError(
                ("global_batch_size",),
                f"micro_batch_size {micro} x ({compute.num_workers} / {compute.plan_ngpus}) = {micro * replicas} does not divide "
                f"global_batch_size {self.global_batch_size}: {compute.num_workers} workers (runtime_ngpus) are {replicas} "
                f"replicas of the model, {compute.plan_ngpus} workers (plan_ngpus) each, and each replica takes {micro} rows at "
                f"a time; give a multiple of {micro * replicas}, or fewer workers.",
            )
        needed = self.global_batch_size // (micro * replicas)
        if given is not None and given != needed:
            raise FieldError(
                ("grad_accumulation_steps",),
                f"grad_accumulation_steps={given} does not agree with global_batch_size={self.global_batch_size}: that is "
                f"{micro} rows x {replicas} replicas x {needed} micro-batches; give {needed}, or leave out one of the two.",
            )
        return needed

    def precision_of(self, kind: TensorType) -> str | None:
        """Return the type of parameters, buffers or inputs; None: as they are."""
        value = self.precision.get(kind) if isinstance(self.precision, Mapping) else self.precision
        return None if value == "none" else value


def as_values(args: Any) -> Any:
    """Return nested dicts and lists with the fields of `TrainerArgs`, in their order, as they are written in a file."""
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        return {each.name: as_values(getattr(args, each.name)) for each in dataclasses.fields(args)}
    if isinstance(args, Mapping):
        return {key: as_values(value) for key, value in args.items()}
    if isinstance(args, (list, tuple)):
        return [as_values(each) for each in args]
    return re.sub(r"\$(?=[({])", "$$", args) if isinstance(args, str) else args
