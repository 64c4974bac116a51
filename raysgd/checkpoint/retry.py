"""Retrying storage operations: what is worth another try, how long to wait, and the one error when it goes on failing.

Runs wherever storage is touched: worker writer threads and the control plane.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from raysgd.errors import CheckpointNotFoundError, ConfigError, RaySGDError, StorageError

T = TypeVar("T")

# Errors that waiting does not cure: a full or read-only disk, missing rights, a path of the wrong kind.
_PERMANENT = frozenset(
    getattr(errno, name)
    for name in (
        "ENOSPC EDQUOT EFBIG EROFS EACCES EPERM ENOENT ENOTDIR EISDIR EEXIST ENOTEMPTY ENAMETOOLONG ELOOP EINVAL EXDEV"
    ).split()
    if hasattr(errno, name)
)


@dataclass(frozen=True)
class Retry:
    """How often an operation that failed for a passing reason is tried, with exponentially growing waits between.

    Attributes:
        tries: Calls in all, the first one included.
        delay_s: Wait after the first failure.
        factor: By which each further wait grows.
        max_delay_s: The longest wait.
        sleep: How to wait; tests give their own.
    """

    tries: int = 5
    delay_s: float = 0.1
    factor: float = 2.0
    max_delay_s: float = 5.0
    sleep: Callable[[float], object] = time.sleep

    def __post_init__(self) -> None:
        if self.tries < 1 or self.delay_s < 0 or self.max_delay_s < 0 or self.factor < 1:
            raise ConfigError(f"{self} cannot work; give tries >= 1, waits >= 0 and factor >= 1.")

    def run(self, operation: str, path: str, function: Callable[[], T]) -> T:
        """Call ``function`` until it succeeds.

        Args:
            operation: A verb for the message, such as ``write``.
            path: What it works on, for the message.
            function: Must be able to start over.

        Raises:
            CheckpointNotFoundError: There is nothing at ``path``.
            StorageError: It failed for a lasting reason, or went on failing.
        """
        delay_s = self.delay_s
        for attempt in range(1, self.tries + 1):
            try:
                return function()
            except RaySGDError:  # has its own text, and would not go away
                raise
            except FileNotFoundError as error:
                raise CheckpointNotFoundError(f"could not {operation} {path}: it does not exist") from error
            except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
                if attempt == self.tries or not is_transient(error):
                    raise _failed(operation, path, attempt, error) from error
            self.sleep(min(delay_s, self.max_delay_s))
            delay_s *= self.factor
        raise AssertionError("unreachable: the last try returns or raises")


def is_transient(error: BaseException) -> bool:
    """Whether the same call may well succeed a moment later."""
    return isinstance(error, OSError) and error.errno not in _PERMANENT and not isinstance(error, PermissionError)


def _failed(operation: str, path: str, tries: int, error: Exception) -> StorageError:
    often = "once" if tries == 1 else f"{tries} times"
    text = f"could not {operation} {path} (tried {often}): {type(error).__name__}: {error}"
    return StorageError(text, operation=operation, path=path, tries=tries)


#: Outlasts a storage that is away for a minute: tries after 0.1, 0.3, 0.7, 1.5, 3.1, 6.3 s, and then each 5 s.
PATIENT = Retry(tries=18)


def retry_of_writes(on_write_error: str) -> Retry:
    """For checkpoints: a run that would end for one that cannot be written waits for storage; one that goes on does not."""
    return PATIENT if on_write_error == "raise" else Retry()
