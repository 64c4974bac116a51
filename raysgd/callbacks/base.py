"""The contract of a callback: its hooks, where and when they are called, and what its exceptions mean.

Every process that has callbacks imports this module. `raysgd.callbacks.runner` calls the hooks, and
`raysgd.trainer.assembly` splits the callbacks by process.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from raysgd._util.logs import get_logger
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    from raysgd.checkpoint.checkpoint import Checkpoint
    from raysgd.result import Event, Result, RunInfo


#: The processes a callback may run in.
RunsIn = Literal["driver", "controller", "worker"]
HOOKS = ("on_run_start", "on_result", "on_checkpoint", "on_event", "on_run_end")


class Stop(Exception):
    """Raised by a hook of a callback to end the run early. The run then counts as a success.

    Attributes:
        reason: One line for the run's events, such as ``"loss has not improved for 3 results"``.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Callback:
    """Base of all callbacks: override the hooks that are needed; the others do nothing.

    **Where.** ``runs_in`` says in which process the hooks are called, always by one thread:

    - ``"driver"`` (default): the process that called ``run``, in the thread that reads the run's stream, whether or not
      anyone iterates over the results. The object itself is used, so its attributes can be read after the run. In a
      detached run it moves to the controller's helper process.
    - ``"controller"``: a helper process of the controller, which outlives the driver. A pickled copy is used. Open what
      does not pickle (files, sockets, locks) in ``on_run_start``. The object in the driver does not change.
    - ``"worker"``: every worker, in its training thread, so the time of a hook is training time. A pickled copy is used,
      and ``on_result`` gets the rank's own report right after it was made. Each attempt is a run of its own: when
      train_func is entered again after a failure, the callback sees an end and a new start.

    **When.** ``on_run_start`` first; then ``on_result``, ``on_checkpoint`` and ``on_event`` in the order in which things
    happened; ``on_run_end`` exactly once and last if ``on_run_start`` was called, even if that raised an exception. It may
    therefore find an incomplete set-up. The next call, if any, is the ``on_run_start`` of another run, where a callback
    resets its state. Callbacks of one process are called in the order they were given, the progress display last.

    **After a failure** the results since the newest checkpoint are repeated: they carry the same ``training_iteration`` and a
    higher ``attempt``. A callback must not assume that iterations always increase.

    **Exceptions.** `Stop`, from any hook but ``on_run_end``, ends the run early as a success. Any other ``Exception`` is
    reported as a warning of the run, and training continues. A hook that fails three times in a row, or an
    ``on_run_start`` that fails once, disables the callback for this run (``on_run_end`` is still called). With
    ``critical = True`` the exception ends the run and is raised to the caller instead.

    **Warnings.** `warn` adds a warning to the run.

    Attributes:
        runs_in: The process that calls its hooks.
        critical: Whether an exception of a hook ends the run.
        packages: The modules that its hooks import, and what ``pip install`` must be given for each. ``run`` refuses a
            callback of the driver or the controller whose packages are missing.
        rank: World rank of the worker that calls it, set before ``on_run_start``; None in the driver and the controller.
    """

    runs_in: ClassVar[RunsIn] = "driver"
    critical: ClassVar[bool] = False
    packages: ClassVar[Mapping[str, str]] = {}
    rank: int | None = None

    _add_warning: Callable[[str], None] | None = None  # set during a run by what calls the hooks

    def on_run_start(self, info: RunInfo) -> None:
        """Prepare for a run that is about to start: open files, reset the state of an earlier run.

        Args:
            info: Name, folder, config and size of the run.
        """

    def on_result(self, result: Result) -> None:
        """Handle a complete round of reports (in a worker: a report of this rank).

        Args:
            result: The metrics. Other callbacks get the same object, so do not change it.
        """

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Handle a committed checkpoint. Not called in workers.

        Args:
            checkpoint: Its ``path``, ``metrics`` and ``iteration``.
        """

    def on_event(self, event: Event) -> None:
        """Handle an event: a worker started or failed, a sample of its load, a warning. Not called in workers.

        Args:
            event: Its ``kind``, ``timestamp`` and ``data``.
        """

    def on_run_end(self, error: BaseException | None) -> None:
        """Clean up after the run: close files.

        Args:
            error: The exception that ``run`` raises to its caller, or None after a success or a `Stop`. In a worker: the
                exception that train_func raised.
        """

    def warn(self, message: str) -> None:
        """Warn the user, from a hook: in the log, in ``RunInfo.warnings``, in the display and in the run's files."""
        (self._add_warning or get_logger().warning)(message)


def check_callbacks(callbacks: Any) -> list[Callback]:
    """Check the ``callbacks=`` argument, and return it as a list; None is an empty list.

    Raises:
        ConfigError: An element is not a callback, is given twice, or has a ``runs_in`` that is not known.
    """
    if callbacks is None:
        return []
    if isinstance(callbacks, (Callback, str)) or not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks={callbacks!r} is not a list; give callbacks=[...].")
    checked = list(callbacks)
    for index, callback in enumerate(checked):
        _check_one(f"callbacks[{index}]", callback)
        for other in range(index):
            if checked[other] is callback:
                name = type(callback).__name__
                raise ConfigError(f"callbacks[{index}] is the same {name} as callbacks[{other}]; give it once.")
    return checked


def check_packages(callbacks: Iterable[Callback]) -> None:
    """Check that the packages of these callbacks are installed in this environment; none is imported.

    Raises:
        ImportError: One is not; the message says what to install.
    """
    for callback in callbacks:
        for module, requirement in callback.packages.items():
            if importlib.util.find_spec(module) is None:
                name = type(callback).__name__
                raise ImportError(
                    f"{name} needs {module}, which is not installed here; run: pip install '{requirement}'", name=module
                )


def _check_one(where: str, callback: Any) -> None:
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise ConfigError(f"{where} is the class {callback.__name__}; give an instance, {callback.__name__}(...).")
    if not isinstance(callback, Callback):
        raise ConfigError(f"{where}={callback!r} is not a callback; derive its class from raysgd.Callback.")
    name, allowed = type(callback).__name__, get_args(RunsIn)
    if callback.runs_in not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ConfigError(f"{name}.runs_in={callback.runs_in!r} is not known; give one of {choices}.")
    for hook in HOOKS:
        if inspect.iscoroutinefunction(getattr(callback, hook)):
            raise ConfigError(f"{name}.{hook} is 'async def', but nothing awaits it; make it a plain method.")
