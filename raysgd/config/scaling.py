"""The number of workers, and the resources of each one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from raysgd.config.checks import check_amount, check_choice, check_count
from raysgd.errors import ConfigError

PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
#: Names that look like resources of Ray and are fields here.
_FIELDS = {
    name: f"{kind}s_per_worker"
    for kind in ("cpu", "gpu")
    for name in (kind, f"{kind}s", f"num_{kind}s", f"{kind}_per_worker", f"{kind}s_per_worker")
}


@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """The workers of a Trainer. Users give these fields to `raysgd.Trainer` itself.

    Attributes:
        num_workers: An int, or ``(min, max)`` for elastic training; ``max`` may be ``math.inf``.
        cpus_per_worker: Logical CPUs of each worker; fractions are fine.
        gpus_per_worker: GPUs of each worker; with a fraction below 1 several workers share one.
        resources_per_worker: Further Ray resources of each worker, by name.
        placement_strategy: ``PACK``, ``SPREAD``, ``STRICT_PACK`` or ``STRICT_SPREAD``.
        workers_per_replica: Workers that hold one replica of the model between them, as in tensor and pipeline parallelism. They
            have consecutive ranks and read the same rows, and the group always has a multiple of them.
    """

    num_workers: int | tuple[int, float] = 1
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    resources_per_worker: Mapping[str, float] = field(default_factory=dict)
    placement_strategy: PlacementStrategy = "PACK"
    workers_per_replica: int = 1

    def __post_init__(self) -> None:
        _check_num_workers(self.num_workers)
        check_amount("cpus_per_worker", self.cpus_per_worker)
        check_amount("gpus_per_worker", self.gpus_per_worker)
        if self.gpus_per_worker > 1 and self.gpus_per_worker != int(self.gpus_per_worker):
            raise ConfigError(
                f"gpus_per_worker={self.gpus_per_worker} above 1 must be whole: Ray shares only a single GPU."
            )
        check_choice("placement_strategy", self.placement_strategy, get_args(PlacementStrategy))
        if self.is_elastic and self.placement_strategy.startswith("STRICT"):
            raise ConfigError(
                f"placement_strategy={self.placement_strategy!r} cannot grow or shrink; with num_workers={self.num_workers} "
                "give 'PACK' or 'SPREAD'."
            )
        check_count("workers_per_replica", self.workers_per_replica, minimum=1)
        _check_multiple(self.num_workers, self.workers_per_replica)
        # A copy: a later change of the caller's dict must not change this config.
        object.__setattr__(self, "resources_per_worker", _checked_resources(self.resources_per_worker))
        if math.isinf(self.max_workers) and not self.bundle():
            raise ConfigError(
                f"num_workers={self.num_workers} has no limit, and a worker takes no resources; "
                "give a maximum, or cpus_per_worker."
            )

    @property
    def min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> float:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def is_elastic(self) -> bool:
        return not isinstance(self.num_workers, int)

    def bundle(self) -> dict[str, float]:
        """Return the resources of one worker, as a bundle of a placement group."""
        amounts = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker, **self.resources_per_worker}
        return {name: amount for name, amount in amounts.items() if amount}


def _check_num_workers(value: Any) -> None:
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        raise ConfigError(
            f"num_workers={name} is callable; give the number of workers to Trainer(...), and train_func to Trainer.run(...)."
        )
    if not isinstance(value, tuple):
        check_count("num_workers", value, minimum=1)
        return
    if len(value) != 2:
        raise ConfigError(f"num_workers={value!r} has {len(value)} entries; give (min, max).")
    check_count("num_workers[0]", value[0], minimum=1)
    if value[1] != math.inf:
        check_count("num_workers[1]", value[1], minimum=1)
    if value[0] > value[1]:
        raise ConfigError(f"num_workers={value} has its minimum above its maximum; give (min, max) with min <= max.")


def _check_multiple(num_workers: int | tuple[int, float], workers_per_replica: int) -> None:
    """Check that every limit of the number of workers holds whole replicas of the model."""
    limits = (num_workers,) if isinstance(num_workers, int) else num_workers
    for limit in limits:
        if limit != math.inf and limit % workers_per_replica:
            lower = int(limit // workers_per_replica) * workers_per_replica
            nearest = " or ".join(str(count) for count in (lower, lower + workers_per_replica) if count)
            raise ConfigError(
                f"num_workers={num_workers} with workers_per_replica={workers_per_replica}: {limit:g} workers do not hold whole "
                f"replicas of the model ({limit:g} / {workers_per_replica} = {limit / workers_per_replica:g}); give {nearest} in "
                f"place of {limit:g}."
            )


def _checked_resources(resources: Any) -> dict[str, float]:
    if resources is None:
        return {}
    if not isinstance(resources, Mapping):
        raise ConfigError(f"resources_per_worker={resources!r} is not a dict; give {{'name': amount}}.")
    for name, amount in resources.items():
        if not isinstance(name, str):
            raise ConfigError(f"resources_per_worker has the name {name!r}; names are strings.")
        if flat := _FIELDS.get(name.lower().replace("-", "_")):
            raise ConfigError(f"resources_per_worker has {name!r}={amount!r}; did you mean {flat}={amount!r}?")
        if name in ("memory", "object_store_memory"):
            raise ConfigError(f"resources_per_worker has {name!r}, which Ray reserves; leave it out.")
        check_amount(f"resources_per_worker[{name!r}]", amount)
    return dict(resources)
