"""The contract of a callback: its hooks, where and when they are called, and what its exceptions mean.

Imported in every process a callback runs in. Leaves calling the hooks to `raysgd.callbacks.runner`, and deciding which
process hosts which callback to the trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from raysgd.checkpoint import Checkpoint
    from raysgd.result import Event, Result, RunInfo

#: The processes a callback may run in.
RunsIn = Literal["driver", "controller", "worker"]


class Stop(Exception):
    """Raised by a callback's hook to end the run early. The run then counts as a success.

    Attributes:
        reason: One line for the run's log, such as ``"loss has not improved for 3 results"``.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Callback:
    """Base of all callbacks: override the hooks you need, the others do nothing.

    **Where.** ``runs_in`` says in which process the hooks are called, always by one thread:

    - ``"driver"`` (default): the process that called ``run``, in the thread that reads the run's stream, whether or not
      anyone iterates over the results. The object itself is used, so its attributes can be read after the run. In a
      detached run it moves to the controller's helper process.
    - ``"controller"``: a helper process of the controller, which outlives the driver. A pickled copy is used: nothing
      that does not pickle (files, sockets, locks) may be opened before ``on_run_start``, and what the copy learns does
      not come back to the object in the driver.
    - ``"worker"``: every worker, in its training thread, so time spent here is training time. A pickled copy is used,
      ``on_result`` gets the rank's own report right after it was made, and a run is one attempt: when train_func is
      entered again after a failure, the callback sees an end and a new start.

    **When.** ``on_run_start`` first; then ``on_result``, ``on_checkpoint`` and ``on_event`` in the order in which things
    happened; ``on_run_end`` exactly once and last if ``on_run_start`` was called, even if that raised. It may therefore
    find things half set up. The next call, if any, is the ``on_run_start`` of another run: a callback used for several
    runs starts anew there. Callbacks of one process are called in the order they were given.

    **After a failure** the results since the newest checkpoint are made again: they carry the same
    ``training_iteration`` and a higher ``attempt``. A callback must not take iterations to be strictly rising.

    **Exceptions.** `Stop`, from any hook but ``on_run_end``, ends the run early as a success. Any other ``Exception`` is
    reported as a warning of the run and does not touch training; a hook that fails three times in a row, or an
    ``on_run_start`` that fails once, switches the callback off for this run (``on_run_end`` still comes). With
    ``critical = True`` the exception ends the run and is raised to the caller instead.

    Attributes:
        runs_in: The process its hooks are called in.
        critical: Whether its exceptions end the run.
        rank: World rank of the worker it runs in, set before ``on_run_start``; None in the driver and the controller.
    """

    runs_in: ClassVar[RunsIn] = "driver"
    critical: ClassVar[bool] = False
    rank: int | None = None

    def on_run_start(self, info: RunInfo) -> None:
        """The run is about to start: open what is needed, forget the run before.

        Args:
            info: Name, folder, config and size of the run.
        """

    def on_result(self, result: Result) -> None:
        """A round of reports is complete (in a worker: this rank has reported).

        Args:
            result: The metrics; shared with other callbacks, so not to be changed.
        """

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is committed. Not called in workers.

        Args:
            checkpoint: Its ``path``, ``metrics`` and ``iteration``.
        """

    def on_event(self, event: Event) -> None:
        """Something happened to the run: a worker came up or failed, a sample of its load, a warning. Not in workers.

        Args:
            event: Its ``kind``, ``timestamp`` and ``data``.
        """

    def on_run_end(self, error: BaseException | None) -> None:
        """The run is over: close what is open.

        Args:
            error: The very exception that ``run`` raises to its caller, or None after a success or a `Stop`; in a
                worker, what left train_func.
        """
