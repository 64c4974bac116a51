"""The error tree. Every error raysgd raises by itself is one of these; all are picklable and carry structured fields.

::

    RaySGDError
    ├── ConfigError (ValueError)            a setting that cannot work: what was given, what is allowed, what to do
    │   └── InfeasibleError                 more was asked for than the cluster has; the arithmetic is in the text
    ├── SerializationError (TypeError)      something that must cross a process boundary does not pickle
    ├── UsageError (RuntimeError)           a call at the wrong time or place
    │   ├── TrainerBusyError                a second run while one is live
    │   ├── TrainerClosedError              a call after shutdown()
    │   └── SessionError                    a worker-side call outside its attempt
    ├── MetricError (TypeError, ValueError) report() got what is no metric
    ├── CheckpointError (RuntimeError)      save_checkpoint or load_checkpoint was used against its rules
    │   ├── CheckpointCorruptError          bytes that do not match their manifest, or no valid manifest at all
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   ├── ReshardError                    parts saved by another number of ranks
    │   ├── UnsafeStateError (TypeError)    a leaf that only pickle could hold, without trusted=True
    │   └── StorageError (OSError)          a write or read that went on failing after its retries
    ├── DataError (RuntimeError)            a file of a dataset that cannot be read, or has changed since the run began
    ├── TrainFuncError                      train_func failed and its own exception could not be brought to the driver
    ├── WorkerError (RuntimeError)          a worker process failed, not the user's code
    │   ├── WorkerDiedError                 processes died; in a run, more often than FailureConfig allows
    │   └── StartTimeoutError (TimeoutError)  workers or their process group were not up in time
    └── RunCancelledError                   the run was cancelled

    WorkerTraceback (Exception)             the cause of an exception that came from a worker: rank, node, traceback
    AttemptEnded (BaseException)            raised inside train_func when its attempt is over; never catch it for good

An exception raised by train_func itself reaches the driver as its own type, not as one of these.
"""

from __future__ import annotations

from typing import Any


class RaySGDError(Exception):
    """Base of all errors raysgd raises by itself."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self.args[0]), dict(self.__dict__))


def _rebuild(cls: type[RaySGDError], message: str, fields: dict[str, Any]) -> RaySGDError:
    error = cls(message)
    error.__dict__.update(fields)
    return error


class ConfigError(RaySGDError, ValueError):
    """A setting that cannot work."""


class InfeasibleError(ConfigError):
    """More resources were asked for than the cluster has."""


class SerializationError(RaySGDError, TypeError):
    """Something that must cross a process boundary does not pickle.

    Attributes:
        path: Where in the object the offender sits, such as ``config['lr_fn']``.
    """

    path: str = ""


class UsageError(RaySGDError, RuntimeError):
    """A call at the wrong time or place."""


class TrainerBusyError(UsageError):
    """A second run was asked for while one is live."""


class TrainerClosedError(UsageError):
    """A call on a Trainer after its shutdown."""


class SessionError(UsageError):
    """A worker-side call outside its attempt."""


class MetricError(RaySGDError, TypeError, ValueError):
    """``report`` got something that is no metric.

    Attributes:
        key: The name of the offending metric.
    """

    key: str = ""


class CheckpointError(RaySGDError, RuntimeError):
    """``save_checkpoint`` or ``load_checkpoint`` was used against its rules."""


class CheckpointCorruptError(CheckpointError):
    """The bytes of a checkpoint do not match its manifest, or it has no valid manifest."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path given."""


class ReshardError(CheckpointError):
    """A checkpoint made of parts was saved by another number of ranks."""


class UnsafeStateError(CheckpointError, TypeError):
    """A leaf of the state can only be held by pickle, and ``trusted=True`` was not given.

    Attributes:
        path: Where in the state the leaf sits, such as ``state['scheduler']['fn']``.
    """

    path: str = ""


class StorageError(CheckpointError, OSError):
    """Storage went on failing after its retries."""


class DataError(RaySGDError, RuntimeError):
    """A dataset's file cannot be read, or is another than it was when the run began."""


class TrainFuncError(RaySGDError):
    """train_func failed, and its own exception could not be brought to the driver.

    Attributes:
        type_name: The qualified name of the original exception's type.
    """

    type_name: str = ""


class WorkerError(RaySGDError, RuntimeError):
    """A worker process failed, not the user's code."""


class WorkerDiedError(WorkerError):
    """Worker processes died: in a run, more often than ``FailureConfig.max_failures`` allows.

    Attributes:
        ranks: The ranks that died last.
        failures: How many failures the run had.
    """

    ranks: tuple[int, ...] = ()
    failures: int = 0


class StartTimeoutError(WorkerError, TimeoutError):
    """Workers, or their process group, were not up in time."""


class RunCancelledError(RaySGDError):
    """The run was cancelled before its end."""


class WorkerTraceback(Exception):
    """The cause of an exception that came from a worker; its text is the worker's traceback.

    Attributes:
        rank: World rank of the worker, or None where it had none yet.
        node: The worker's node, ``hostname (ip)``.
        followed: ``(rank, one-line error)`` of the errors that followed from this one.
    """

    def __init__(self, traceback: str, rank: int | None, node: str, followed: tuple[tuple[int, str], ...] = ()) -> None:
        super().__init__(traceback, rank, node, followed)
        self.traceback = traceback
        self.rank = rank
        self.node = node
        self.followed = followed

    def __str__(self) -> str:
        place = f"the worker of rank {self.rank} on {self.node}" if self.rank is not None else self.node
        lines = [f"in {place}:", self.traceback.rstrip()]
        if self.followed:
            lines.append("errors that followed on other ranks:")
            lines += [f"  rank {rank}: {error}" for rank, error in self.followed]
        return "\n".join(lines)


class AttemptEnded(BaseException):
    """Raised inside train_func when its attempt is over: another worker failed, the run was cancelled, the group grows.

    It is a ``BaseException`` so that ``except Exception`` in user code lets it pass.
    """
