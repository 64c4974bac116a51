"""`Fitting`: the loop of `raysgd.functions.Trainer.fit`. Worker side; it is the train_func of a run.

Every rank runs it. The position in the order of examples, the sums of the epoch and the state of the training are in each
checkpoint, so the loop resumes between any two steps, with any number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raysgd._util.logs import get_logger
from raysgd.data.dataset import WorkerDataset
from raysgd.data.order.position import Position
from raysgd.errors import CheckpointError, ConfigError
from raysgd.functions.examples import call_by_name
from raysgd.functions.metrics import COMPILATIONS, PREFIX, TRAIN_LOSS, as_metrics, check_wanted
from raysgd.functions.settings import FitSettings
from raysgd.functions.sharding import DATA_AXIS, plan_sharding
from raysgd.functions.worker.batches import Agreement, BatchesByEpoch, ExampleBatches, place_for_loss
from raysgd.functions.worker.evaluation import Predictions, compute_loss, predict, write_evaluation
from raysgd.functions.worker.predicting import load_start, rows_on_all_devices
from raysgd.functions.worker.steps import Steps, find_steps, mesh_of
from raysgd.functions.worker.train_state import TrainState, cast, fetch
from raysgd.session import api, context, rank_state
from raysgd.session.live.state import CopiedParts, LiveState
from raysgd.train.loop import LoopPosition, LoopSettings, Stepper
from raysgd.train.loop import train as run_loop

TRAIN, EVAL = "train", "eval"


class EndOfEpochs(Exception):
    """The driver gives no more epochs."""


class Fitting(Stepper):
    """A training from its newest checkpoint, or from its beginning, to its end.

    Args:
        parts: ``like`` (a `Model` of shapes), ``rules``, ``optimizer``, ``apply_fn``, ``lr_schedule_fn`` and the user's
            functions: ``collate_fn``, ``loss_fn``, ``train_step_fn``, ``eval_metric_fn``, ``train_examples`` (None if they are
            a list), and ``predictor``, None or a dict of its three functions.
        settings: The settings.
        identity: Equal for equal functions; see `find_steps`.
    """

    def __init__(self, parts: Mapping[str, Any], settings: FitSettings, identity: bytes) -> None:
        self._parts = parts
        self._identity = identity
        self._settings = settings
        self._is_first = api.world_rank() == 0
        self._set_up()
        self._state: TrainState
        #: The sums of the epoch in progress: of the loss, and of its weight.
        self._sums = [0.0, 0.0]
        self._history: list[dict[str, Any]] = []
        self._unread: Any = None  # metrics of the newest step, which the device may not have computed yet
        self._has_warned = self._saves = False
        self._metrics: dict[str, Any] = {}  # of the newest report
        self._found: tuple[dict[str, Any], Predictions] | None = None  # by the evaluation of the epoch
        self._live: LiveState | None = None

    def run(self) -> dict[str, Any]:
        """Train.

        Returns:
            ``history``, the metrics of each epoch, the ``epoch`` that would come next, ``num_steps``, and ``num_compilations``.
        """
        is_new = self._start()
        try:
            return self._run(is_new)
        finally:
            if self._by_epoch is not None:
                self._by_epoch.close()

    def eval_loss(self) -> float:
        """Return the loss over the examples of the evaluation."""
        self._start()
        return compute_loss(self._steps, self._state, self._loss_batches)

    def _run(self, is_new: bool) -> dict[str, Any]:
        settings = self._settings
        if is_new and settings.eval_sanity_check and settings.has_eval:
            self._check_evaluation()
        # Each rank reads all rows, and the numbers that collate_fn draws depend on them: all ranks have the same state.
        self._live = context.current().own_live_state(
            {"state": CopiedParts()} if self._steps.changes_in_place and api.world_size() > 1 else {},
            has_own_state=False,
        )
        loop_settings = LoopSettings(
            epochs=None if settings.takes_epochs else settings.last_epoch,
            validate_every_epochs=1 if settings.has_eval else None,
            save_every=settings.save_every_n_steps,
            save_every_epochs=None if settings.takes_epochs else 1,
            saves_last=False,
        )
        try:
            run_loop(self, loop_settings, api.should_stop)
        except EndOfEpochs:
            self.after_epoch(self.position.epoch)
        except Exception:
            if settings.takes_epochs:  # the driver has no newer state
                self._saves = True
                self.after_epoch(self.position.epoch)
            raise
        compilations = dict(self._steps.num_compilations)
        if self._pred_steps is not None:
            compilations["predict"] = self._pred_steps.num_compilations["predict"]
        return {
            "history": self._history,
            "epoch": self.position.epoch,
            "num_steps": self.position.steps,
            "num_compilations": compilations,
        }

    # ---------------------------------------------------------------------------------------------------- beginning

    def _set_up(self) -> None:
        parts, settings = self._parts, self._settings
        mesh = mesh_of(settings.n_model_shards)
        model = parts["like"]
        plan = plan_sharding(model.params, dict(mesh.shape), parts["rules"], model.declared)
        rows = rows_on_all_devices(settings.per_device_batch_size, settings, settings.num_workers)
        rows *= settings.accumulate_grad_batches
        self._warn_of_rows(rows, mesh.shape[DATA_AXIS])
        # A smaller group computes the same batch in more parts, so that no device takes more rows at a time.
        num_parts = math.ceil(rows / (settings.per_device_batch_size * mesh.shape[DATA_AXIS]))
        self._steps = find_steps(
            plan,
            ("fit", self._identity, model.definition, num_parts, settings.compute_dtype, settings.steps_per_update),
            lambda: Steps(
                mesh,
                plan,
                loss_fn=parts["loss_fn"],
                optimizer=parts["optimizer"],
                accumulate_grad_batches=num_parts,
                lr_schedule_fn=parts["lr_schedule_fn"],
                apply_fn=parts["apply_fn"],
                compute_dtype=settings.compute_dtype,
                train_step_fn=parts["train_step_fn"],
                steps_per_update=settings.steps_per_update,
                model=model,
            ),
        )
        self._pred_steps: Steps | None = None
        seed, collate_fn = settings.jax_seed, parts["collate_fn"]
        common: dict[str, Any] = {"seed": seed, "per_worker": settings.collate_per_worker}
        agreement = Agreement()

        def open_batches(dataset: WorkerDataset) -> ExampleBatches:
            return ExampleBatches(dataset, collate_fn, self._steps, rows, shuffle=True, agreement=agreement, **common)

        self._by_epoch: BatchesByEpoch | None = None
        make_examples = self._take_examples if settings.takes_epochs else parts["train_examples"]
        if make_examples is not None:
            self._by_epoch = BatchesByEpoch(
                "train_examples", make_examples, open_batches, seed=seed, is_same=settings.takes_epochs
            )
        self._batches = self._by_epoch or open_batches(api.get_dataset(TRAIN))
        if not settings.has_eval:
            return
        eval_rows = rows_on_all_devices(settings.eval_per_device_batch_size, settings, api.world_size())
        dataset = api.get_dataset(EVAL)
        self._loss_batches = ExampleBatches(dataset, collate_fn, self._steps, eval_rows, **common)
        if (predictor := parts["predictor"]) is not None:
            self._pred_steps = find_steps(
                plan,
                ("evaluate", self._identity, model.definition),
                lambda: Steps(mesh, plan, pred_fn=predictor["pred_fn"], model=model),
            )
            self._pred_batches = ExampleBatches(
                dataset, predictor["collate_fn"], self._pred_steps, eval_rows, pads=True, **common
            )

    def _warn_of_rows(self, rows: int, num_replicas: int) -> None:
        if rows % num_replicas and self._is_first:
            get_logger().warning(
                "%d rows of a batch do not divide by the %d data-parallel devices of this group, so each device computes all "
                "rows. Give a per_device_batch_size of which every size of the group divides the batch.",
                rows,
                num_replicas,
            )

    def _start(self) -> bool:
        """Load the state; returns whether the training is at its beginning."""
        settings, steps = self._settings, self._steps
        saved = load_start(settings)
        if saved is None or "train_state" not in saved:
            raise CheckpointError(
                "fit(resume_from=...) needs a checkpoint of raysgd.functions: this one has no train_state."
            )
        state, progress = saved["train_state"], saved.get("progress")
        given = None if progress is None else progress["hyperparameters"]
        self._state = steps.load_state(state, settings.jax_seed, given)
        if "step" in state and "opt_state" not in state and self._is_first:
            get_logger().warning(
                "the checkpoint was saved with save_opt_states=False: the optimizer starts with a new state at step %d, and "
                "its schedule continues.",
                int(self._state.step),
            )
        if progress is None:
            self.position = LoopPosition(epoch=settings.first_epoch, steps=int(self._state.step))
            self._restore_batches(Position(epoch=settings.first_epoch))
            return True
        position = progress.get("train_position")
        if (position is None) != (self._by_epoch is None):
            now, then = ("a function", "not one") if position is None else ("not a function", "one")
            raise CheckpointError(
                f"train_examples is {now}, and was {then} when the checkpoint was saved: give what the first fit got, or begin "
                "a new training with its parameters, by Trainer(params=...)."
            )
        if position is not None:
            self._restore_batches(Position.from_json(position, "train_examples"))
        elif (position := progress.get("list_position")) is not None:
            self._restore_batches(Position.from_json(position, TRAIN))
        self.position = LoopPosition(**progress["position"])
        self._sums = [float(each) for each in progress["sums"]]
        self._history = list(progress["history"])
        self._metrics = dict(progress.get("metrics", {}))
        return False

    def _restore_batches(self, position: Position) -> None:
        if self._by_epoch is not None:
            self._by_epoch.restore(position)
        else:
            api.get_dataset(TRAIN).restore(Position(), position)

    # ---------------------------------------------------------------------------------------------------- training

    def train_epoch(self) -> Iterator[None]:
        for batch in self._batches:
            placed, counts = place_for_loss(self._steps, batch, is_training=True), self._steps.num_compilations
            if self._live is not None:
                self._live.begin_step()
            before = counts["train"]
            self._state, metrics = self._steps.train(self._state, *placed)
            self._read_metrics()  # of the step before, so that the device has the next one to do
            self._unread = metrics
            shown = {name: value for name, value in metrics.items() if name not in ("step", "weight")}
            self._metrics = {"epoch": self.position.epoch, "step": self.position.steps + 1, **shown}
            if counts["train"] > before:
                self._metrics[COMPILATIONS] = counts["train"]
            yield

    def report(self) -> None:
        api.report(self._metrics)

    def _read_metrics(self) -> None:
        metrics, self._unread = self._unread, None
        if metrics is None:
            return
        self._sums, loss = _added(self._sums, metrics)
        if not math.isfinite(loss) and not self._has_warned:
            self._has_warned = True
            if self._is_first:
                get_logger().warning("the training loss is %s at step %d.", loss, int(metrics["step"]))

    def end_epoch(self) -> None:
        self._read_metrics()
        total, weight = self._sums
        self._sums = [0.0, 0.0]
        epoch, metrics = self.position.epoch, {TRAIN_LOSS: total / weight if weight else float("nan")}
        if self._found is not None:
            (results, predictions), self._found = self._found, None
            metrics |= {PREFIX + name: value for name, value in results.items()}
            self._check_wanted(metrics)
            if self._is_first and self._settings.folder is not None:
                write_evaluation(self._settings.folder, epoch, results, predictions)
        self._metrics = {"epoch": epoch, "step": self.position.steps, **metrics}
        self._history = [*([] if self._settings.takes_epochs else self._history), self._metrics]
        self.position.reported = -1  # the loss of the step was reported; now there are those of the epoch

    def _take_examples(self, epoch_idx: int) -> Any:
        """Wait for the examples of an epoch that the driver gives, and whether it is saved.

        Raises:
            EndOfEpochs: There are no more.
        """
        session: Any = context.acting()
        examples, self._saves = session.take(epoch_idx)
        if examples is None:
            self._saves = True
            raise EndOfEpochs
        return examples

    def after_epoch(self, epoch: int) -> None:
        if self._saves and self.position.saved != self.position.steps:
            self.position.saved = self.position.steps
            self.save()

    # ---------------------------------------------------------------------------------------------------- evaluation

    def validate(self) -> None:
        self._found = self._evaluate()

    def _evaluate(self, *, only_first: bool = False) -> tuple[dict[str, Any], Predictions]:
        """Return the results, the same on all ranks, and on rank 0 the predictions."""
        settings, parts = self._settings, self._parts
        results: dict[str, Any] = {}
        if settings.eval_loss:
            batches = [self._loss_batches.first()] if only_first else self._loss_batches
            results["loss"] = compute_loss(self._steps, self._state, batches)
        predictions = Predictions([], [])
        if self._pred_steps is not None:
            predictions = predict(
                self._pred_steps,
                self._state.params,
                [self._pred_batches.first()] if only_first else self._pred_batches,
                parts["predictor"]["output_fn"],
                model_state=self._state.model_state,
                seed=settings.jax_seed,
                is_first_rank=self._is_first,
            )
            results |= api.broadcast(self._compute_metrics(predictions) if self._is_first else None)
        return results, predictions

    def _compute_metrics(self, predictions: Predictions) -> dict[str, Any]:
        metric_fn = self._parts["eval_metric_fn"]
        if metric_fn is None:
            return {}
        found = as_metrics(call_by_name(metric_fn, examples=predictions.examples, preds=predictions.outputs))
        if self._settings.eval_loss and "loss" in found:
            raise ConfigError(
                "eval_metric_fn returned a metric 'loss', which eval_loss=True gives already: give it another name, or "
                "eval_loss=False."
            )
        return found

    def _check_evaluation(self) -> None:
        """Evaluate one batch, so that mistakes are found before the first step."""
        with rank_state.keep_generators():
            results, _ = self._evaluate(only_first=True)
        self._check_wanted({TRAIN_LOSS: 0.0, **{PREFIX + name: value for name, value in results.items()}})

    def _check_wanted(self, metrics: Mapping[str, Any]) -> None:
        check_wanted("save_argmin_ckpt_by_metrics", self._settings.argmin, metrics)
        check_wanted("save_argmax_ckpt_by_metrics", self._settings.argmax, metrics)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def save(self) -> None:
        self._read_metrics()
        state = self._state.state_dict()
        progress = self._progress(self.position, self._sums, self._history, self._data_position)
        if not self._settings.save_opt_states:
            del state["opt_state"]
        if (name := self._settings.save_float_dtype) is not None:
            state["params"] = jax.tree.map(lambda array: cast(array, jnp.dtype(name)), state["params"])
        metrics = {} if self.position.epoch_steps else self._metrics  # those of the epoch, once it has ended
        api.save_checkpoint({"train_state": state, "progress": progress}, metrics=metrics, all_ranks=True)

    def record(self, *, is_same_step: bool) -> None:
        if self._live is not None:
            of_step = copy(self.position), self._sums, self._history, self._data_position
            values = partial(self._state_after, self._state, self._unread, self._metrics, *of_step)
            self._live.complete(values, is_same_step=is_same_step)

    def _state_after(
        self, state: TrainState, unread: Any, shown: Mapping[str, Any], at: LoopPosition, sums: list[float], *more: Any
    ) -> Any:
        """Return the state after a step as a checkpoint has it, and what is reported of it.

        A state that is not copied at once is in the memory of the host.
        """
        assert self._live is not None
        kept = state.state_dict()
        arrays, metrics = (kept, fetch(unread)) if self._live.is_copied else fetch((kept, unread))
        progress = self._progress(at, sums if metrics is None else _added(sums, metrics)[0], *more)
        reported = {name: np.asarray(value) if hasattr(value, "dtype") else value for name, value in shown.items()}
        return {"train_state": arrays, "progress": {**progress, "metrics": reported}}

    @property
    def _data_position(self) -> Position:
        return self._by_epoch.position if self._by_epoch is not None else api.get_dataset(TRAIN).whole_position

    def _progress(
        self, at: LoopPosition, sums: list[float], history: list[dict[str, Any]], data: Position
    ) -> dict[str, Any]:
        return {
            "position": asdict(at),
            "sums": sums,
            "history": history,
            "hyperparameters": self._steps.given_hyperparameters,
            "list_position" if self._by_epoch is None else "train_position": data.to_json(),
        }


def _added(sums: list[float], metrics: Any) -> tuple[list[float], float]:
    """Return the sums of the epoch with the loss and the weight of a step, and that loss."""
    loss, weight = float(metrics["loss"]), float(metrics["weight"])
    return [sums[0] + loss * weight, sums[1] + weight], loss
