"""train_func in its thread, from when it is entered to when it is left. Worker side.

It is entered for one attempt and left with it. Where its framework can get over a change of the group by itself
(`Backend.recover_inside`), train_func may outlive the attempt: it calls `Entry.rejoin`, which leaves the attempt, waits for the
controller to order the next one, and joins that one's group. The thread that is between two attempts is *parked*.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raysgd.errors import AttemptEnded
from raysgd.session.events import Ended, Failed, Parked, Returned

if TYPE_CHECKING:
    from raysgd.workers.attempt import Attempt

_NO_NEXT = "the run is over, or goes on without this rank's train_func"


class Entry:
    """One call of train_func. `begin`, `interrupt` and `let_go` come from other threads, `rejoin` from train_func's."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._main, name="raysgd-train", daemon=True)
        self._changed = threading.Condition()
        self._attempt: Attempt | None = None
        self._next: Attempt | None = None
        self._why_over: str | None = None
        self._is_inside = False
        self._is_parked = False

    @property
    def is_parked(self) -> bool:
        """Whether train_func waits for another attempt to go on in."""
        return self._is_parked and self._why_over is None

    @property
    def is_in_thread(self) -> bool:
        """Whether the caller is train_func."""
        return threading.current_thread() is self._thread

    # -- other threads ----------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        """Enter train_func for the attempt, or go on in it where it is parked."""
        with self._changed:
            is_begun = self._thread.ident is not None
            is_over = is_begun and self._why_over is not None  # it was let go meanwhile
            if not is_begun:
                self._attempt = attempt
                self._thread.start()
            elif not is_over:
                self._next = attempt
                self._changed.notify_all()
        if is_over:
            attempt.finish(Ended())

    def is_inside(self, attempt: Attempt) -> bool:
        """Whether code of the user's runs for it."""
        return self._is_inside and self._attempt is attempt

    def interrupt(self, attempt: Attempt) -> None:
        """Raise `AttemptEnded` in train_func where it stands, if that is in this attempt."""
        with self._changed:  # proves that the thread is still in train_func: it would hit whatever runs next otherwise
            if self.is_inside(attempt) and self._thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(AttemptEnded)
                )

    def let_go(self, why: str) -> None:
        """There is no other attempt to go on in: train_func is left with the one it is in, or now if it is parked."""
        with self._changed:
            self._why_over = why
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for train_func to have been left; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- train_func's thread ------------------------------------------------------------------------------------

    def rejoin(self, iteration: int | None = None, *, is_broken: bool = True) -> None:
        """Leave the attempt and its group, wait for the next one, and join it.

        Args:
            iteration: Rounds of the run after which the state of train_func stands; None: after all that were made.
            is_broken: An operation of the group has failed; otherwise it was told that its members are to change.

        Raises:
            AttemptEnded: There is none; to be let through.
        """
        error: BaseException = AttemptEnded("its group is to be formed anew")
        failed: Failed | None = None
        while True:
            left = self._current
            with self._changed:
                self._is_inside, self._is_parked = False, True
            left.drop(error)
            left.finish(Parked(failed, iteration, is_broken))
            attempt = self._await_next()
            try:
                attempt.go_on_from(left)
                attempt.join_group()
                self._enter(attempt)
                return
            except AttemptEnded as caught:  # a peer was lost before the group had formed
                error, failed, is_broken = caught, None, True
            except (RuntimeError, OSError) as caught:  # or while it formed
                error, failed, is_broken = caught, attempt.failed(caught), True
                forget(caught)

    def _await_next(self) -> Attempt:
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._why_over is not None)
            if self._next is None:
                raise AttemptEnded(self._why_over or _NO_NEXT)
            self._attempt, self._next, self._is_parked = self._next, None, False
            return self._attempt

    def _main(self) -> None:
        before = threading.enumerate()
        try:
            outcome = self._perform()
        except AttemptEnded:  # an injected exception that arrived just after train_func had left
            outcome = Ended()
        except BaseException as error:  # one that cannot even be shown; nobody must wait for this rank for ever
            outcome = _shown_by_name(error)
            self._current.tell(outcome)
        self._current.finish(outcome, before)
        self._attempt = None  # its orders refer to the run's data

    def _perform(self) -> Returned | Ended | Failed:
        error: BaseException | None = None
        try:
            function, config = self._current.open()
            self._current.join_group()
            value = self._call(function, config)
            return self._current.returned(value)
        except AttemptEnded:
            error = AttemptEnded()
            return Ended()
        except BaseException as caught:
            if self._current.is_left_by(caught):
                error = AttemptEnded()
                return Ended()
            error = caught
            failed = self._current.failed(caught)
            # First in time is what the driver raises, so it leaves before this rank's sockets close and others fail.
            self._current.tell(failed)
            return failed
        finally:
            self._current.drop(error)
            forget(error)

    def _call(self, function: Callable[..., Any], config: Any) -> Any:
        self._enter(self._current)
        try:
            return function(config) if takes_config(function) else function()
        finally:
            with self._changed:
                self._is_inside = False

    def _enter(self, attempt: Attempt) -> None:
        with self._changed:
            attempt.check_live()
            self._is_inside = True
        attempt.entered()

    @property
    def _current(self) -> Attempt:
        assert self._attempt is not None
        return self._attempt


def takes_config(function: Callable[..., Any]) -> bool:
    """Whether ``function`` has a parameter for the config. Its signature was checked in the driver."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C tell nothing
        return True
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def forget(error: BaseException | None) -> None:
    """Drop what the exception holds: frames hold tensors, modules and the process group, whose sockets stay open."""
    if error is not None and error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
    gc.collect()


def _shown_by_name(error: BaseException) -> Failed:
    """What can be said of an exception whose text cannot be had; ``error`` is what trying to get it raised."""
    error = error.__context__ or error
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    places = "".join(traceback.format_tb(error.__traceback__))
    return Failed(None, name, f"{name}, whose text cannot be shown", places, time.time())
