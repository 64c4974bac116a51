"""The callbacks that run in a worker. Worker side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd.callbacks.base import Callback, Stop
from raysgd.callbacks.runner import CallbackRunner
from raysgd.result import Result
from raysgd.session.events import StopWanted, Warned
from raysgd.session.metrics import read_deferred
from raysgd.session.outbox import Outbox
from raysgd.workers.orders import AttemptOrder, RunOrder


class WorkerCallbacks:
    """The callbacks that run in this worker, in the training thread.

    Args:
        outbox: Where what they have to say goes.
    """

    def __init__(self, callbacks: Sequence[Callback], run: RunOrder, order: AttemptOrder, outbox: Outbox) -> None:
        self._runner = CallbackRunner(callbacks, lambda text: outbox.put(Warned(text)), rank=order.member.rank)
        self._info = run.info  # not the order: this outlives the run, whose data it refers to
        self._order = order
        self._outbox = outbox
        self._count = order.iterations_before
        self.hooks = [self._on_report] if callbacks else []

    def start(self) -> None:
        self._want(self._runner.start(self._info))

    def end(self, error: BaseException | None) -> None:
        self._runner.end(error)

    def _on_report(self, metrics: dict[str, Any]) -> None:
        """Each report of this rank, as a result of this rank alone."""
        self._count += 1
        member = self._order.member
        result = Result(read_deferred(metrics), ranks=(member.rank,))
        result["training_iteration"] = self._count
        result["attempt"] = self._order.attempt
        result["world_size"] = member.world_size
        self._want(self._runner.result(result))

    def _want(self, stop: Stop | None) -> None:
        if stop is not None:
            self._outbox.put(StopWanted(str(stop)), urgent=True)
