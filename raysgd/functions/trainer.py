"""`Trainer`: training by functions. Driver side; it imports no JAX by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from raysgd._util.imports import import_optional
from raysgd._util.logs import get_logger
from raysgd._util.tracebacks import leaves_raysgd
from raysgd.callbacks.base import Callback
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.links import best_by
from raysgd.config.argument_names import refuse_unknown
from raysgd.config.checks import check_bool, check_count
from raysgd.errors import ConfigError, UsageError
from raysgd.functions.deployer import Deployer, absolute
from raysgd.functions.examples import check_callable, check_examples
from raysgd.functions.fit_result import FitResult
from raysgd.functions.kept_checkpoints import KeptCheckpoints, earlier_checkpoints
from raysgd.functions.left_out import PLACED_IN_WORKERS, log_unused, no_attribute
from raysgd.functions.predictor import Predictor, check_deployer, check_evaluation, find_saved
from raysgd.functions.runs import TrainingByEpochs
from raysgd.functions.settings import FitSettings, TaskSettings
from raysgd.functions.tasks import EvalLossTask, ExportTask, FitTask
from raysgd.workers.pickling import dumps, dumps_named

_TRAINER_HINTS = {"lr": "give it to the optimizer"}
_FIT_HINTS = {
    "batch_size": "use per_device_batch_size=",
    "epochs": "use n_epochs=",
    "dataset": "use train_examples=",
}


class Trainer:
    """Trains a model on all devices of a `Deployer`.

    Args:
        deployer: The devices.
        collate_fn: ``collate_fn(examples)`` gets a list of examples as they were given, and returns a tree of arrays with one
            row for each.
        apply_fn: Becomes ``state.apply_fn``.
        loss_fn: ``loss_fn(train_rng, state, params, batch, is_training)`` returns a scalar, the mean over the rows of its
            batch, or ``(loss_sum, weight)``, where the weight counts what the loss is a mean of, such as tokens; or the same
            for each row, as arrays. Then a short last batch is padded, and not compiled for itself.
        params: The tree of parameters, made with JAX or NumPy. It is sent to the workers as NumPy arrays. Or a module of nnx,
            which functions then get in its place.
        optimizer: A transformation of optax, or an `nnx.Optimizer`, of which ``tx`` and ``wrt`` are used. With an
            `optax.MultiSteps`, each batch is a step, and an update takes several steps.
        opt_state: The state of the optimizer to begin with, as `Deployer.load_ckpt` returns it.
        params_sharded: Ignored with a message: arrays are placed in the workers.
        opt_state_sharded: Ignored, as ``params_sharded``.
        compute_dtype: The type that parameters are converted to for ``loss_fn``, such as ``"bfloat16"``. Parameters, updates and
            checkpoints keep their own. None: float32, or float64 for parameters of this type.
        last_ckpt_info: The information that `Deployer.load_ckpt` returns. The training begins after its epoch, with its step
            and random key, and the first fit ends after ``n_epochs`` epochs in all.
        lr_schedule_fn: The schedule that the optimizer was made with, from the number of updates to the learning rate. It is
            used for the metric ``learning_rate`` alone.
        accumulate_grad_batches: The number of batches that an update takes, one after the other: it has so many times the rows.
            With an `optax.MultiSteps`, which accumulates by itself, it is the number that MultiSteps was given.
        params_sharding_rules: The result of `Deployer.get_sharding_rules`, or own rules ``(regular expression,
            PartitionSpec)``, which are searched in the paths of parameters. Parameters without a rule are sharded by the
            names of layers. A dict has rules for the parameters below each of its keys.
        train_step_fn: An own step in place of loss, gradient and update: ``train_step_fn(rng, state, batch, loss_fn,
            lr_schedule_fn, mesh, compute_dtype)`` is called by these names, with the whole batch of all devices, and returns
            ``(state.apply_gradients(grads=grads), {"loss": loss})``; the dict may have more scalars. XLA splits its work, so it
            needs no collectives: ``mesh`` is None, and a reduction over redco's axis ``"dp"`` changes nothing.

    Raises:
        ConfigError: An argument cannot work.
        ImportError: JAX or optax is not installed.
    """

    @leaves_raysgd
    @refuse_unknown("Trainer", _TRAINER_HINTS)
    def __init__(
        self,
        deployer: Deployer,
        collate_fn: Callable[[list[Any]], Any],
        apply_fn: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        params: Any = None,
        optimizer: Any = None,
        opt_state: Any = None,
        params_sharded: bool = False,
        opt_state_sharded: bool = False,
        compute_dtype: Any = None,
        last_ckpt_info: Mapping[str, Any] | None = None,
        lr_schedule_fn: Callable[[Any], Any] | None = None,
        accumulate_grad_batches: int | None = None,
        params_sharding_rules: Any = None,
        train_step_fn: Callable[..., Any] | None = None,
    ) -> None:
        self.deployer = check_deployer(deployer)
        if accumulate_grad_batches is not None:
            check_count("accumulate_grad_batches", accumulate_grad_batches, minimum=1)
        import_optional("jax", "functions")
        import_optional("optax", "functions")
        from raysgd.functions.checkpoints import check_info
        from raysgd.functions.sharding import own_rules
        from raysgd.functions.trees import float_name

        self._given_accumulate = accumulate_grad_batches
        self._compute_dtype = None if compute_dtype is None else float_name("compute_dtype", compute_dtype)
        self._parts: dict[str, Any] = {
            "collate_fn": check_callable("collate_fn", collate_fn, "collate_fn(examples)"),
            "loss_fn": check_callable("loss_fn", loss_fn, "loss_fn(train_rng, state, params, batch, is_training)"),
            "train_step_fn": check_callable(
                "train_step_fn", train_step_fn, "train_step_fn(rng, state, batch, loss_fn, ...)", may_be_none=True
            ),
            "lr_schedule_fn": check_callable(
                "lr_schedule_fn", lr_schedule_fn, "lr_schedule_fn(step)", may_be_none=True
            ),
            "rules": own_rules(params_sharding_rules),
        }
        step, epoch, rng = check_info(last_ckpt_info or {})
        self._first_epoch = epoch + 1
        self._counts_epochs_in_all = last_ckpt_info is not None
        self.set_train_state(apply_fn, optimizer, step, params, opt_state, params_sharded, opt_state_sharded)
        if rng is not None:
            self._newest[1]["train_state"] |= {"step": step, "rng": rng}

    # ---------------------------------------------------------------------------------------------------- parameters

    def set_params(self, params: Any) -> None:
        """Train from these parameters on, with a new state of the optimizer and at step 0.

        Raises:
            ConfigError: A leaf is not an array of floating-point numbers, or a sharding rule does not fit.
        """
        from raysgd.functions.models import Model
        from raysgd.functions.sharding import plan_sharding

        model = Model.of(params, self._wrt)
        self._like = like = model.shapes()
        # Its errors, before workers start.
        plan_sharding(like.params, self.deployer.axis_sizes, self._parts["rules"], like.declared)
        self._newest = None, {"train_state": model.as_state()}
        self._step = 0

    @property
    def _newest(self) -> tuple[str | None, Any]:
        """The newest state: the path of a checkpoint, or nested dicts of NumPy arrays."""
        self.deployer.runs.end_epochs()  # the workers may have a newer one
        return self._held

    @_newest.setter
    def _newest(self, state: tuple[str | None, Any]) -> None:
        self.deployer.runs.end_epochs()
        self._held = state

    def set_train_state(
        self,
        apply_fn: Any,
        optimizer: Any,
        step: int,
        params: Any,
        opt_state: Any = None,
        params_sharded: bool = False,
        opt_state_sharded: bool = False,
    ) -> None:
        """Train from this state on.

        Args:
            apply_fn: As for `Trainer`, like the other arguments.
            optimizer: The optimizer from now on.
            step: The number of steps done.
            params: The parameters.
            opt_state: The state of the optimizer. None: a new one, whose schedules continue at ``step``.
            params_sharded: Ignored with a message.
            opt_state_sharded: Ignored with a message.

        Raises:
            ConfigError: An argument cannot work.
        """
        from raysgd.functions.trees import as_nested_dict, as_numbers
        from raysgd.functions.worker.train_state import accumulates, with_kind_of_dicts

        self._wrt = getattr(optimizer, "wrt", None)
        if self._wrt is not None:  # an nnx.Optimizer
            if num_steps := int(optimizer.step.get_value()):
                raise ConfigError(
                    f"optimizer is an nnx.Optimizer that has made {num_steps} steps, and its state is not taken over: give a new "
                    "one."
                )
            optimizer = optimizer.tx
        if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
            raise ConfigError(
                f"optimizer={optimizer!r:.80} is not an optimizer of optax: give one such as optax.adam(1e-3)."
            )
        log_unused(PLACED_IN_WORKERS, params_sharded=params_sharded, opt_state_sharded=opt_state_sharded)
        self.set_params(params)
        optimizer = with_kind_of_dicts(optimizer, self._like.params)
        self._parts |= {"apply_fn": apply_fn, "optimizer": optimizer}
        number = self._given_accumulate
        #: Batches that an update takes, and steps of the optimizer for an update.
        self._accumulate, self._steps_per_update = (
            (1, number) if accumulates(optimizer, self._like.params) else (number or 1, 1)
        )
        if self._accumulate > 1 and self._parts["train_step_fn"] is not None:
            raise ConfigError(
                "accumulate_grad_batches and train_step_fn exclude each other: an own step gets the whole batch; let it "
                "compute the batch in parts, or give an optax.MultiSteps."
            )
        if self._like.is_module and self._parts["train_step_fn"] is not None:
            raise ConfigError(
                "train_step_fn gets a tree of parameters, and params is a module of nnx: give the state of "
                "nnx.split(model, nnx.Param), and let the functions merge it."
            )
        state = self._newest[1]["train_state"]
        if step or opt_state is not None:
            self._step = int(step)
            state["step"] = np.asarray(step, np.int32)
        if opt_state is not None:
            state["opt_state"] = as_nested_dict(as_numbers(opt_state))

    @property
    def state(self) -> Any:
        """The newest state: ``step``, ``params``, ``opt_state`` (None if there is none yet), ``apply_fn`` and ``tx``."""
        import jax

        from raysgd.functions.trees import from_nested_dict
        from raysgd.functions.worker.train_state import StepState

        saved, optimizer = self._load(*self._newest), self._parts["optimizer"]
        opt_state = saved.get("opt_state")
        if opt_state is not None:
            opt_state = from_nested_dict(opt_state, jax.eval_shape(optimizer.init, self._like.params))
        return StepState(
            self._step, self._like.with_arrays(saved).params, opt_state, self._parts["apply_fn"], optimizer
        )

    @property
    def step(self) -> int:
        """The number of steps so far."""
        return self._step

    @property
    def mesh(self) -> Any:
        """The axes of the deployer's mesh."""
        return self.deployer.mesh

    @property
    def workdir(self) -> str | None:
        """The working directory of the deployer."""
        return self.deployer.workdir

    def get_params_to_save(self, state_params: Any = None) -> Any:
        """Return the given parameters, or else the newest ones, as `Deployer.save_ckpt` takes them."""
        return self.params if state_params is None else state_params

    if not TYPE_CHECKING:  # else type checkers would find any attribute

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    @property
    def params(self) -> Any:
        """The newest parameters, as NumPy arrays; a module of nnx if one was given."""
        return self._load_params(*self._newest)

    def _load_params(self, path: str | None, state: Any) -> Any:
        """Return the tree of parameters, or the module, of a checkpoint, or of a state."""
        return self._like.from_state(self._load(path, state), self.deployer.jax_seed)

    def _load(self, path: str | None, state: Any) -> Any:
        return (state if path is None else Checkpoint.from_path(path).load())["train_state"]

    def _newest_params(self) -> tuple[str | None, Any, Any]:
        """Return where the newest parameters are, for a `Predictor`: a path or a state, and their shapes."""
        path, state = self._newest
        if path is None:
            kept = ("params", "model_state")
            state = {"train_state": {name: each for name, each in state["train_state"].items() if name in kept}}
        return path, state, self._like

    @leaves_raysgd
    def get_default_predictor(
        self, pred_fn: Callable[..., Any], output_fn: Callable[[Any], Any] | None = None
    ) -> Predictor:
        """Return a Predictor that has this Trainer's ``collate_fn``, and its newest parameters unless others are given.

        Args:
            pred_fn: As for `Predictor`.
            output_fn: As for `Predictor`.
        """
        predictor = Predictor(self.deployer, self._parts["collate_fn"], pred_fn, output_fn, self._parts["rules"])
        return predictor._use_params_of(self._newest_params)

    @leaves_raysgd
    def export_ckpt(
        self, ckpt_dir: str | os.PathLike[str], ckpt: str | os.PathLike[str] | Checkpoint | None = None
    ) -> None:
        """Write a checkpoint for orbax, which its ``StandardCheckpointer`` restores. Each worker writes its shards.

        It is a dict of ``step``, ``params``, ``opt_state``, ``rng`` and, of a module of nnx, ``model_state``, with the structures
        of flax and optax. `Deployer.load_ckpt` reads it, too.

        Args:
            ckpt_dir: A folder that all workers reach and that does not exist yet, such as ``{folder}/{step}/default`` for a
                CheckpointManager.
            ckpt: The checkpoint of `fit` to export, or its path. None: the newest state.

        Raises:
            CheckpointError: There is something at ``ckpt_dir``.
            CheckpointNotFoundError: There is no such checkpoint.
        """
        folder = absolute(os.fspath(ckpt_dir))
        path, state = self._newest if ckpt is None else find_saved(ckpt, self._like)
        settings = TaskSettings(
            jax_seed=self.deployer.jax_seed,
            n_model_shards=self.deployer.n_model_shards,
            num_workers=self.deployer.num_workers,
            collate_per_worker=self.deployer.collate_per_worker,
            start=path,
        )
        parts = {name: self._parts[name] for name in ("rules", "optimizer")}
        task = ExportTask(dumps_named(parts, "the trainer's functions"), dumps(self._like), settings, folder)
        self.deployer.runs.run(task, {"ckpt_dir": folder}, {}, start=state)

    # ---------------------------------------------------------------------------------------------------- training

    @leaves_raysgd
    @refuse_unknown("Trainer.fit", _FIT_HINTS)
    def fit(
        self,
        train_examples: Sequence[Any] | Callable[[int], Sequence[Any]],
        per_device_batch_size: int,
        n_epochs: int,
        eval_examples: Sequence[Any] | None = None,
        eval_per_device_batch_size: int | None = None,
        eval_loss: bool = True,
        eval_predictor: Predictor | None = None,
        eval_metric_fn: Callable[[list[Any], list[Any]], Mapping[str, Any]] | None = None,
        eval_sanity_check: bool = True,
        save_ckpt_every_k_epochs: int | None = None,
        save_last_ckpt: bool = False,
        save_argmin_ckpt_by_metrics: Sequence[str] | None = None,
        save_argmax_ckpt_by_metrics: Sequence[str] | None = None,
        save_opt_states: bool = True,
        save_float_dtype: Any = None,
        *,
        save_every_ckpt: bool = False,
        save_every_n_steps: int | None = None,
        resume_from: str | os.PathLike[str] | Checkpoint | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> FitResult:
        """Train for a number of epochs, evaluate after each, and keep checkpoints.

        A second fit continues with the parameters, the optimizer's state and the epoch at which the first one ended.

        Args:
            train_examples: A list, or another sequence with a length. Each epoch has all of them once, in an order of its own
                that does not depend on the number of workers; the last batch has those that are left. Or a function
                ``train_examples(epoch_idx)`` that returns them: every worker calls it when an epoch begins, or is resumed, and
                all must get the same.
            per_device_batch_size: Rows of a batch for each replica of the model. All replicas together take a batch, and an
                update takes ``accumulate_grad_batches`` of them.
            n_epochs: The number of epochs.
            eval_examples: The examples that are evaluated after each epoch.
            eval_per_device_batch_size: Rows of a batch in the evaluation. None: ``per_device_batch_size``.
            eval_loss: Whether the loss is evaluated, with ``is_training=False``.
            eval_predictor: Predicts ``eval_examples``.
            eval_metric_fn: ``eval_metric_fn(examples, preds)`` returns a dict of metrics. It is called on rank 0.
            eval_sanity_check: Whether to evaluate one batch before the first step, to find mistakes. It does not change the
                training.
            save_ckpt_every_k_epochs: Keep the checkpoint of every so many epochs, and the newest. The others are deleted when fit
                ends.
            save_last_ckpt: Keep the newest checkpoint.
            save_argmin_ckpt_by_metrics: Keep the best checkpoint by each of these metrics, whose lowest value is best:
                ``loss`` of the evaluation, what ``eval_metric_fn`` returns, or ``train_loss``.
            save_argmax_ckpt_by_metrics: The same for metrics whose highest value is best.
            save_opt_states: Whether checkpoints have the state of the optimizer. Without it, a training that resumes, also after
                a failure, starts with a new one; the step and the schedule continue.
            save_float_dtype: The type of parameters in checkpoints, such as ``"bfloat16"``. They are converted when loaded.
            save_every_ckpt: Keep the checkpoint of each epoch.
            save_every_n_steps: Save in addition after every so many steps, to lose less after a failure.
            resume_from: Continue the training that this checkpoint is of, with any number of workers and shards, up to
                ``n_epochs`` epochs in all. As for `raysgd.Trainer.run`; ``"last"`` and ``"best"`` are looked for in ``workdir``.
            callbacks: Further callbacks of the run.

        Returns:
            The metrics, the checkpoints and the parameters.

        Raises:
            ConfigError: An argument cannot work, or a function returned something wrong.
            CheckpointNotFoundError: There is no checkpoint to resume from.
            Exception: What one of the functions raised.
        """
        given: Any = train_examples
        is_function = callable(given) and not hasattr(given, "__len__")
        dataset = {} if is_function else {"train": check_examples("train_examples", given)}
        if eval_examples is not None:
            is_same = eval_examples is train_examples and not is_function
            dataset["eval"] = dataset["train"] if is_same else check_examples("eval_examples", eval_examples)
        predictor = check_evaluation(eval_examples, eval_predictor, eval_metric_fn)
        check_count("n_epochs", n_epochs, minimum=1)
        check_count("per_device_batch_size", per_device_batch_size, minimum=1)
        kept = KeptCheckpoints.of(
            save_every_ckpt,
            save_last_ckpt,
            save_argmin_ckpt_by_metrics,
            save_argmax_ckpt_by_metrics,
            save_ckpt_every_k_epochs,
        )
        kept.check(has_eval=eval_examples is not None)
        if save_float_dtype is not None:
            from raysgd.functions.trees import float_name

            save_float_dtype = float_name("save_float_dtype", save_float_dtype)
        if save_every_n_steps is not None:
            check_count("save_every_n_steps", save_every_n_steps, minimum=1)
        if not save_opt_states:
            get_logger().info(
                "save_opt_states=False: after a failure, or with resume_from, the optimizer starts with a new state."
            )
        config = kept.config(self.deployer.checkpoint_config)
        found_start = self.deployer.find_checkpoint(resume_from, best_by(config))
        resumed = found_start.checkpoint
        _, state = self._newest
        first_epoch = 0 if resumed is not None else self._first_epoch
        counted_from = 0 if self._counts_epochs_in_all else first_epoch
        settings = self._settings(
            per_device_batch_size,
            eval_per_device_batch_size=check_count(
                "eval_per_device_batch_size",
                per_device_batch_size if eval_per_device_batch_size is None else eval_per_device_batch_size,
                minimum=1,
            ),
            first_epoch=first_epoch,
            last_epoch=counted_from + n_epochs,
            has_eval=eval_examples is not None,
            eval_loss=check_bool("eval_loss", eval_loss),
            eval_sanity_check=check_bool("eval_sanity_check", eval_sanity_check),
            save_every_n_steps=save_every_n_steps,
            save_opt_states=check_bool("save_opt_states", save_opt_states),
            save_float_dtype=save_float_dtype,
            argmin=kept.argmin,
            argmax=kept.argmax,
            folder=self.deployer.evaluations_folder,
        )
        parts = self._parts_with(
            predictor=predictor, eval_metric_fn=eval_metric_fn, train_examples=train_examples if is_function else None
        )
        shown = {
            "n_epochs": n_epochs,
            "per_device_batch_size": per_device_batch_size,
            **({} if is_function else {"num_train_examples": len(given)}),
            "n_model_shards": self.deployer.n_model_shards,
            "accumulate_grad_batches": self._given_accumulate or 1,
        }
        runs = self.deployer.runs
        found = runs.run(
            FitTask(dumps_named(parts, "the trainer's functions"), dumps(self._like), settings),
            shown,
            dataset,
            start=state if resumed is None else found_start,
            callbacks=callbacks,
            checkpoint_config=config,
        )
        return self._finish(found, kept, resumed)

    @leaves_raysgd
    def train(self, examples: Sequence[Any], per_device_batch_size: int, desc: str | None = None) -> FitResult:
        """Train for one epoch, in a loop of one's own. The same as ``fit`` with ``n_epochs=1``.

        From the second call in a row on, the workers keep the state and wait for the next call, so that a call costs some
        milliseconds. Anything else that needs the state or the workers, such as `params` or `fit`, ends that.

        Args:
            examples: As for `fit`.
            per_device_batch_size: As for `fit`.
            desc: Is logged.

        Raises:
            ConfigError: An argument cannot work.
            Exception: What one of the functions raised.
        """
        if desc is not None:
            self.deployer.log_info(desc, title="Training")
        runs, of = self.deployer.runs, (self, per_device_batch_size)
        live = runs.find_epochs(of, lambda: self._begin_epochs(of))
        if live is None:
            epochs = self._first_epoch + 1 if self._counts_epochs_in_all else 1
            result = self.fit(examples, per_device_batch_size, epochs)
            runs.trained = of
            return result
        try:
            metrics, compilations = live.train(check_examples("train_examples", examples).examples)
        except BaseException as error:
            runs.drop_epochs(error)
            self._recover(live)
            raise
        self._first_epoch, self._step = live.epoch, metrics["step"]
        counts = {"train": compilations, "eval_loss": 0, "predict": 0}
        load_params = partial(self._params_after, self._step)
        return FitResult(metrics, [metrics], self._step, counts, {}, runs.trainer.run_dir, load_params)

    def _params_after(self, step: int) -> Any:
        if step != self._step:
            raise UsageError(
                f"the parameters after step {step} were not kept, because the trainer has trained on since: ask for params "
                "before the next call of train()."
            )
        return self.params

    def _recover(self, live: TrainingByEpochs) -> None:
        """Continue with the newest state that a run for calls of train() has saved; it saves when it fails, if it can."""
        saved, (self._first_epoch, self._step) = live.find_saved(self.deployer.runs.trainer.list_checkpoints())
        if saved is not None:
            self._held = None, saved
        get_logger().warning("train() failed: the trainer continues with the state after step %d.", self._step)

    def _begin_epochs(self, of: tuple[Trainer, int]) -> TrainingByEpochs:
        """Begin a run for calls of train()."""
        kept = KeptCheckpoints.of(False, False, (), (), None)
        state = self._newest[1]
        settings = self._settings(of[1], has_eval=False, takes_epochs=True)
        parts = dumps_named(self._parts_with(), "the trainer's functions")
        shown = {"per_device_batch_size": of[1], "n_model_shards": self.deployer.n_model_shards}
        stream = self.deployer.runs.begin_epochs(
            FitTask(parts, dumps(self._like), settings),
            shown,
            start=state,
            checkpoint_config=kept.config(self.deployer.checkpoint_config),
        )
        return TrainingByEpochs(
            stream, of, (self._first_epoch, self._step), lambda found: self._finish(found, kept, None)
        )

    @leaves_raysgd
    def eval_loss(self, examples: Sequence[Any], per_device_batch_size: int, desc: str | None = None) -> float:
        """Return the loss of the newest parameters over all examples, with ``is_training=False``.

        Args:
            examples: A list, or another sequence with a length.
            per_device_batch_size: As for `fit`.
            desc: Is logged.

        Raises:
            ConfigError: An argument cannot work.
            Exception: What one of the functions raised.
        """
        data = check_examples("examples", examples)
        if desc is not None:
            self.deployer.log_info(desc, title="Evaluating")
        check_count("per_device_batch_size", per_device_batch_size, minimum=1)
        parts = self._parts_with()
        task = EvalLossTask(
            dumps_named(parts, "the trainer's functions"), dumps(self._like), self._settings(per_device_batch_size)
        )
        shown = {"num_examples": len(examples), "per_device_batch_size": per_device_batch_size}
        loss: float = self.deployer.runs.run(task, shown, {"train": data, "eval": data}, start=self._newest[1])
        return loss

    def _parts_with(self, **given: Any) -> dict[str, Any]:
        return {**self._parts, "predictor": None, "eval_metric_fn": None, "train_examples": None, **given}

    def _settings(self, per_device_batch_size: int, **given: Any) -> FitSettings:
        """Return the settings of a run; those that are not given are of one that only evaluates the loss."""
        settings: dict[str, Any] = {
            "eval_per_device_batch_size": per_device_batch_size,
            "first_epoch": self._first_epoch,
            "last_epoch": self._first_epoch,
            "has_eval": True,
            "eval_loss": True,
            "eval_sanity_check": False,
            "save_every_n_steps": None,
            "save_opt_states": True,
            "save_float_dtype": None,
            "argmin": (),
            "argmax": (),
            "folder": None,
            **given,
        }
        return FitSettings(
            jax_seed=self.deployer.jax_seed,
            n_model_shards=self.deployer.n_model_shards,
            num_workers=self.deployer.num_workers,
            collate_per_worker=self.deployer.collate_per_worker,
            start=self._newest[0],
            per_device_batch_size=per_device_batch_size,
            accumulate_grad_batches=self._accumulate,
            steps_per_update=self._steps_per_update,
            compute_dtype=self._compute_dtype,
            **settings,
        )

    def _finish(self, found: Mapping[str, Any], kept: KeptCheckpoints, resumed: Checkpoint | None) -> FitResult:
        runs = self.deployer.runs
        history = list(found["history"])
        saved = runs.trainer.list_checkpoints()
        earlier = [] if resumed is None else earlier_checkpoints(resumed, history)
        if not saved and resumed is not None:  # the training was finished already
            self._newest = resumed.path, None
        checkpoints = kept.name([*earlier, *saved])
        named = set(checkpoints.values())
        if saved:
            self._newest = saved[-1].path, None
            if saved[-1] not in named:  # nobody asked for it
                self._newest = None, {"train_state": saved[-1].load()["train_state"]}
        for each in saved if kept.every else saved[-1:]:
            if each not in named:
                runs.delete_checkpoint(each)
        self._counts_epochs_in_all = False
        self._first_epoch = int(found["epoch"])
        self._step = int(found["num_steps"])
        metrics = dict(history[-1]) if history else {}
        counts = found["num_steps"], dict(found["num_compilations"])
        load_params = partial(self._load_params, *self._newest)
        return FitResult(metrics, history, *counts, checkpoints, runs.trainer.run_dir, load_params)
