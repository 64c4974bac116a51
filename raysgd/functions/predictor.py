"""`Predictor`: predictions for examples, in their order. Driver side; it imports no JAX by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from raysgd._util.imports import import_optional
from raysgd._util.tracebacks import leaves_raysgd
from raysgd.callbacks.base import Callback
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.config.argument_names import refuse_unknown
from raysgd.config.checks import check_count
from raysgd.errors import CheckpointNotFoundError, ConfigError
from raysgd.functions.deployer import Deployer
from raysgd.functions.examples import check_callable, check_examples
from raysgd.functions.left_out import PLACED_IN_WORKERS, log_unused, no_attribute
from raysgd.functions.settings import PredictSettings
from raysgd.functions.tasks import PredictTask
from raysgd.workers.pickling import dumps, dumps_named

#: What can be given as parameters: a tree, or a checkpoint of `raysgd.functions`.
Params = Any
#: Returns where parameters are, the path of a checkpoint or a state, and the tree of their shapes.
FindParams = Callable[[], tuple[str | None, Any, Any]]


_PREDICT_HINTS = {"batch_size": "use per_device_batch_size="}


class Predictor:
    """Predicts with a model on all devices of a `Deployer`.

    Args:
        deployer: The devices.
        collate_fn: ``collate_fn(examples)`` returns a tree of arrays with one row for each example.
        pred_fn: ``pred_fn(pred_rng, params, batch)`` returns a tree of arrays with one row for each example.
        output_fn: ``output_fn(batch_preds)`` returns a list with one output for each row. None: the rows themselves.
        params_sharding_rules: As for `Trainer`.
    """

    @leaves_raysgd
    @refuse_unknown("Predictor")
    def __init__(
        self,
        deployer: Deployer,
        collate_fn: Callable[[list[Any]], Any],
        pred_fn: Callable[..., Any],
        output_fn: Callable[[Any], Any] | None = None,
        params_sharding_rules: Any = None,
    ) -> None:
        self.deployer = check_deployer(deployer)
        self._rules = params_sharding_rules
        self._find_params: FindParams | None = None
        self.functions = {
            "collate_fn": check_callable("collate_fn", collate_fn, "collate_fn(examples)"),
            "pred_fn": check_callable("pred_fn", pred_fn, "pred_fn(pred_rng, params, batch)"),
            "output_fn": check_callable("output_fn", output_fn, "output_fn(batch_preds)", may_be_none=True),
        }

    @property
    def mesh(self) -> Any:
        """The axes of the deployer's mesh."""
        return self.deployer.mesh

    if not TYPE_CHECKING:  # else type checkers would find any attribute

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    def _use_params_of(self, find_params: FindParams) -> Predictor:
        """Predict with the parameters that this function finds, unless others are given; returns itself."""
        self._find_params = find_params
        return self

    @leaves_raysgd
    @refuse_unknown("Predictor.predict", _PREDICT_HINTS)
    def predict(
        self,
        examples: Sequence[Any],
        per_device_batch_size: int = 1,
        params: Params = None,
        params_replicated: bool = False,
        params_sharded: bool = False,
        desc: str | None = None,
        *,
        callbacks: Sequence[Callback] = (),
    ) -> list[Any]:
        """Return an output for each example, in their order.

        Args:
            examples: A list, or another sequence with a length.
            per_device_batch_size: Rows of a batch for each replica of the model. The last batch is filled up with copies of an
                example, and their outputs are dropped.
            params: A tree of arrays, a module of nnx, or a checkpoint, of `Trainer.fit` or orbax, or its path. None: the newest
                parameters of the Trainer whose `Trainer.get_default_predictor` made this Predictor. Any other Predictor gets the
                parameters of a checkpoint as nested dicts.
            params_replicated: Ignored with a message: parameters are placed in the workers.
            params_sharded: Ignored, as ``params_replicated``.
            desc: Is logged.
            callbacks: Callbacks of the run.

        Raises:
            ConfigError: An argument cannot work, or a function returned another number of rows.
            Exception: What one of the functions raised.
        """
        check_count("per_device_batch_size", per_device_batch_size, minimum=1)
        dataset = {"examples": check_examples("examples", examples)}
        log_unused(PLACED_IN_WORKERS, params_replicated=params_replicated, params_sharded=params_sharded)
        if desc is not None:
            self.deployer.log_info(desc, title="Predicting")
        import_optional("jax", "functions")
        import_optional("optax", "functions")
        from raysgd.functions.models import Model
        from raysgd.functions.sharding import own_rules

        path, state, like = None, None, None
        if params is None:
            if self._find_params is None:
                raise ConfigError("predict() needs params=...: this Predictor was not made by a Trainer.")
            path, state, like = self._find_params()
        elif isinstance(params, (str, os.PathLike, Checkpoint)):
            like = None if self._find_params is None else self._find_params()[2]
            path, state = find_saved(params, like)
        else:
            model = Model.of(params)
            state, like = {"train_state": model.as_state()}, model.shapes()
        parts = {**self.functions, "rules": own_rules(self._rules)}
        settings = PredictSettings(
            jax_seed=self.deployer.jax_seed,
            n_model_shards=self.deployer.n_model_shards,
            num_workers=self.deployer.num_workers,
            collate_per_worker=self.deployer.collate_per_worker,
            start=path,
            per_device_batch_size=per_device_batch_size,
        )
        task = PredictTask(dumps_named(parts, "the predictor's functions"), dumps(like), settings)
        config = {"num_examples": len(examples), "per_device_batch_size": per_device_batch_size}
        found: list[Any] = self.deployer.runs.run(task, config, dataset, start=state, callbacks=callbacks)
        return found


def check_deployer(deployer: Any) -> Deployer:
    """Check the argument ``deployer``.

    Raises:
        ConfigError: It is not a Deployer.
    """
    if not isinstance(deployer, Deployer):
        raise ConfigError(f"deployer={deployer!r:.80} is not a raysgd.functions.Deployer; make one first.")
    return deployer


def find_saved(given: str | os.PathLike[str] | Checkpoint, like: Any) -> tuple[str | None, Any]:
    """Return the path of a checkpoint, or of the one that a link leads to, or the state in a checkpoint of orbax.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
    """
    from raysgd.functions import orbax_checkpoints

    try:
        checkpoint = given if isinstance(given, Checkpoint) else Checkpoint.from_path(given)
    except CheckpointNotFoundError:
        if (found := orbax_checkpoints.read(os.path.abspath(str(given)))) is None:
            raise
        return None, {"train_state": found[0] if like is None else like.with_arrays(found[0]).as_state()}
    if checkpoint.path is None:
        raise ConfigError("the checkpoint is in memory only: give one that is on storage, or a tree of arrays.")
    return checkpoint.path, None


def check_evaluation(examples: Any, predictor: Any, metric_fn: Any) -> dict[str, Any] | None:
    """Check what belongs to the evaluation; return the functions of the predictor.

    Raises:
        ConfigError: Something is missing, or is of a wrong type.
    """
    check_callable("eval_metric_fn", metric_fn, "eval_metric_fn(examples, preds)", may_be_none=True)
    if predictor is not None and not isinstance(predictor, Predictor):
        raise ConfigError(
            f"eval_predictor={predictor!r:.80} is not a Predictor; give trainer.get_default_predictor(pred_fn)."
        )
    if metric_fn is not None and predictor is None:
        raise ConfigError("eval_metric_fn needs eval_predictor, whose predictions it gets.")
    if predictor is not None and examples is None:
        raise ConfigError("eval_predictor needs eval_examples, which it predicts.")
    return None if predictor is None else dict(predictor.functions)
