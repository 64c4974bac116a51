"""`TrainerArgs`: a whole training as data, with the names and defaults of nnScaler's Trainer. No torch, in any process.

Each class checks its own fields. Errors are `FieldError`, which says which field is wrong, so that a reader of files can name the
place. Values of components' arguments are not looked at here: `raysgd.declarative.values` makes objects of them.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from raysgd._util.text import with_article
from raysgd.config.checks import check_amount, check_choice, check_count
from raysgd.declarative.values import NO_FULL_NAME, is_full_name
from raysgd.errors import ConfigError

RunMode = Literal["run", "compile"]
SaveType = Literal["sharded", "deduped", "merged"]
Interval = Literal["epoch", "step"]
LossReduction = Literal["mean", "sum", "row-mean"]
GradReduction = Literal["mean", "sum", "row-mean", "per-token-mean"]
TensorType = Literal["param", "buffer", "input"]
TensorPrecision = Literal["fp32", "fp16", "bf16", "none"]
#: Names of strategies; anything else with a dot in it is a function of the user.
POLICIES = ("autodist", "data", "dp", "tp", "pp", "hybrid")
GEN_REUSE = ("auto", "match", "override", "moo", "graph")
BROADCAST = ("none", "all", "no_weights", "code")


class FieldError(ConfigError):
    """A field has a value that cannot work.

    Attributes:
        path: The names that lead to the field, such as ``("checkpoint", "save_type")``.
    """

    def __init__(self, path: tuple[str, ...], text: str) -> None:
        super().__init__(text)
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldError, (self.path, str(self))


class _Checked:
    """Checks fields by their types; errors say which field it is."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
            value = getattr(self, name)
            if (value is None and types.NoneType in kinds) or len(set(kinds) - {types.NoneType}) > 1:
                continue
            if get_origin(kinds[0]) is Literal:
                self._check(name, check_choice, get_args(kinds[0]))
            elif kinds[0] is bool and not isinstance(value, bool):
                raise FieldError((name,), f"{name}={value!r} is not a bool; give true or false.")
            elif kinds[0] is int:
                self._check(name, check_count, minimum=0 if name == "seed" else 1)
            elif kinds[0] is float:
                self._check(name, check_amount)
            elif kinds[0] is str and value is not None and not isinstance(value, str):
                raise FieldError((name,), f"{name}={value!r} is {with_article(type(value).__name__)}; give a text.")
            elif get_origin(kinds[0]) is Mapping and not (
                isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
            ):
                raise FieldError((name,), f"{name}={value!r} is not a mapping of argument names to values.")

    def _check(self, name: str, check: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            check(name, getattr(self, name), *args, **kwargs)
        except ConfigError as error:
            raise FieldError((name,), str(error)) from None

    def _check_paths(self, *names: str) -> None:
        for name in names:
            if (found := re.search(r"\$\{?(\w+)\}?", getattr(self, name) or "")) is not None:
                raise FieldError(
                    (name,),
                    f"{name}={getattr(self, name)!r} has {found[0]}, which is not resolved: write ${{{found[1]}}} in a file "
                    "or on the command line.",
                )

    def _check_full_names(self, *names: str, also: Sequence[str] = ()) -> None:
        for name in names:
            value = getattr(self, name)
            if value and value not in also and not is_full_name(value):
                raise FieldError((name,), f"{name}={value!r} {NO_FULL_NAME}")

    def _check_given(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name):
                raise FieldError((name,), f"{name} is empty; give a text, or leave it out.")


@dataclass(frozen=True, kw_only=True)
class ComputeConfig(_Checked):
    """The devices of a training, and how a replica of the model is divided among them.

    Attributes:
        plan_ngpus: Workers that hold one replica of the model between them. What they share is decided by ``pas_policy``.
        runtime_ngpus: All workers; a multiple of ``plan_ngpus``. None: ``plan_ngpus``.
        use_zero: Whether the optimizer's state is divided among the replicas of the model: the engine's ``zero_stage=1``, or 2
            with ``zero_use_reduce_scatter``.
        zero_use_reduce_scatter: Whether gradients are divided, too.
        use_end2end: Must be true: the model's ``forward`` takes a batch and returns the loss.
        constant_folding: Without effect, since the model is not traced.
        trace_strategy: Without effect.
        zero_ngroups: Without effect: the state is divided among all replicas.
        inference_only: Must be false.
        use_async_reducer: Without effect: gradients are always reduced during the backward pass.
        reducer_bucket_cap_mb: Without effect.
        pas_config: Given to an own function of ``pas_policy``.
        user_config: Values of yours; hooks find them in ``train_args``.
    """

    plan_ngpus: int = 1
    runtime_ngpus: int | None = None
    constant_folding: bool = False
    trace_strategy: str = "cuda_run_cpu_offload"
    use_zero: bool = False
    zero_ngroups: int = 1
    zero_use_reduce_scatter: bool = False
    inference_only: bool = False
    use_end2end: bool = False
    use_async_reducer: bool = False
    reducer_bucket_cap_mb: float | None = None
    pas_config: Mapping[str, Any] = field(default_factory=dict)
    user_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers % self.plan_ngpus:
            raise FieldError(
                ("runtime_ngpus",),
                f"runtime_ngpus={self.runtime_ngpus} is not a multiple of plan_ngpus={self.plan_ngpus}, the workers that hold "
                f"one replica of the model; give {self.plan_ngpus * -(-self.num_workers // self.plan_ngpus)}.",
            )
        if not self.use_end2end:
            raise FieldError(
                ("use_end2end",),
                "use_end2end must be true: the model's forward takes a batch and returns the loss.",
            )
        if self.inference_only:
            raise FieldError(("inference_only",), "inference_only=true cannot be trained; leave it out.")

    @property
    def num_workers(self) -> int:
        return self.plan_ngpus if self.runtime_ngpus is None else self.runtime_ngpus

    @property
    def num_replicas(self) -> int:
        """Replicas of the model that take different batches."""
        return self.num_workers // self.plan_ngpus


@dataclass(frozen=True, kw_only=True)
class _Component(_Checked):
    """What is made by a class or function.

    Attributes:
        type: Its full name.
        args: Its arguments.
    """

    type: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    _short_names: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_full_names("type", also=self._short_names)

    def _check_type(self, text: str) -> None:
        if self.type is None:
            raise FieldError(("type",), text)


@dataclass(frozen=True, kw_only=True)
class _OfStages(_Checked):
    """What is made for training, validation and test by one class or function.

    Attributes:
        type: Its full name.
        train_args: Its arguments for training.
        val_args: For validation.
        test_args: For test.
    """

    type: str | None = None
    train_args: Mapping[str, Any] = field(default_factory=dict)
    val_args: Mapping[str, Any] = field(default_factory=dict)
    test_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_full_names("type")

    def args_of(self, stage: str) -> Mapping[str, Any]:
        """Return the arguments for ``"train"``, ``"val"`` or ``"test"``."""
        return {"train": self.train_args, "val": self.val_args, "test": self.test_args}[stage]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Component):
    """The model: a class or function by its full name, and its arguments.

    Attributes:
        type: Makes a torch module, whose ``forward`` takes a batch and returns the loss: a tensor, the first value of a tuple, or
            ``.loss`` or ``["loss"]`` of an object or dict.
        args: Its arguments.
    """


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_Component):
    """The optimizer, and what its steps are made of.

    Attributes:
        type: Makes the optimizer; its first argument is the model's parameters.
        args: Its other arguments.
        clip_gnorm: Limit of the gradients' global norm. 0 or None: gradients are not clipped.
        loss_reduction: The training loss that is reported: ``"mean"`` or ``"sum"`` over all micro-batches of a step, or
            ``"row-mean"``: over all rows. A validation loss is always the mean over all rows.
        grad_reduction: ``"mean"`` or ``"sum"`` over all micro-batches of a step; ``"row-mean"``: of the mean over all rows, where
            micro-batches have different numbers of them; ``"per-token-mean"``: the sum of all gradients over the number of
            tokens, which ``aggregate_outputs_fn`` returns.
        aggregate_outputs_fn: Full name of a function ``fn(loss_outputs, sync_group) -> AggregatedOutputs``.
    """

    clip_gnorm: float | None = 0.0
    loss_reduction: LossReduction = "mean"
    grad_reduction: GradReduction = "mean"
    aggregate_outputs_fn: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_full_names("aggregate_outputs_fn")
        if self.grad_reduction == "per-token-mean" and self.aggregate_outputs_fn is None:
            raise FieldError(
                ("grad_reduction",),
                "grad_reduction='per-token-mean' needs aggregate_outputs_fn, a function that returns the number of tokens.",
            )


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(_OfStages):
    """The datasets: one class or function, called with different arguments.

    Attributes:
        type: Makes a torch dataset.
        train_args: Its arguments for training.
        val_args: For validation; empty: there is none.
        test_args: For `raysgd.declarative.evaluate` with ``stage="test"``; empty: there is none.
    """


@dataclass(frozen=True, kw_only=True)
class DataloaderConfig(_OfStages):
    """The loader of batches. ``dataset``, ``batch_size`` and ``sampler`` are set by the loop.

    Attributes:
        type: Makes the loader; takes ``dataset``, ``batch_size`` and ``sampler``.
        train_args: Its other arguments.
        val_args: The same for validation; empty: ``train_args``.
        test_args: The same for test; empty: ``train_args``.
    """

    type: str = "torch.utils.data.DataLoader"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_given("type")
        for name in ("train_args", "val_args", "test_args"):
            if "batch_size" in getattr(self, name):
                raise FieldError(
                    (name, "batch_size"), f"{name}.batch_size cannot be set: give micro_batch_size, which it always is."
                )

    def args_of(self, stage: str) -> Mapping[str, Any]:
        return super().args_of(stage) or self.train_args


@dataclass(frozen=True, kw_only=True)
class DatasetSamplerConfig(_OfStages):
    """The sampler, which splits a dataset among the replicas of the model. ``dataset``, ``num_replicas``, ``rank`` are ignored.

    Attributes:
        type: Makes the sampler; takes ``dataset``, ``num_replicas`` and ``rank``.
        train_args: Its other arguments.
        val_args: The same for validation.
        test_args: The same for test.
    """

    type: str = "torch.utils.data.DistributedSampler"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_given("type")


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig(_Component):
    """The scheduler of the learning rate.

    Attributes:
        type: Makes the scheduler; its first argument is the optimizer.
        args: Its other arguments.
        interval: Whether it makes a step after each ``"epoch"`` or each optimizer ``"step"``.
    """

    interval: Interval = "epoch"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_type("lr_scheduler has no type; give its full name, or leave out lr_scheduler.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(_Checked):
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
        keep_last_n_checkpoints: The newest ones to keep; None: all.
        resume_from: ``last``, ``best``, or the path of a checkpoint or of a run. Without a last or best one, training starts from
            the beginning.
    """

    save_dir: str = "./checkpoints"
    no_save: bool = False
    save_type: SaveType = "sharded"
    save_last: bool = True
    save_best: bool = True
    symlink_best_and_last: bool = True
    every_n_train_steps: int | None = None
    every_n_epochs: int | None = None
    keep_last_n_checkpoints: int | None = None
    resume_from: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_given("save_dir")
        self._check_paths("save_dir", "resume_from")
        if self.every_n_train_steps is not None and self.every_n_epochs is not None:
            raise FieldError(
                ("every_n_epochs",),
                "every_n_train_steps and every_n_epochs are both given, and a checkpoint is saved by one of them; leave out one.",
            )

    @property
    def epochs_between(self) -> int | None:
        """Epochs between two checkpoints; None if steps decide."""
        return (self.every_n_epochs or 1) if self.every_n_train_steps is None else None


@dataclass(frozen=True, kw_only=True)
class LogConfig(_Component):
    """A logger.

    Attributes:
        type: ``TensorBoardLogger``, ``WandbLogger``, or the full name of a class: a callback of raysgd, or a logger with the
            methods ``setup(config)``, ``log_metrics(metrics, step, tag=...)`` and ``finalize()``, which rank 0 calls.
        args: Its arguments.
    """

    _short_names = ("TensorBoardLogger", "WandbLogger")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_type("a logger has no type; give TensorBoardLogger, WandbLogger or the full name of a class.")


@dataclass(frozen=True, kw_only=True)
class HookConfig(_Component):
    """Hooks in a class.

    Attributes:
        type: Full name of a class, a `raysgd.declarative.TrainHook`.
        args: Its arguments.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_type("hook has no type; give the full name of a class, or functions by the names of hooks.")


@dataclass(frozen=True, kw_only=True)
class HookMapConfig(_Checked):
    """Hooks as functions, by their full names. `raysgd.declarative.TrainHook` says when each is called and with what."""

    after_setup: str | None = None
    on_train_start: str | None = None
    on_train_end: str | None = None
    on_val_start: str | None = None
    on_val_end: str | None = None
    on_epoch_start: str | None = None
    on_epoch_end: str | None = None
    on_train_step_start: str | None = None
    on_train_step_end: str | None = None
    on_val_step_start: str | None = None
    on_val_step_end: str | None = None
    after_aggregate_train_step_outputs: str | None = None
    after_aggregate_val_step_outputs: str | None = None
    before_zero_grad: str | None = None
    after_zero_grad: str | None = None
    before_sync_grad: str | None = None
    after_sync_grad: str | None = None
    before_gnorm_clip: str | None = None
    after_gnorm_clip: str | None = None
    before_optimizer_step: str | None = None
    after_optimizer_step: str | None = None
    on_load_checkpoint: str | None = None
    on_save_checkpoint: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_full_names(*(each.name for each in dataclasses.fields(self)))


#: The names of all hooks.
HOOKS = tuple(each.name for each in dataclasses.fields(HookMapConfig))


@dataclass(frozen=True, kw_only=True)
class TrainerArgs(_Checked):
    """A training: its model, data and loop by the names of classes and functions, as nnScaler's Trainer has them.

    What raysgd adds stands at the end.

    Attributes:
        compute_config: The devices. None: one worker.
        gen_savedir: Where ``run_mode="compile"`` writes the plan.
        gen_reuse: Without effect: a plan is made in seconds, and no code is generated.
        pas_policy: How ``plan_ngpus`` workers divide a replica of the model: ``"autodist"``: as the engine's plan chooses;
            ``"dp"`` (or ``"data"``), ``"tp"``, ``"pp"``, ``"hybrid"`` (tensor and pipeline parallel); or the full name of a
            function that gets the `ComputeConfig` and returns fields of `raysgd.EngineConfig`.
        broadcast_strategy: Without effect: workers start from equal weights by themselves.
        instance_name: Without effect, but for the run's title.
        run_mode: ``"run"``, or ``"compile"``, which writes the plan, shapes and memory without training.
        tracing_from_weights: File of weights, ``.safetensors`` or torch's, that the model starts from.
        model, optimizer, dataset, dataloader, dataset_sampler, lr_scheduler: The components.
        checkpoint: When checkpoints are saved.
        log: Loggers.
        hook: Hooks, in a class or as functions by name.
        precision: One type for all tensors, or one each for ``param``, ``buffer`` and ``input``; ``"none"``: as they are.
        micro_batch_size: Rows of a forward pass.
        global_batch_size: Rows of an optimizer step. None: ``micro_batch_size`` times replicas and accumulation.
        grad_accumulation_steps: Micro-batches of a replica per optimizer step. None: 1, or what ``global_batch_size`` needs.
        max_epochs: Epochs to train.
        max_train_steps: Optimizer steps to train.
        max_val_steps: Batches of a validation.
        val_every_n_train_steps: Optimizer steps between two validations.
        val_every_n_epochs: Epochs between two validations. With every checkpoint there is one in any case.
        enable_progress_bar: Whether results are shown.
        seed: Of all generators and of the order of the data.
        init_env_fn: Full name of a function that is called first in every worker, with the loop.
        trainer: Arguments of `raysgd.Trainer`, such as ``num_workers: [2, 8]`` for elastic training, ``cpus_per_worker``,
            ``failure_config``; and ``detached``, ``ray_address``, ``backend``.
        engine: Further fields of `raysgd.EngineConfig`, such as ``activation_checkpointing`` or ``compile``.
        search: A search with Ray Tune: ``space``, ``metric``, ``mode``, ``num_samples``.
    """

    compute_config: ComputeConfig | None = None
    gen_savedir: str = "./.nnscaler"
    gen_reuse: str = "auto"
    pas_policy: str = "autodist"
    broadcast_strategy: str = "all"
    instance_name: str | None = None
    run_mode: RunMode = "run"
    tracing_from_weights: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    dataset_sampler: DatasetSamplerConfig = field(default_factory=DatasetSamplerConfig)
    lr_scheduler: LRSchedulerConfig | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: list[LogConfig] = field(default_factory=list)
    hook: HookConfig | HookMapConfig | None = None
    precision: str | Mapping[str, str] | None = None
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    grad_accumulation_steps: int | None = None
    max_epochs: int | None = None
    max_train_steps: int | None = None
    max_val_steps: int | None = None
    val_every_n_train_steps: int | None = None
    val_every_n_epochs: int | None = 1
    enable_progress_bar: bool = True
    seed: int | None = None
    init_env_fn: str | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_given("gen_savedir", "pas_policy")
        self._check_paths("gen_savedir", "tracing_from_weights")
        self._check_full_names("init_env_fn")
        self._check("gen_reuse", check_choice, GEN_REUSE)
        self._check("broadcast_strategy", check_choice, BROADCAST)
        if "." not in self.pas_policy:
            self._check("pas_policy", check_choice, POLICIES)
        for name in ("model", "optimizer", "dataset"):
            if getattr(self, name).type is None:
                raise FieldError(
                    (name,), f"{name} has no type; give the full name of a class or function, such as my.{name}."
                )
        if self.max_epochs is None and self.max_train_steps is None:
            raise FieldError(("max_epochs",), _NO_END)
        self._check_precision()
        self.accumulation()

    @property
    def compute(self) -> ComputeConfig:
        """The devices; one worker if none are given."""
        return ComputeConfig(use_end2end=True) if self.compute_config is None else self.compute_config

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

    def _check_precision(self) -> None:
        if self.precision is None:
            return
        if not isinstance(self.precision, (str, Mapping)):
            raise FieldError(
                ("precision",), f"precision={self.precision!r} is not a mapping of argument names to values."
            )
        kinds = {"precision": self.precision} if isinstance(self.precision, str) else self.precision
        allowed = get_args(TensorPrecision)
        for name, value in kinds.items():
            try:
                if not isinstance(self.precision, str):
                    check_choice("precision", name, get_args(TensorType))
                check_choice(name, value, allowed)
            except ConfigError as error:
                path = ("precision",) if isinstance(self.precision, str) else ("precision", str(name))
                raise FieldError(path, str(error)) from None
        inputs, parameters = self.precision_of("input"), self.precision_of("param")
        if inputs in ("fp16", "bf16") and parameters not in (inputs, "fp16"):
            raise FieldError(
                ("precision",),
                f"precision: inputs in {inputs} do not go with parameters in {parameters or 'fp32'}; give param: {inputs} "
                "too, or leave out input.",
            )


_NO_END = "neither max_epochs nor max_train_steps is given, so the training would not end; give one of them."
