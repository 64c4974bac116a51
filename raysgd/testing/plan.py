"""`FaultPlan`: which faults are to happen in a run, and which have. Driver side."""

from __future__ import annotations

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
from raysgd.testing.fault import Fault
from raysgd.testing.faults import Exit, Kill, RemoveNode, Stop
from raysgd.testing.injection import FaultyFunction, WorkerPlan
from raysgd.testing.marks import claim, read_marks


@dataclass(frozen=True)
class Fired:
    """A fault that has happened.

    Attributes:
        attempt: Of the run, in which it happened.
        timestamp: When, seconds since the epoch.
        pid: In which process.
    """

    fault: Fault
    attempt: int
    timestamp: float
    pid: int


@final
class FaultPlan:
    """Faults that happen in a run, each once, at a place that is told beforehand.

    ::

        plan = FaultPlan([Kill(rank=1, step=3), BitFlip(checkpoint=2)])
        trainer.run(plan.wrap(train_func), config)
        plan.assert_all_fired()

    A fault happens at the first moment that is not before its place, so that one planned for a step that the run skips,
    since another fault sent it elsewhere, still happens. One plan is for one run: what has happened does not again.

    Args:
        faults: Several at one place happen in this order.
        seed: Of what they choose by chance.
        folder: Where it is written down what has happened; all nodes must see it. None: a folder of this machine that
            goes with the plan.

    Raises:
        ConfigError: ``faults`` holds something that is none.
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
        """A plan made by chance, the same for the same arguments.

        Args:
            seed: Shown by ``repr``, so that what a test found can be had again.
            ranks: Number of ranks.
            steps: Reports a rank makes; the faults are planned for steps 1 to ``steps``.
            kinds: The kinds to choose from. Those that need a rank which gives a state to checkpoints happen on rank 0.
            count: Number of faults, no two of which share rank and step.
            folder: As for the plan itself.

        Raises:
            ConfigError: There are fewer places than faults, or a kind that cannot be chosen by chance.
        """
        for name, value in (("ranks", ranks), ("steps", steps), ("count", count)):
            check_count(f"FaultPlan.random({name})", value, minimum=1)
        if count > ranks * steps:
            raise ConfigError(f"{count} faults have no room in {ranks} ranks times {steps} steps; give fewer.")
        if not kinds or any(kind.in_driver for kind in kinds):
            raise ConfigError(f"FaultPlan.random(kinds={kinds!r}) needs kinds, of faults that happen in workers.")
        chance = random.Random(seed)
        places = sorted(chance.sample(range(ranks * steps), count), key=lambda place: place // ranks)
        chosen = [(chance.choice(list(kinds)), place) for place in places]
        faults = [
            kind(rank=0 if kind.needs_state else place % ranks, step=place // ranks + 1) for kind, place in chosen
        ]
        return cls(faults, seed=seed, folder=folder)

    def wrap(self, train_func: Callable[..., Any]) -> Callable[..., Any]:
        """The train_func to run; outside of workers it is as it was."""
        faults = {index: fault for index, fault in enumerate(self.faults) if not fault.in_driver}
        return FaultyFunction(train_func, WorkerPlan(self._folder, self.seed, faults))

    def driver_callback(self) -> Callback:
        """For ``callbacks=``: makes those faults happen that do in the driver."""
        return DriverFaults(self._folder, [(i, f) for i, f in enumerate(self.faults) if isinstance(f, RemoveNode)])

    @property
    def fired(self) -> list[Fired]:
        """What has happened so far, in the order of time."""
        return [
            Fired(self.faults[mark.index], mark.attempt, mark.timestamp, mark.pid) for mark in read_marks(self._folder)
        ]

    @property
    def unfired(self) -> list[Fault]:
        """What has not."""
        happened = {mark.index for mark in read_marks(self._folder)}
        return [fault for index, fault in enumerate(self.faults) if index not in happened]

    def assert_all_fired(self) -> None:
        """Fail, if something that was planned did not happen: the run then proves nothing.

        Raises:
            AssertionError: It names the faults.
        """
        if left := self.unfired:
            raise AssertionError(f"{len(left)} of {len(self.faults)} faults did not happen: {left} of {self!r}")

    def __repr__(self) -> str:
        return f"FaultPlan({list(self.faults)!r}, seed={self.seed})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_plan, (self.faults, self.seed, self._folder)


class DriverFaults(Callback):
    """Makes the faults happen whose place is the driver; an error of one ends the run."""

    critical = True

    def __init__(self, folder: str, faults: list[tuple[int, RemoveNode]]) -> None:
        self._folder = folder
        self._pending = faults

    def on_result(self, result: Result) -> None:
        due = [(index, fault) for index, fault in self._pending if fault.step <= result["training_iteration"]]
        self._pending = [item for item in self._pending if item not in due]
        for index, fault in due:
            if claim(self._folder, index, result["attempt"]):
                fault.act(None)


def _open_plan(faults: Sequence[Fault], seed: int, folder: str) -> FaultPlan:
    return FaultPlan(faults, seed=seed, folder=folder)
