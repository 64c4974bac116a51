"""Which session the functions of `raysgd.session.api` act on: the attempt that runs in this process, or a world of one.

One train_func runs in a process at a time, so the session is a plain module global: threads that user code starts
(data loaders, asynchronous evaluation) see it too, which a thread-local or a context variable would not give them. A
thread that outlives the attempt which started it would find the next one there; it gets an error instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from raysgd.errors import SessionError
from raysgd.session.base import Session
from raysgd.session.local import LocalSession

_current: Session | None = None
_alone = LocalSession()
_left_behind: dict[int, threading.Thread] = {}

LEFT_BEHIND = (
    "train_func has returned, so nothing can be reported or saved any more; this call came from a thread it left behind. "
    "Join such threads before returning."
)


def install(session: Session) -> None:
    """Make ``session`` the one of this process."""
    global _current
    _current = session
    for ident, thread in list(_left_behind.items()):
        if not thread.is_alive():
            del _left_behind[ident]


def uninstall() -> None:
    """Go back to single-machine use."""
    global _current
    _current = None


def leave_behind(before: Iterable[threading.Thread]) -> None:
    """An attempt is over: sessions to come are not those of threads that are not among ``before``, from its beginning."""
    for thread in set(threading.enumerate()).difference(before):
        is_of_python = not isinstance(
            thread, threading._DummyThread
        )  # the others are Ray's, which call what comes next
        if is_of_python and thread.ident is not None:
            _left_behind[thread.ident] = thread


def installed() -> Session | None:
    """The session that was installed, or None."""
    return _current


def current() -> Session:
    """The session of this process; outside a worker a world of one without data or a place for checkpoints."""
    if _current is not None:
        return _current
    return _alone


def acting() -> Session:
    """The current session, for a call that changes something.

    Raises:
        SessionError: The calling thread was left behind by an attempt that is over.
    """
    if _left_behind and _left_behind.get(threading.get_ident()) is threading.current_thread():
        raise SessionError(LEFT_BEHIND)
    return current()
