"""A training in the background, faults in its workers, and the time until it continues. Driver side."""

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

_LOOK_S = 0.01
#: Steps of a group before a fault, and seconds to wait after them, so that its start is over.
_STEPS_BEFORE = 20
_CALM_S = 0.5
_END_S = 40.0


class Training:
    """A run of `bench.steps`, as a context manager; leaving it ends the run in peace, except after an exception.

    Args:
        limit_s: Seconds that each wait may take.
        train: The train function, which marks its steps as `bench.steps.train` does.
        config: Its config in addition to ``steps``, ``save_every`` and ``step_s``.
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
        self._folder = system.folder / f"steps-{uuid.uuid4().hex[:8]}"
        self._folder.mkdir()
        self._train = train
        self._config = {"steps": str(self._folder), "save_every": save_every, "step_s": step_s, **(config or {})}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        (self._folder / steps.ENOUGH).touch()
        if kind is not None:
            return
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the run had not ended {_END_S:g} s after it was to")
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
            group = newest_group(self._folder)
            if group is not None and is_it(group):
                return group
            if not self._thread.is_alive():
                raise RuntimeError(f"the run ended while {what} was waited for: {self._error!r}")
            time.sleep(_LOOK_S)
        raise TimeoutError(f"{what} did not come within {self._limit_s:g} s")

    def wait_for_whole(self, size: int) -> Group:
        """A group of ``size``, warm, with all spares of the system."""
        what = f"a group of {size}"
        group = self.wait_for(what, lambda group: group.size == size and group.steps >= _STEPS_BEFORE)
        deadline = time.monotonic() + self._limit_s
        while not self._system.is_whole(group.pids):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the spares were not up within {self._limit_s:g} s")
            time.sleep(0.1)
        time.sleep(_CALM_S)
        return self.wait_for(what, lambda group: group.size == size)

    def wait_after(self, before: Group, size: int | None = None) -> Group:
        """The next group that has done a step, of that size if one is given."""
        what = "the next group" if size is None else f"a group of {size}"
        return self.wait_for(what, lambda group: group.number > before.number and size in (None, group.size))

    def last_step_of(self, group: Group) -> float:
        """When a group that is no more had done its last step."""
        marks = [read_marks(path) for path in self._folder.glob(f"{group.number}-*.steps")]
        return max(last for _, last, _ in marks)

    def send_signal(self, group: Group, number: int = signal.SIGKILL, *, first_rank: int = 0) -> float:
        """Send a signal to one of its processes, at no particular moment of its step; returns when.

        Args:
            group: Whose processes they are.
            number: Of the signal.
            first_rank: The ranks below it are spared.
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
    """Seconds from each blow to the next step that was finished; ``params["runs"]`` times ``params["faults"]`` of them.

    A fault without recovery is counted in ``system.failures``, and ends its run.
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
