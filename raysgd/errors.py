"""The tree of errors. Every error that raysgd itself raises is one of these. All can be pickled and have structured fields.

    RaySGDError
    ├── ConfigError (ValueError)            a setting that cannot work; the text says what is allowed
    │   ├── UnknownArgumentError (TypeError)  an argument that does not exist; the text names the right one
    │   └── InfeasibleError                 more was asked for than the cluster has; the text has the numbers
    ├── SerializationError (TypeError)      an object that must go to another process does not pickle
    ├── UsageError (RuntimeError)           a call at the wrong time or in the wrong place
    │   ├── TrainerBusyError                a second run was started while one is live
    │   ├── TrainerClosedError              a call after shutdown()
    │   └── SessionError                    a call in a worker outside its attempt
    ├── MetricError (TypeError, ValueError) report() got a value that is not a metric
    │   └── MissingMetricError (LookupError)  a metric was named that no report, or no checkpoint, has
    ├── CheckpointError (RuntimeError)      save_checkpoint or load_checkpoint was called against its rules
    │   ├── CheckpointCorruptError          its bytes do not match its manifest, or a file is not valid
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   ├── ReshardError                    parts that were saved by another number of ranks
    │   ├── UnsafeStateError (TypeError)    a leaf that only pickle can hold, without allow_pickle=True
    │   └── StorageError (OSError)          a read or write that failed after all retries
    ├── DataError (RuntimeError)            a file of a dataset cannot be read, or changed during the run
    ├── CollectiveMismatchError (RuntimeError)  ranks wait in collectives that other ranks do not join
    ├── TrainFuncError                      train_func failed, and its exception cannot be sent to the driver
    ├── WorkerError (RuntimeError)          a worker process failed, not the user's code
    │   ├── WorkerDiedError                 processes died, in a run more often than FailureConfig allows
    │   └── StartTimeoutError (TimeoutError)  workers or their process group did not start in time
    └── RunCancelledError                   the run was cancelled

    WorkerTraceback (Exception)             the cause of an exception that came from a worker: rank, node, traceback
    AttemptEnded (BaseException)            raised inside train_func when its attempt has ended; do not suppress it

An exception that train_func raises itself reaches the driver as its own type, not as one of these.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AttemptEnded",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CollectiveMismatchError",
    "ConfigError",
    "DataError",
    "InfeasibleError",
    "MetricError",
    "MissingMetricError",
    "RaySGDError",
    "ReshardError",
    "RunCancelledError",
    "SerializationError",
    "SessionError",
    "StartTimeoutError",
    "StorageError",
    "TrainFuncError",
    "TrainerBusyError",
    "TrainerClosedError",
    "UnknownArgumentError",
    "UnsafeStateError",
    "UsageError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerTraceback",
]


class RaySGDError(Exception):
    """Base of all errors that raysgd itself raises."""

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


class UnknownArgumentError(ConfigError, TypeError):
    """An argument or a field that does not exist was given."""


class InfeasibleError(ConfigError):
    """More resources were asked for than the cluster has."""


class SerializationError(RaySGDError, TypeError):
    """An object that must go to another process does not pickle.

    Attributes:
        path: Where in the object the cause is, such as ``config['lr_fn']``.
    """

    path: str = ""


class UsageError(RaySGDError, RuntimeError):
    """A call at the wrong time or place."""


class TrainerBusyError(UsageError):
    """A second run was started while one is live."""


class TrainerClosedError(UsageError):
    """A call on a Trainer after its shutdown."""


class SessionError(UsageError):
    """A call in a worker outside its attempt."""


class MetricError(RaySGDError, TypeError, ValueError):
    """``report`` got a value that is not a metric.

    Attributes:
        key: The name of that metric.
    """

    key: str = ""


class MissingMetricError(MetricError, LookupError):
    """A metric was named that no report of the run, or no checkpoint, has.

    A run raises it at its end, when all its results, checkpoints and files are there: nothing of the training is lost.

    Attributes:
        key: The name of the metric.
        returned: What ``run`` would have returned, if the run raises the error.
    """

    returned: Any = None


class CheckpointError(RaySGDError, RuntimeError):
    """``save_checkpoint`` or ``load_checkpoint`` was called against its rules."""


class CheckpointCorruptError(CheckpointError):
    """The bytes of a checkpoint do not match its manifest, the manifest is not valid, or a file of a run is damaged."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path given."""


class ReshardError(CheckpointError):
    """The parts of a checkpoint were saved by another number of ranks."""


class UnsafeStateError(CheckpointError, TypeError):
    """A leaf of the state can only be held by pickle, and ``allow_pickle=True`` was not given.

    Attributes:
        path: Where in the state the leaf is, such as ``state['scheduler']['fn']``.
    """

    path: str = ""


class StorageError(CheckpointError, OSError):
    """A read or write of storage failed after all retries."""


class DataError(RaySGDError, RuntimeError):
    """A file of a dataset cannot be read, or changed during the run."""


class CollectiveMismatchError(RaySGDError, RuntimeError):
    """Ranks of train_func wait in collectives that other ranks do not join. Another attempt would wait again: it is not retried.

    Attributes:
        ranks: The ranks that wait.
    """

    ranks: tuple[int, ...] = ()


class TrainFuncError(RaySGDError):
    """train_func failed, and its own exception cannot be sent to the driver.

    Attributes:
        type_name: The qualified type name of the original exception.
    """

    type_name: str = ""


class WorkerError(RaySGDError, RuntimeError):
    """A worker process failed, not the user's code."""


class WorkerDiedError(WorkerError):
    """Worker processes died: in a run, more often than ``FailureConfig.max_failures`` allows.

    Attributes:
        ranks: The ranks of the last failure.
        failures: Number of failures of the run.
    """

    ranks: tuple[int, ...] = ()
    failures: int = 0


class StartTimeoutError(WorkerError, TimeoutError):
    """Workers, or their process group, did not start in time."""


class RunCancelledError(RaySGDError):
    """The run was cancelled before its end."""


class WorkerTraceback(Exception):
    """The cause of an exception that came from a worker; its text is the worker's traceback.

    Attributes:
        rank: World rank of the worker, or None if it had no rank yet.
        node: The node of the worker, as ``hostname (ip)``.
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
    """Raised inside train_func when its attempt has ended: a worker failed, the run was cancelled, the group grows.

    It is a ``BaseException`` so that ``except Exception`` in user code lets it pass.
    """
