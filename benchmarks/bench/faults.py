"""Runs a training in the background, causes faults in its workers, and times recovery. Driver side."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from bench import steps
from bench.steps import Group, newest_group, read_marks
from bench.systems.base import TrainFunc
from bench.systems.fragile import FragileSystem

_POLL_S = 0.01
#: Steps of a group before a fault, and seconds to wait after them: its start is then over.
_STEPS_BEFORE = 20
_CALM_S = 0.5
_END_S = 40.0


class Training:
    """A context manager that runs `bench.steps`; at its end the run finishes, except after an exception.

    Args:
        limit_s: The longest time of each wait.
        train: The train function, which records its steps as `bench.steps.train` does.
        config: Its config in addition to ``steps``, ``save_every`` and ``step_s``.

    Attributes:
        folder: Where the steps are recorded.
    """

    def __init__(
        self,
        system: FragileSystem,
        *,
        limit_s: float,
        save_every: int = 0,
        step_s: float = 0.01,
        train: TrainFunc = steps.train,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._system = system
        self._limit_s = limit_s
        self.folder = system.folder / f"steps-{uuid.uuid4().hex[:8]}"
        self.folder.mkdir()
        self._train = train
        self._config = {"steps": str(self.folder), "save_every": save_every, "step_s": step_s, **(config or {})}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        (self.folder / steps.ENOUGH).touch()
        if kind is not None:
            return
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the run did not end within {_END_S:g} s")
        if self._error is not None:
            raise self._error

    def wait_for(self, what: str, is_it: Callable[[Group], bool]) -> Group:
        """Wait for a group of a kind.

        Raises:
            TimeoutError: It did not come.
            RuntimeError: The run has ended.
        """
        deadline = time.monotonic() + self._limit_s
        while time.monotonic() < deadline:
            group = newest_group(self.folder)
            if group is not None and is_it(group):
                return group
            if not self._thread.is_alive():
                raise RuntimeError(f"the run ended during the wait for {what}: {self._error!r}")
            time.sleep(_POLL_S)
        raise TimeoutError(f"{what} did not appear within {self._limit_s:g} s")

    def wait_for_whole(self, size: int) -> Group:
        """Wait for a warm group of ``size``, with all spares of the system."""
        what = f"a group of {size}"
        group = self.wait_for(what, lambda group: group.size == size and group.steps >= _STEPS_BEFORE)
        deadline = time.monotonic() + self._limit_s
        while not self._system.is_whole(group.pids):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the spares were not ready within {self._limit_s:g} s")
            time.sleep(0.1)
        time.sleep(_CALM_S)
        return self.wait_for(what, lambda group: group.size == size)

    def wait_after(self, before: Group, size: int | None = None) -> Group:
        """Wait for a later group that has finished a step, of ``size`` if it is given."""
        what = "the next group" if size is None else f"a group of {size}"
        return self.wait_for(what, lambda group: group.number > before.number and size in (None, group.size))

    def last_step_of(self, group: Group) -> float:
        """Return when a former group finished its last step."""
        marks = [read_marks(path) for path in self.folder.glob(f"{group.number}-*.steps")]
        return max(last for _, last, _ in marks)

    def send_signal(self, group: Group, number: int = signal.SIGKILL, *, first_rank: int = 0) -> float:
        """Send a signal to a random process of a group, at a random moment of a step; return the time.

        Args:
            group: The group.
            number: The number of the signal.
            first_rank: Lower ranks get no signal.
        """
        time.sleep(random.uniform(0, 0.1))
        sent = time.time()
        os.kill(random.choice(group.pids[first_rank:]), number)
        return sent

    def _run(self) -> None:
        try:
            self._system.run(self._train, self._config)
        except BaseException as error:
            self._error = error


def measure_faults(system: FragileSystem, params: dict[str, Any], number: int = signal.SIGKILL) -> list[float]:
    """Return the seconds from each fault to the next finished step.

    There are ``params["runs"]`` runs with ``params["faults"]`` faults each. A fault without recovery is
    counted in ``system.failures``, and ends its run.
    """
    took: list[float] = []
    for _ in range(params["runs"]):
        training = Training(system, limit_s=params["limit_s"], save_every=params.get("save_every", 0))
        with system.counting_failures(), training:
            for _ in range(params["faults"]):
                group = training.wait_for_whole(params["size"])
                sent = training.send_signal(group, number)
                took.append(training.wait_after(group).first_step - sent)
    return took
