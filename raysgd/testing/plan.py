"""`FaultPlan`: the faults that are planned for a run, and those that have happened. Runs in the driver."""

from __future__ import annotations

import functools
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from raysgd.callbacks.base import Callback
from raysgd.config.checks import check_count
from raysgd.errors import ConfigError
from raysgd.result import Result
from raysgd.testing.faults import Exit, Fault, Kill, RemoveNode, Stop
from raysgd.testing.injection import FaultyFunction, WorkerPlan, claim, read_records


@dataclass(frozen=True)
class Fired:
    """A fault that has happened.

    Attributes:
        attempt: The attempt of the run.
        timestamp: Seconds since the epoch.
        pid: The process in which the fault happened.
    """

    fault: Fault
    attempt: int
    timestamp: float
    pid: int


@final
class FaultPlan:
    """Faults that happen in a run, each once, at planned places.

        plan = FaultPlan([Kill(rank=1, step=3), BitFlip(checkpoint=2)])
        trainer.run(plan.wrap(train_func), config)
        plan.assert_all_fired()

    A fault happens as soon as its place is reached or passed. So it also happens if the run skips the planned step because
    of another fault. A plan is for one run: a fault that has happened does not happen again.

    Args:
        faults: The faults; several faults at one place happen in this order.
        seed: The seed of the faults' random choices.
        folder: The folder of the fault records, which all nodes must see. None: a temporary folder of this machine, which is
            removed with the plan.

    Raises:
        ConfigError: ``faults`` contains an object that is not a fault.
    """

    def __init__(self, faults: Sequence[Fault], *, seed: int = 0, folder: str | os.PathLike[str] | None = None) -> None:
        for fault in faults:
            if not isinstance(fault, Fault):
                raise ConfigError(f"FaultPlan got {fault!r}; give faults such as Kill(rank=1, step=3).")
        self.faults = tuple(faults)
        self.seed = seed
        self._temporary = tempfile.TemporaryDirectory(prefix="raysgd-faults-") if folder is None else None
        self._folder = self._temporary.name if self._temporary is not None else os.path.abspath(str(folder))
        os.makedirs(self._folder, exist_ok=True)

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        ranks: int,
        steps: int,
        kinds: Sequence[type[Fault]] = (Kill, Stop, Exit),
        count: int = 1,
        folder: str | os.PathLike[str] | None = None,
    ) -> FaultPlan:
        """Return a random plan, which is the same for the same arguments.

        Args:
            seed: The seed; ``repr`` shows it, so that a failure can be reproduced.
            ranks: The number of ranks.
            steps: The number of reports of a rank; the faults are planned for steps 1 to ``steps``.
            kinds: The classes to choose from. Faults that need a rank with a state for checkpoints happen on rank 0.
            count: The number of faults; no two have the same rank and step.
            folder: As for `FaultPlan`.

        Raises:
            ConfigError: There are fewer places than faults, or a class cannot be chosen randomly.
        """
        for name, value in (("ranks", ranks), ("steps", steps), ("count", count)):
            check_count(f"FaultPlan.random({name})", value, minimum=1)
        if count > ranks * steps:
            raise ConfigError(f"FaultPlan.random(count={count}) exceeds {ranks} ranks times {steps} steps; give fewer.")
        if not kinds or any(kind.in_driver for kind in kinds):
            raise ConfigError(
                f"FaultPlan.random(kinds={kinds!r}) must be a sequence of fault classes that happen in workers."
            )
        generator = random.Random(seed)
        places = sorted(generator.sample(range(ranks * steps), count), key=lambda place: place // ranks)
        chosen = [(generator.choice(list(kinds)), place) for place in places]
        faults = [
            kind(rank=0 if kind.needs_state else place % ranks, step=place // ranks + 1) for kind, place in chosen
        ]
        return cls(faults, seed=seed, folder=folder)

    def wrap(self, train_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``train_func`` with the plan's faults; outside of workers it behaves like the original."""
        faults = {index: fault for index, fault in enumerate(self.faults) if not fault.in_driver}
        return FaultyFunction(train_func, WorkerPlan(self._folder, self.seed, faults))

    def driver_callback(self) -> Callback:
        """Return the callback for ``callbacks=`` that makes the faults of the driver happen."""
        return DriverFaults(self._folder, [(i, f) for i, f in enumerate(self.faults) if isinstance(f, RemoveNode)])

    @property
    def fired(self) -> list[Fired]:
        """The faults that have happened so far, in the order of time."""
        return [Fired(self.faults[record.pop("index")], **record) for record in read_records(self._folder)]

    @property
    def unfired(self) -> list[Fault]:
        """The faults that have not happened."""
        happened = {record["index"] for record in read_records(self._folder)}
        return [fault for index, fault in enumerate(self.faults) if index not in happened]

    def assert_all_fired(self) -> None:
        """Raise an error if a planned fault did not happen, because the run then proves nothing.

        Raises:
            AssertionError: The message lists the faults.
        """
        if left := self.unfired:
            raise AssertionError(f"{len(left)} of {len(self.faults)} faults did not happen: {left} of {self!r}")

    def __repr__(self) -> str:
        return f"FaultPlan({list(self.faults)!r}, seed={self.seed})"

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(FaultPlan, seed=self.seed, folder=self._folder), (self.faults,)


class DriverFaults(Callback):
    """Makes the faults of the driver happen; an error of a fault ends the run."""

    critical = True

    def __init__(self, folder: str, faults: list[tuple[int, RemoveNode]]) -> None:
        self._folder = folder
        self._pending = faults

    def on_result(self, result: Result) -> None:
        due = [(index, fault) for index, fault in self._pending if fault.step <= result["training_iteration"]]
        self._pending = [item for item in self._pending if item not in due]
        for index, fault in due:
            if claim(self._folder, index, result["attempt"]):
                fault.inject(None)
