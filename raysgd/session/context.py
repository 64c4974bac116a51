"""Which session the functions of `raysgd.session.api` act on: the attempt that runs in this process, or a world of one.

One train_func runs in a process at a time, so the session is a plain module global: threads that user code starts
(data loaders, asynchronous evaluation) see it too, which a thread-local or a context variable would not give them.
"""

from __future__ import annotations

from raysgd.session.base import Session
from raysgd.session.local import LocalSession

_current: Session | None = None
_alone = LocalSession()


def install(session: Session) -> None:
    """Make ``session`` the one of this process."""
    global _current
    _current = session


def uninstall() -> None:
    """Go back to single-machine use."""
    global _current
    _current = None


def installed() -> Session | None:
    """The session that was installed, or None."""
    return _current


def current() -> Session:
    """The session of this process; outside a worker a world of one without data or a place for checkpoints."""
    if _current is not None:
        return _current
    return _alone
