"""Call the hooks of callbacks, and keep their exceptions from the run.

Runs in the driver, in the controller's helper process and in each worker: one runner per run and process, used by one
thread. Its caller acts on a `Stop` and shows failures to the user.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raysgd.callbacks.base import Callback, Stop
from raysgd.callbacks.values import one_line

if TYPE_CHECKING:
    from raysgd.checkpoint.checkpoint import Checkpoint
    from raysgd.result import Event, Result, RunInfo

#: Failures of one hook in a row after which its callback is disabled.
MAX_FAILURES = 3


class CallbackRunner:
    """Calls callbacks in the order given; `Callback` states the rules.

    ``start`` and ``call`` return the first `Stop` that a hook raised, or None. The exception of a
    critical callback is raised after all other callbacks were called. ``KeyboardInterrupt`` and the like are raised at once.

    Args:
        callbacks: The callbacks of this process.
        on_failure: Called with the text of each failure that is not raised.
        rank: World rank, in a worker.
        on_warning: Called with the text of each `Callback.warn`. None: ``on_failure`` is.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        on_failure: Callable[[str], None],
        *,
        rank: int | None = None,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        self._callbacks = list(callbacks)
        self._on_failure = on_failure
        self._on_warning = on_warning or on_failure
        self._rank = rank
        self._started: list[Callback] = []
        self._active: list[Callback] = []
        self._failures: dict[tuple[int, str], int] = {}
        self._reported: set[tuple[int, str]] = set()

    def start(self, info: RunInfo) -> Stop | None:
        self._started, self._active = [], []
        self._failures.clear()
        self._reported.clear()
        stop: Stop | None = None
        for callback in self._callbacks:
            callback.rank, callback._add_warning = self._rank, self._on_warning
            self._started.append(callback)  # from here on on_run_end is called
            self._active.append(callback)
            first = self.call("on_run_start", info, [callback])
            stop = stop or first
        return stop

    def end(self, error: BaseException | None) -> None:
        """Call ``on_run_end`` of each callback that was started; a second call does nothing.

        Raises:
            Exception: The exception of a critical callback, after all were called, unless the run has an error of its own.
        """
        started, self._started, self._active = self._started, [], []
        raised: BaseException | None = None
        for callback in started:
            try:
                callback.on_run_end(error)
            except Exception as failure:
                if callback.critical and error is None and raised is None:
                    raised = failure
                else:
                    self._report(callback, "on_run_end", failure, ".")
            except BaseException as interrupt:
                raised = interrupt
            callback._add_warning = None  # so that it pickles
        if raised is not None:
            raise raised

    def call(
        self, hook: str, argument: RunInfo | Result | Checkpoint | Event, callbacks: Sequence[Callback] | None = None
    ) -> Stop | None:
        """Call a hook, such as ``on_result``, of these callbacks; None: of all that are active."""
        stop: Stop | None = None
        fatal: Exception | None = None
        for callback in self._active if callbacks is None else callbacks:
            try:
                getattr(callback, hook)(argument)
            except Stop as request:
                stop = stop or request
            except Exception as error:
                if callback.critical and fatal is None:
                    fatal = error
                else:
                    self._failed(callback, hook, error)
                continue
            if self._failures:
                self._failures.pop((id(callback), hook), None)
        if fatal is not None:
            raise fatal
        return stop

    def _failed(self, callback: Callback, hook: str, error: Exception) -> None:
        key = (id(callback), hook)
        count = self._failures[key] = self._failures.get(key, 0) + 1
        note = "; training continues."
        if hook == "on_run_start" or count >= MAX_FAILURES:
            self._active = [other for other in self._active if other is not callback]
            times = "" if hook == "on_run_start" else f" {count} times in a row"
            note = f"{times}; it gets no further calls in this run."
        self._report(callback, hook, error, note)

    def _report(self, callback: Callback, hook: str, error: BaseException, note: str) -> None:
        text = f"callback {type(callback).__name__} failed in {hook}: {one_line(error)}{note}"
        key = (id(callback), hook)
        if key not in self._reported:  # the traceback helps once, and is noise afterwards
            self._reported.add(key)
            text += "\n" + "".join(traceback.format_exception(error)).rstrip()
        self._on_failure(text)
