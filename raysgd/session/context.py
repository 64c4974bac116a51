"""The session that the functions of `raysgd.session.api` act on: the attempt in this process, or a world of one rank.

One train_func runs in a process at a time, so the session is a module global. Threads that user code starts (data loaders,
asynchronous evaluation) see it too; a thread-local or a context variable would hide it from them. A thread that outlives its
attempt would find the session of the next attempt there, so its calls raise an error instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from raysgd.errors import SessionError
from raysgd.session.base import Session
from raysgd.session.local import LocalSession

_current: Session | None = None
_alone = LocalSession()
_outlived: dict[int, threading.Thread] = {}

OUTLIVED = (
    "train_func has returned, so nothing can be reported or saved any more. This call came from a thread that train_func "
    "started and did not join; join such threads before returning."
)


def install(session: Session) -> None:
    """Make ``session`` the session of this process."""
    global _current
    _current = session
    for ident, thread in list(_outlived.items()):
        if not thread.is_alive():
            del _outlived[ident]


def uninstall() -> None:
    """Return to single-machine use."""
    global _current
    _current = None


def block_threads_started_since(before: Iterable[threading.Thread]) -> None:
    """Block later sessions for threads that the attempt started and left running.

    Args:
        before: The threads that existed before the attempt.
    """
    for thread in set(threading.enumerate()).difference(before):
        # A dummy thread is one of Ray's, which calls the next attempt.
        is_python_thread = not isinstance(thread, threading._DummyThread)
        if is_python_thread and thread.ident is not None:
            _outlived[thread.ident] = thread


def installed() -> Session | None:
    """Return the session that was installed, or None."""
    return _current


def current() -> Session:
    """Return the session of this process; outside a worker a world of one rank without data or checkpoints."""
    return _alone if _current is None else _current


def acting() -> Session:
    """Return the current session, for a call that changes something.

    Raises:
        SessionError: The calling thread was left running by an attempt that is over.
    """
    if _outlived and _outlived.get(threading.get_ident()) is threading.current_thread():
        raise SessionError(OUTLIVED)
    return current()
