"""The compiled steps: training, loss of evaluation, prediction. They run in the worker.

A step computes with whole batches; the shardings of its inputs make XLA split the work. So losses and updates do not depend
on the number of devices: a mean over rows is a mean over all rows of the batch.

- Parameters are sharded as a `ShardingPlan` says; batches by rows along the data axis.
- The state of the optimizer is sharded as its parameters, and in addition along the data axis if it is large (ZeRO-1).
- The random key is part of the state. Random numbers do not depend on the mesh either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from raysgd._util.text import with_article
from raysgd.backends.jax import held_with_devices
from raysgd.config.checks import check_count
from raysgd.errors import ConfigError
from raysgd.functions.examples import call_by_name
from raysgd.functions.models import Model
from raysgd.functions.sharding import DATA_AXIS, MODEL_AXIS, ShardingPlan, plan_sharding
from raysgd.functions.stored_arrays import StoredArray
from raysgd.functions.worker.losses import Loss, as_loss, sum_of_losses
from raysgd.functions.worker.random_rows import key_of_rows
from raysgd.functions.worker.row_convolutions import CompiledStep
from raysgd.functions.worker.train_state import (
    StepState,
    TrainState,
    hyperparameters_of,
    is_kept,
    key_like,
    params_like,
    restore_arrays,
    set_hyperparameters,
    set_schedule_step,
    state_like,
    with_plain_keys,
    zero_shardings,
)
from raysgd.jax.meshes import mesh as make_mesh
from raysgd.jax.restoring import restore

LossFn: TypeAlias = "Callable[..., Any]"
PredFn: TypeAlias = "Callable[..., Any]"
Schedule: TypeAlias = "Callable[[Any], Any]"
#: Steps that a worker holds for later runs: those of some trainers and predictors.
_MAX_HELD = 16


def mesh_of(n_model_shards: int) -> Mesh:
    """Make the mesh over all devices: axes data and model, the model's shards on neighbouring devices.

    Raises:
        ConfigError: There are more shards than devices, or the devices are not a multiple of the shards.
    """
    num_devices = jax.device_count()
    check_count("n_model_shards", n_model_shards, minimum=1)
    if num_devices % n_model_shards:
        why = "is more than" if n_model_shards > num_devices else "does not divide"
        possible = ", ".join(str(number) for number in range(1, num_devices + 1) if num_devices % number == 0)
        raise ConfigError(
            f"n_model_shards={n_model_shards} {why} the {num_devices} devices of all workers: give one of {possible}, or "
            "change num_workers."
        )
    return make_mesh((DATA_AXIS, -1), (MODEL_AXIS, n_model_shards))


def find_steps(plan: ShardingPlan, functions: Hashable, make: Callable[[], Steps]) -> Steps:
    """Return the steps that an earlier run on the same devices compiled, or else new ones.

    Args:
        plan: The plan for the parameters.
        functions: Equal for the same functions: their pickle, and what else the steps depend on.
        make: Makes new steps.
    """
    key = functions, plan.parameters, plan.structure
    held: dict[Any, Steps] = held_with_devices.setdefault("functions", {})
    steps = held.pop(key, None)
    if steps is None:
        steps = make()
    steps.num_compilations = dict.fromkeys(steps.num_compilations, 0)
    held[key] = steps  # the newest is last
    while len(held) > _MAX_HELD:
        del held[next(iter(held))]
    return steps


class Steps:
    """The steps for one model on one mesh. Each is compiled once for each shape of a batch.

    Args:
        mesh: A mesh with the axes data and model.
        plan: The plan for the parameters.
        loss_fn: ``loss_fn(train_rng, state, params, batch, is_training)``. It returns a scalar, a mean over the rows of its
            batch, or ``(loss_sum, weight)``, two scalars; or the same for each row, as arrays. None: there is no loss, only
            prediction.
        optimizer: Any transformation of optax.
        accumulate_grad_batches: The number of micro-batches that a training batch is split into.
        lr_schedule_fn: The schedule that the optimizer was made with, from the number of updates to the learning rate. It is
            used for the metric alone.
        pred_fn: ``pred_fn(pred_rng, params, batch)`` returns a tree of arrays whose first dimension is that of the batch.
        apply_fn: Becomes ``state.apply_fn``.
        compute_dtype: The type that parameters are converted to before loss_fn gets them; None: float32, or float64 if they
            have it.
        steps_per_update: How many steps the optimizer takes for one update of the parameters, more than one with
            `optax.MultiSteps`; None: that is not known.
        train_step_fn: The user's own step, in place of loss, gradient and update; see `raysgd.functions.Trainer`.
        model: The model whose parameters the plan is for; None: a tree with the structure of the plan.

    Attributes:
        num_compilations: How often each step has been compiled, by name; since `find_steps` returned these steps.
        changes_in_place: Whether a step reuses the memory of the state before it. If not, each process keeps the whole state
            until the next step is complete, and training can continue from it.
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: ShardingPlan,
        *,
        loss_fn: LossFn | None = None,
        optimizer: optax.GradientTransformation | None = None,
        accumulate_grad_batches: int | None = None,
        lr_schedule_fn: Schedule | None = None,
        pred_fn: PredFn | None = None,
        apply_fn: Any = None,
        compute_dtype: str | None = None,
        train_step_fn: Callable[..., Any] | None = None,
        steps_per_update: int | None = 1,
        model: Model | None = None,
    ) -> None:
        if dict(mesh.shape) != dict(plan.axis_sizes):
            raise ConfigError(f"The plan is for a mesh of {dict(plan.axis_sizes)}; this mesh has {dict(mesh.shape)}.")
        if accumulate_grad_batches is not None:
            check_count("accumulate_grad_batches", accumulate_grad_batches, minimum=1)
        self.num_compilations = {"train": 0, "eval_loss": 0, "predict": 0}
        self._mesh = mesh
        self._plan = plan
        self._loss_fn = loss_fn
        self._pred_fn = pred_fn
        if optimizer is not None:
            optimizer = with_plain_keys(optax.with_extra_args_support(optimizer), params_like(mesh, plan))
        self._optimizer = optimizer
        self._num_micro = accumulate_grad_batches or 1
        self._schedule = lr_schedule_fn
        self._apply_fn = apply_fn
        self._compute_dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), plan.specs)
        self._zero_params = None if optimizer is None else zero_shardings(mesh, plan, optimizer)
        self._model = model or Model(plan.specs)
        state_plan = None
        if (others := self._model.model_state) is not None:
            state_plan = plan_sharding(others, plan.axis_sizes, declared=self._model.declared, is_trained=False)
        self._others_like = None if state_plan is None else params_like(mesh, state_plan)
        self._others = jax.tree.map(lambda leaf: leaf.sharding, self._others_like)
        self._like = None if optimizer is None else state_like(mesh, plan, optimizer, apply_fn, self._others_like)
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, self._like)
        num_processes = len({device.process_index for device in mesh.devices.flat})
        self.changes_in_place = num_processes == 1 or not is_kept(self._like)
        self._own_step_fn = train_step_fn
        self._steps_per_update = steps_per_update
        self._is_loss_of_rows: dict[bool, bool] = {}
        self._placed_counts: dict[int, Any] = {}
        self._train = self._compiled(
            "train",
            self._train_step if train_step_fn is None else self._own_train_step,
            num_parts=self._num_micro,
            donate_argnums=0 if self.changes_in_place else (),
            out_shardings=(self._shardings, self._replicated),
        )
        self._eval = self._compiled("eval_loss", self._eval_step, out_shardings=self._replicated)
        self._predict = self._compiled("predict", self._pred_step, batch_at=2, out_shardings=self._replicated)
        if optimizer is not None and self._shardings is not None:
            self._init = jax.jit(
                lambda params, step: set_schedule_step(optimizer.init(params), step // (steps_per_update or 1)),
                out_shardings=self._shardings.opt_state,
            )

    def _compiled(self, name: str, function: Callable[..., Any], *, batch_at: int = 1, **settings: Any) -> CompiledStep:
        def forget() -> None:
            self.num_compilations[name] -= 1

        return CompiledStep(function, self._mesh, batch_at=batch_at, on_dropped=forget, **settings)

    # ---------------------------------------------------------------------------------------------------- placing

    @property
    def state_like(self) -> TrainState:
        """The tree of the state with a `jax.ShapeDtypeStruct` and its sharding for each array: for `raysgd.jax.restore`."""
        if self._like is None:
            raise ConfigError("There is no training state without an optimizer: give Steps(optimizer=...).")
        return self._like

    def place_params(self, params: Any) -> Any:
        """Place parameters on the mesh. Each process reads what its devices need of its own, whole arrays."""
        return jax.tree.map(_placed, params, self._params)

    def make_state(self, params: Any, rng: Any, model_state: Any = None) -> TrainState:
        """Make the state at the beginning of a training.

        Args:
            params: The tree of parameters, whole arrays.
            rng: A key of `jax.random.PRNGKey` or `jax.random.key`, or a seed.
            model_state: The variables of the model that are not trained, whole arrays.
        """
        if self._optimizer is None or self._shardings is None:
            raise ConfigError("There is no training state without an optimizer: give Steps(optimizer=...).")
        # Donated to the first step, so arrays of the caller must not be shared.
        placed = self.place_params(jax.tree.map(_copied, params))
        others = jax.tree.map(_placed, jax.tree.map(_copied, model_state), self._others)
        step = _placed(np.zeros((), np.int32), self._replicated)
        return TrainState(step, placed, self._init(placed, step), self._placed_key(rng), others, self._apply_fn)

    @functools.cached_property
    def given_hyperparameters(self) -> dict[str, Any]:
        """The settings that the program has given to `optax.inject_hyperparams`, by their place in the state."""
        optimizer, shapes = self._optimizer, self.state_like.params
        if optimizer is None or not hyperparameters_of(self.state_like.opt_state):
            return {}

        def make() -> dict[str, Any]:
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            return hyperparameters_of(optimizer.init(zeros))

        return {name: np.asarray(value) for name, value in jax.jit(make)().items()}

    def restore_state(self, saved: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> TrainState:
        """Make the state that `TrainState.state_dict` was saved from, on this mesh. Floating-point numbers are converted.

        Without ``opt_state`` the optimizer starts with a new state; its schedules continue at the saved step.

        Args:
            saved: What `TrainState.state_dict` returned.
            given: `given_hyperparameters` of the program that saved it. Those that this program gives differently count.
        """
        like = self.state_like
        wanted = {"step": like.step, "params": like.params, "rng": like.rng}
        if "opt_state" in saved:
            wanted["opt_state"] = like.opt_state
        if like.model_state is not None:
            wanted["model_state"] = like.model_state
        found = restore_arrays({name: saved.get(name, {}) for name in wanted}, wanted)
        opt_state = found.get("opt_state")
        if "opt_state" not in wanted:
            if self._steps_per_update is None and int(found["step"]):
                raise ConfigError(
                    "the checkpoint has no state of the optimizer, an optax.MultiSteps, so its schedule cannot continue: give "
                    "Trainer(accumulate_grad_batches=k) with the k of MultiSteps(every_k_schedule=k)."
                )
            opt_state = self._init(found["params"], found["step"])
        elif given is not None:
            changed = {
                name: value
                for name, value in self.given_hyperparameters.items()
                if not np.array_equal(value, given.get(name, value))
            }
            own = hyperparameters_of(like.opt_state)
            opt_state = set_hyperparameters(
                opt_state, {name: _placed(value, own[name].sharding) for name, value in changed.items()}
            )
        others = found.get("model_state")
        return TrainState(found["step"], found["params"], opt_state, found["rng"], others, self._apply_fn)

    def load_state(self, saved: Mapping[str, Any], seed: int, given: Mapping[str, Any] | None = None) -> TrainState:
        """Make the state of a ``train_state``: one that was saved, or parameters alone, with which a training begins.

        Args:
            saved: The ``train_state``.
            seed: Of a random key, if it has none.
            given: As for `restore_state`.
        """
        if "step" in saved:
            return self.restore_state({"rng": np.asarray(jax.random.PRNGKey(seed)), **saved}, given)
        model = self._model.with_arrays(saved)
        return self.make_state(model.params, seed, model.model_state)

    def restore_params(self, saved: Mapping[str, Any]) -> tuple[Any, Any]:
        """Place the parameters and the ``model_state`` of a saved state; each process reads what its devices need."""
        params = restore_arrays(saved["params"], params_like(self._mesh, self._plan))
        others = self._others_like
        return params, None if others is None else restore_arrays(saved.get("model_state", {}), others)

    def local_rows(self, num_rows: int) -> slice:
        """Return which rows of a batch the devices of this process need: those that this process must collate.

        If the rows do not divide by the size of the data axis, as in a tail, all devices compute all rows.
        """
        indices: Any = self._batch_sharding(num_rows).addressable_devices_indices_map((num_rows,))
        bounds = [rows.indices(num_rows) for (rows,) in indices.values()]
        return slice(min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds))

    def place_batch(self, batch: Any, num_rows: int | None = None, rows: slice | None = None) -> Any:
        """Place a batch on the mesh, its rows along the data axis.

        Args:
            batch: A tree of arrays.
            num_rows: The number of rows of the whole batch. None: that of the arrays.
            rows: The rows that the arrays have: all, or those of `local_rows`. None: all.

        Raises:
            ConfigError: The arrays have different numbers of rows, or none, or hold no numbers, or are not the rows of this
                process.
        """
        for keys, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            if (dtype := np.asarray(leaf).dtype).kind in "OSUMmV" and not jnp.issubdtype(dtype, jnp.floating):
                name = jax.tree_util.keystr(keys) or with_article(type(leaf).__name__)
                raise ConfigError(f"collate_fn returned {name} of dtype {dtype}: return arrays of numbers or booleans.")
        given = num_rows_of(batch)
        num_rows = num_rows or given
        rows = rows or slice(0, num_rows)
        if given != rows.stop - rows.start:
            raise ConfigError(
                f"collate_fn returned {given} rows for {rows.stop - rows.start} examples. Return one row for each example."
            )
        sharding = self._batch_sharding(num_rows)
        return jax.tree.map(lambda array: _placed(array, sharding, num_rows, rows.start), batch)

    # ---------------------------------------------------------------------------------------------------- steps

    def train(self, state: TrainState, batch: Any, num_counted: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """Apply one update.

        Args:
            state: The state. It must not be used afterwards if the steps `changes_in_place`.
            batch: A tree of arrays from `place_batch`.
            num_counted: How many rows count, the first ones; the others are padding. None: all.

        Returns:
            The new state, and the metrics as scalars: ``loss`` before the update, ``weight`` (the number of rows, or the sum of
            the weights), ``grad_norm``, ``step`` (the number of updates with this one) and, if there is a schedule,
            ``learning_rate``, the one of this update.

        Raises:
            ConfigError: loss_fn returned something else than a scalar or a pair of scalars.
        """
        return self._train(state, batch, self._placed_count(batch, num_counted))  # type: ignore[no-any-return]

    def eval_loss(self, state: TrainState, batch: Any, num_counted: int | None = None) -> tuple[Any, Any]:
        """Return the sum of the loss over a batch, and its weight: rows, or what loss_fn returned. Their ratio is the loss."""
        return self._eval(state, batch, self._placed_count(batch, num_counted))  # type: ignore[no-any-return]

    def is_loss_of_rows(self, batch: Any, *, is_training: bool) -> bool:
        """Return whether loss_fn returns a loss for each row, so that a batch can be padded. No device computes.

        Rows of padding would change the statistics of a module's batch norm.
        """
        if is_training and (self._own_step_fn is not None or self._others_like is not None):
            return False
        if is_training not in self._is_loss_of_rows:
            key, given = key_like(self._mesh), (self.state_like, self._batch_like(batch))
            returned = jax.eval_shape(
                lambda key, state, batch: self._call_loss(
                    key, state, state.params, state.model_state, batch, is_training=is_training
                )[0],
                key,
                *given,
            )
            self._is_loss_of_rows[is_training] = jax.tree.leaves(returned)[0].shape != ()
        return self._is_loss_of_rows[is_training]

    def _placed_count(self, batch: Any, num_counted: int | None) -> Any:
        number = num_rows_of(batch) if num_counted is None else num_counted
        if number not in self._placed_counts:
            self._placed_counts[number] = _placed(np.int32(number), self._replicated)
        return self._placed_counts[number]

    def predict(self, rng: Any, params: Any, batch: Any, model_state: Any = None) -> Any:
        """Return what pred_fn returns, replicated, so that every process can read all rows."""
        return self._predict(self._placed_key(rng), params, batch, model_state)

    def lower_train(self, batch: Any) -> Any:
        """Lower the training step for batches like this one, from shapes alone: ``.compile().as_text()`` is its HLO."""
        return self._train.lower(self.state_like, self._batch_like(batch), self.state_like.step)

    def lower_predict(self, batch: Any) -> Any:
        """Lower the prediction step for batches like this one, from shapes alone."""
        key = key_like(self._mesh)
        return self._predict.lower(key, params_like(self._mesh, self._plan), self._batch_like(batch), self._others_like)

    def _train_step(self, state: TrainState, batch: Any, num_counted: Any) -> tuple[TrainState, dict[str, Any]]:
        self.num_compilations["train"] += 1
        assert self._optimizer is not None and self._shardings is not None
        next_rng, train_rng = jax.random.split(state.rng)

        def loss_of(params: Any, model_state: Any, rng: Any, micro_batch: Any) -> tuple[Loss, Any]:
            return self._loss(rng, state, params, model_state, *micro_batch, is_training=True)

        counts = jnp.arange(num_rows_of(batch)) < num_counted
        batches = self._split((batch, counts))
        loss, grads, others = sum_of_losses(loss_of, state.params, state.model_state, train_rng, batches)
        scale = jnp.where(loss.weight == 0, 0, 1 / loss.weight)  # a batch in which nothing counts changes nothing
        grads = jax.tree.map(lambda grad, param: (grad * scale).astype(param.dtype), grads, state.params)
        grad_norm = optax.tree.norm(jax.tree.map(lambda grad: grad.astype(jnp.float32), grads))
        grads = self._constrain(grads, self._zero_params)
        params_shard = self._constrain(state.params, self._zero_params)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, params_shard, value=loss.total * scale)
        params = self._constrain(optax.apply_updates(params_shard, updates), self._params)
        opt_state = self._constrain(opt_state, self._shardings.opt_state)
        metrics = {"loss": loss.total * scale, "weight": loss.weight, "grad_norm": grad_norm, "step": state.step + 1}
        if self._schedule is not None:
            metrics["learning_rate"] = jnp.asarray(
                self._schedule(state.step // (self._steps_per_update or 1)), jnp.float32
            )
        others = self._constrain(others, self._others)
        return TrainState(state.step + 1, params, opt_state, next_rng, others, state.apply_fn), metrics

    def _own_train_step(self, state: TrainState, batch: Any, num_counted: Any) -> tuple[TrainState, dict[str, Any]]:
        self.num_compilations["train"] += 1
        assert self._optimizer is not None and self._own_step_fn is not None and self._shardings is not None
        next_rng, train_rng = jax.random.split(state.rng)
        given = StepState(state.step, state.params, state.opt_state, state.apply_fn, self._optimizer)
        step_fn = functools.partial(
            self._own_step_fn,
            loss_fn=self._loss_fn,
            lr_schedule_fn=self._schedule,
            mesh=None,
            compute_dtype=self._compute_dtype or jnp.dtype(jnp.float32),
        )

        def call(rng: Any, state: StepState, batch: Any) -> Any:
            return _check_step(step_fn(rng=rng, state=state, batch=batch), state)

        # A step for redco reduces over the axis "dp". Here it has the whole batch, so that the axis has one place.
        alone = jax.vmap(call, in_axes=None, out_axes=None, axis_name="dp", axis_size=1)
        new, metrics = alone(train_rng, given, batch)
        metrics = {**metrics, "weight": jnp.float32(num_rows_of(batch)), "step": state.step + 1}
        params, opt_state = (
            jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), *pair)
            for pair in ((new.params, state.params), (new.opt_state, state.opt_state))
        )
        params = self._constrain(params, self._params)
        opt_state = self._constrain(opt_state, self._shardings.opt_state)
        return TrainState(state.step + 1, params, opt_state, next_rng, state.model_state, state.apply_fn), metrics

    def _eval_step(self, state: TrainState, batch: Any, num_counted: Any) -> tuple[Any, Any]:
        self.num_compilations["eval_loss"] += 1
        rows = num_rows_of(batch)
        key = key_of_rows(state.rng, 0, stride=1, num_rows=rows, num_all=rows)
        counts = jnp.arange(rows) < num_counted
        loss, _ = self._loss(key, state, state.params, state.model_state, batch, counts, is_training=False)
        return loss.total, loss.weight

    def _pred_step(self, rng: Any, params: Any, batch: Any, model_state: Any) -> Any:
        self.num_compilations["predict"] += 1
        if self._pred_fn is None:
            raise ConfigError("There is no pred_fn: give Steps(pred_fn=...).")
        model = self._model.build(self._as_used(params), model_state, rng, is_training=False)
        return call_by_name(self._pred_fn, rng=rng, **{self._name: model}, batch=batch)

    def _loss(
        self, rng: Any, state: TrainState, params: Any, model_state: Any, batch: Any, counts: Any, *, is_training: bool
    ) -> tuple[Loss, Any]:
        num_rows = num_rows_of(batch)  # loss_fn may take arrays out of the dict
        returned, model = self._call_loss(rng, state, params, model_state, batch, is_training=is_training)
        return as_loss(returned, num_rows, counts), self._model.state_of(model)

    def _call_loss(
        self, rng: Any, state: TrainState, params: Any, model_state: Any, batch: Any, *, is_training: bool
    ) -> tuple[Any, Any]:
        """Return what loss_fn returns, and the model that it was given."""
        if self._loss_fn is None:
            raise ConfigError("There is no loss_fn: give Steps(loss_fn=...).")
        computed = self._as_used(self._as_computed(params))
        model = self._model.build(computed, model_state, rng, is_training=is_training)
        given = {"rng": rng, "state": state, self._name: model, "batch": batch, "is_training": is_training}
        return call_by_name(self._loss_fn, **given), model

    @property
    def _name(self) -> str:
        """What functions may call their argument of the model."""
        return "model" if self._model.is_module else "params"

    def _as_computed(self, params: Any) -> Any:
        dtype = self._compute_dtype
        return jax.tree.map(lambda leaf: leaf.astype(dtype or jnp.promote_types(leaf.dtype, jnp.float32)), params)

    def _placed_key(self, rng: Any) -> Any:
        if isinstance(rng, (int, np.integer)):
            rng = jax.random.PRNGKey(rng)
        if isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
            rng = jax.random.key_data(rng)
        return _placed(rng, self._replicated)

    def _as_used(self, params: Any) -> Any:
        used = [NamedSharding(self._mesh, each.used_spec) for each in self._plan.parameters]
        is_same = [each.used_spec == each.spec for each in self._plan.parameters]
        leaves, structure = jax.tree.flatten(params)
        return jax.tree.unflatten(
            structure,
            [
                leaf if same else jax.lax.with_sharding_constraint(leaf, sharding)
                for leaf, sharding, same in zip(leaves, used, is_same, strict=True)
            ],
        )

    def _batch_sharding(self, num_rows: int) -> NamedSharding:
        divides = num_rows % self._mesh.shape[DATA_AXIS] == 0
        return NamedSharding(self._mesh, PartitionSpec(DATA_AXIS) if divides else PartitionSpec())

    def _batch_like(self, batch: Any) -> Any:
        sharding = self._batch_sharding(num_rows_of(batch))
        dtypes = jax.tree.map(lambda array: jax.dtypes.canonicalize_dtype(np.asarray(array).dtype), batch)
        return jax.tree.map(lambda a, dtype: jax.ShapeDtypeStruct(np.shape(a), dtype, sharding=sharding), batch, dtypes)

    def _split(self, batch: Any) -> list[Any]:
        """Split a batch into trees of micro-batches: (number, rows, ...), all of equal rows but the one of the second tree.

        A micro-batch has every n-th row, so that no row leaves its device.
        """
        rows = num_rows_of(batch)
        size = -(-rows // self._num_micro)
        number, remainder = divmod(rows, size)
        even = jax.tree.map(lambda array: _strided(array[: number * size], number), batch)
        if not remainder:
            return [even]
        return [even, jax.tree.map(lambda array: array[None, number * size :], batch)]

    def _constrain(self, tree: Any, shardings: Any) -> Any:
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def num_rows_of(batch: Any) -> int:
    """Return the number of rows of a batch: the first dimension, which all its arrays share.

    Raises:
        ConfigError: They do not share it, there is a scalar, or there is no row.
    """
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    rows = {jax.tree_util.keystr(keys): np.shape(leaf)[:1] for keys, leaf in leaves}
    if len(set(rows.values())) != 1 or next(iter(rows.values())) in ((), (0,)):
        shown = ", ".join(f"{name} of {shape[0] if shape else 'a scalar'}" for name, shape in rows.items()) or "nothing"
        raise ConfigError(
            f"collate_fn returned arrays with these numbers of rows: {shown}. Return arrays that have one row for each example."
        )
    return int(next(iter(rows.values()))[0])


def _check_step(returned: Any, given: StepState) -> tuple[StepState, dict[str, Any]]:
    """Return the state and the metrics that a train_step_fn returned.

    Raises:
        ConfigError: They are not a state like the given one, and a dict of scalars with the loss.
    """
    advice = "Return (state.apply_gradients(grads=grads), {'loss': loss})."
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise ConfigError(f"train_step_fn returned {with_article(type(returned).__name__)}, not a pair. {advice}")
    new, metrics = returned
    if not isinstance(new, StepState):
        raise ConfigError(f"train_step_fn returned {with_article(type(new).__name__)} as the state. {advice}")
    for name in ("params", "opt_state"):
        old, found = (jax.tree.map(jnp.shape, getattr(state, name)) for state in (given, new))
        if old != found:
            raise ConfigError(f"train_step_fn returned a state whose {name} have other shapes or names. {advice}")
    if not isinstance(metrics, Mapping) or "loss" not in metrics:
        shown = sorted(map(str, metrics)) if isinstance(metrics, Mapping) else with_article(type(metrics).__name__)
        raise ConfigError(f"train_step_fn returned {shown} as the metrics, without a 'loss'. {advice}")
    for name, value in metrics.items():
        if jnp.shape(value) != ():
            raise ConfigError(
                f"train_step_fn returned the metric {name!r} of shape {jnp.shape(value)}: return scalars."
            )
    return new, dict(metrics)


def _placed(value: Any, sharding: NamedSharding, num_rows: int | None = None, first_row: int = 0) -> Any:
    """Make a global array. If ``num_rows`` is given, ``value`` has rows of it from ``first_row`` on."""
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    if isinstance(value, StoredArray):
        return restore(value, like=sharding)
    array = np.asarray(value)
    array = array.astype(
        jax.dtypes.canonicalize_dtype(array.dtype), copy=False
    )  # int64 becomes int32, as in all of JAX
    shape = array.shape if num_rows is None else (num_rows, *array.shape[1:])

    def read_shard(index: Any) -> Any:
        if num_rows is not None:
            start, stop, _ = index[0].indices(num_rows)
            index = (slice(start - first_row, stop - first_row), *index[1:])
        return array[index]

    return jax.make_array_from_callback(shape, sharding, read_shard, dtype=array.dtype)


def _copied(array: Any) -> Any:
    return array if isinstance(array, StoredArray) else np.array(array)


def _strided(array: Any, number: int) -> Any:
    return array.reshape(array.shape[0] // number, number, *array.shape[1:]).swapaxes(0, 1)
