"""Those who look at the workers of an attempt: for hangs, stragglers, and nodes that will be taken away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from raysgd.backends.flight_record import who_is_behind
from raysgd.checkpoint.storage import Storage
from raysgd.config import FailureConfig
from raysgd.controller import commands as c
from raysgd.controller.drains import DrainWatch
from raysgd.controller.fleet import Fleet
from raysgd.controller.hang_policy import Hang
from raysgd.controller.straggler_policy import Straggler
from raysgd.controller.watch import Scene, Watch


class Watches:
    """Of one run, an attempt at a time.

    Args:
        records: Folder for what is known of ranks that hang, one for each attempt.
        feed: Takes what they find that the run must act on.
        note: Takes what is to be told of.
    """

    def __init__(
        self,
        fleet: Fleet,
        failure: FailureConfig,
        records: Storage,
        feed: Callable[[c.Input], None],
        note: Callable[[c.Note], None],
    ) -> None:
        self._fleet = fleet
        self._failure = failure
        self._records = records
        self._feed = feed
        self._note = note
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, attempt: int) -> None:
        """Watch over this attempt, instead of the one before."""

        def hung(hang: Hang, scene: Scene) -> None:
            behind = who_is_behind(scene.collectives, range(self._fleet.size))
            why = hang.why if behind is None else f"{hang.why}; {behind}"
            self._feed(c.WorkerHung(hang.rank, attempt, hang.kind, why, scene.stacks, scene.collectives))

        def drains(ranks: tuple[int, ...], within_s: float | None) -> None:
            self._feed(c.NodeDrains(attempt, ranks, within_s))

        self.end()
        records = self._records.child(f"attempt_{attempt}").uri
        watch = Watch(self._fleet.vitals, self._failure, records, hung, self._lags)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(watch.run()), loop.create_task(DrainWatch(self._fleet.drains, drains).run())]

    def end(self) -> None:
        """Nobody is watched."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    def _lags(self, straggler: Straggler) -> None:
        info = self._fleet.info(straggler.rank)
        node = info.node if info is not None else "a lost node"
        self._note(c.Note("straggler", straggler.event(node)))
        self._note(c.Note("warning", {"message": straggler.told(node)}))
