"""The attempt of a worker process, and what is ordered of it. Worker side.

The controller's calls run in several threads, and one may overtake the call that begins the attempt: a rank that is asked
to stop when another has entered train_func need not have begun itself. What comes too early is done when it begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from raysgd.workers.attempt import Attempt

T = TypeVar("T")


class CurrentAttempt:
    """At most one. Called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt: Attempt | None = None
        self._is_expected = False
        self._early: list[tuple[int, Callable[[Attempt], Any]]] = []

    def get(self) -> Attempt | None:
        """It, while there is one."""
        return self._attempt

    def expect(self) -> None:
        """One will begin."""
        with self._lock:
            self._is_expected = True
            self._early.clear()

    def begin(self, attempt: Attempt) -> None:
        """This is it; what was ordered of it before is done now."""
        with self._lock:
            early, self._early, self._is_expected = self._early, [], False
            for number, order in early:
                if number == attempt.number:
                    order(attempt)
            self._attempt = attempt

    def order(self, number: int, order: Callable[[Attempt], T], otherwise: T) -> T:
        """Have the attempt of that number do something, now or when it begins.

        Returns:
            What ``order`` returns; ``otherwise`` if the attempt has not begun, or is over.
        """
        with self._lock:
            current = self._attempt
            if current is None or current.number != number:
                if self._is_expected:
                    self._early.append((number, order))
                return otherwise
        return order(current)

    def forget(self, attempt: Attempt | None = None) -> None:
        """It is over, if it is this one; whichever it is, if none is given."""
        with self._lock:
            if attempt in (None, self._attempt):
                self._attempt = None
