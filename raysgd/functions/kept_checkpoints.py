"""Which checkpoints a fit keeps, by the arguments of `raysgd.functions.Trainer.fit`. Driver side; it imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.links import find_best, list_manifests
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.storage import Storage
from raysgd.config import CheckpointConfig
from raysgd.config.checks import check_bool, check_count
from raysgd.config.run import ScoreOrder
from raysgd.errors import ConfigError
from raysgd.functions.metrics import TRAIN_LOSS, check_metric_names, reported_name

#: Fields of `CheckpointConfig` that the arguments of fit decide.
_DECIDED = ("num_to_keep", "score_attribute", "score_order", "keep_best", "links")
#: As the interval of storage: no checkpoint has a number that is a multiple of it, so all stay in memory.
_NEVER = 2**31


@dataclass(frozen=True)
class KeptCheckpoints:
    """The checkpoints that a fit was asked to keep."""

    every: int  # of so many epochs one; 0: none
    last: bool
    argmin: tuple[str, ...]
    argmax: tuple[str, ...]

    @classmethod
    def of(cls, every: Any, last: Any, argmin: Any, argmax: Any, every_k: Any = None) -> KeptCheckpoints:
        if every_k is not None:
            check_count("save_ckpt_every_k_epochs", every_k, minimum=1)
        return cls(
            1 if check_bool("save_every_ckpt", every) else every_k or 0,
            check_bool("save_last_ckpt", last),
            check_metric_names("save_argmin_ckpt_by_metrics", argmin),
            check_metric_names("save_argmax_ckpt_by_metrics", argmax),
        )

    def check(self, *, has_eval: bool) -> None:
        """Check that the metrics can be there.

        Raises:
            ConfigError: A metric is in both lists, or is one of an evaluation, and there is none.
        """
        if both := set(map(reported_name, self.argmin)) & set(map(reported_name, self.argmax)):
            raise ConfigError(
                f"{sorted(both)[0]!r} is in save_argmin_ckpt_by_metrics and in save_argmax_ckpt_by_metrics."
            )
        for name in () if has_eval else (*self.argmin, *self.argmax):
            if name != TRAIN_LOSS:
                raise ConfigError(
                    f"the best checkpoint by {name!r} needs eval_examples; without an evaluation there is {TRAIN_LOSS} alone."
                )

    def _orders(self) -> dict[str, tuple[str, ScoreOrder]]:
        """Return the reported metric and the order of each best checkpoint, by the name of the checkpoint."""
        return {
            **{f"min_{name}": (reported_name(name), "min") for name in self.argmin},
            **{f"max_{name}": (reported_name(name), "max") for name in self.argmax},
        }

    def config(self, given: CheckpointConfig) -> CheckpointConfig:
        """Return the settings of the run.

        Raises:
            ConfigError: The given ones decide what the arguments of fit decide.
        """
        default = CheckpointConfig()
        for name in _DECIDED:
            if getattr(given, name) != getattr(default, name):
                raise ConfigError(
                    f"Deployer(checkpoint_config=CheckpointConfig({name}=...)) is decided by the arguments save_... of fit; "
                    "leave it out."
                )
        orders = self._orders()
        keeps_none = not (self.every or self.last or orders)
        interval = _NEVER if keeps_none and given.keep_in_memory else given.storage_interval
        return replace(
            given,
            num_to_keep=None if self.every else 1,
            keep_best=dict(orders.values()),
            links=self.last or self.every > 0,
            storage_interval=interval,
        )

    def name(self, saved: Sequence[Checkpoint]) -> dict[str, Checkpoint]:
        """Return the checkpoints to keep, by their names; ``saved`` has all of them, oldest first."""
        found: dict[str, Checkpoint] = {}
        if self.every:
            epochs = {each.metrics["epoch"]: each for each in saved if "epoch" in each.metrics}
            found |= {f"epoch_{epoch}": each for epoch, each in epochs.items() if (epoch + 1) % self.every == 0}
        if saved and (self.last or self.every):
            found["last"] = saved[-1]
        for name, (metric, order) in self._orders().items():
            best = find_best([each.metrics for each in saved], RetentionPolicy(None, metric, order))
            if best is not None:
                found[name] = saved[best]
        return found


def earlier_checkpoints(resumed: Checkpoint, history: Sequence[Mapping[str, Any]]) -> list[Checkpoint]:
    """Return the checkpoints of earlier runs of this training, oldest first: those whose metrics are in its history."""
    runs = Storage.from_uri(str(resumed.path)).parent().parent().parent()
    found = [Checkpoint.of_manifest(store.path(each.number), each) for store, each in list_manifests(runs)]
    end = next((place for place, each in enumerate(found) if each == resumed), -1) + 1
    return [each for each in found[:end] if each.metrics in history]
