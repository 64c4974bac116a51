"""The functions train_func calls, public as ``raysgd.report`` and so on. Worker side; see `raysgd.session.context`.

Outside a worker they behave as a world of one, so that the same train_func runs on its own and under a debugger.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

from raysgd.data.plan import NO_DATASETS, DatasetPlan
from raysgd.errors import UsageError
from raysgd.session import context
from raysgd.session.local import LocalSession

if TYPE_CHECKING:
    from raysgd.data import WorkerDataset


def report(metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
    """Send one round of metrics on its way; costs microseconds and never waits for the driver.

    Values are copied at the call: numbers, strings, bools, None, scalars of NumPy, torch, TensorFlow and JAX, and small
    lists and dicts of these. A scalar on a GPU is cloned there and read off the training thread: no sync is forced.

    Args:
        metrics: A dict of metrics, instead of or beside keywords.
        **more: Metrics by name.

    Raises:
        MetricError: A value that is no metric (it names the key), more than 1 MiB, or a key raysgd sets by itself.
        SessionError: The attempt is over.
    """
    session = context._current
    if session is None or context._left_behind:
        session = context.acting()
    session.report(more if metrics is None else {**metrics, **more})


def save_checkpoint(
    state: Any,
    *,
    files: bool = False,
    metrics: Mapping[str, Any] | None = None,
    all_ranks: bool = False,
    trusted: bool = False,
) -> None:
    """Save the training state: returns after a copy into host memory, writing goes on behind.

    Every rank calls it, equally often; the n-th calls form checkpoint n. The state is rank 0's (others may give None),
    or each rank's own part with ``all_ranks=True``. The states of Python's, NumPy's and the framework's random number
    generators are saved beside it on every rank.

    Args:
        state: A tree of dicts, lists, tuples, tensors, arrays, scalars; a thing with ``state_dict()`` is saved by it.
        files: ``state`` is the path of a file or folder the user wrote; its content is the checkpoint.
        metrics: What retention ranks this checkpoint by; by default the round it belongs to: the last one reported
            before it, or, in a loop that saves before it reports, the next one.
        all_ranks: Every rank gives its own part. Of an array of JAX's that is distributed over workers each writes the shards
            that it has, and no two the same.
        trusted: Allow what only pickle can hold; needed again for loading.

    Raises:
        CheckpointError: Ranks disagree, or the state cannot be held; `UnsafeStateError` names the offending leaf.
        SessionError: The attempt is over.
    """
    context.acting().save_checkpoint(state, files=files, metrics=metrics, all_ranks=all_ranks, trusted=trusted)


def load_checkpoint(path: str | os.PathLike[str] | None = None, *, trusted: bool = False) -> Any:
    """The newest committed state of this run (or the one it starts from), or None; with ``path``, the state there.

    Ranks may call it at different times during training: their n-th calls without ``path`` give the same checkpoint.

    Without ``path`` the random number generators and the positions in the datasets saved with it are restored too, so
    that training goes on as if it had not been interrupted; a loop over a dataset that is under way is over.

    An array that was saved in shards comes as a `raysgd.SavedArray`, which is read as far as it is needed; see
    `raysgd.jax.restore`.

    Args:
        path: A checkpoint's folder.
        trusted: Load leaves that were saved with ``trusted=True``; these may run code.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``path``.
        CheckpointCorruptError: Its bytes do not match its manifest.
        ReshardError: It was saved with ``all_ranks=True`` by another number of ranks, and has no arrays in shards, or has values
            beside them that differ from rank to rank.
        CheckpointError: It stands in the middle of a dataset that has another number of rows now.
    """
    return context.acting().load_checkpoint(path, trusted=trusted)


def get_dataset(name: str | None = None) -> WorkerDataset:
    """A dataset given to ``run(dataset=...)``, whose ``get_split()`` is this worker's share.

    Where training stands in it is part of each checkpoint, and `load_checkpoint` goes on there.

    Args:
        name: As given in the dict of datasets; not needed where there is only one.

    Raises:
        ConfigError: There is none, none of that name, or more than one and no name.
        SessionError: The attempt is over.
    """
    return context.acting().get_dataset(name)


def get_datasets() -> dict[str, WorkerDataset] | tuple[Any, ...]:
    """All datasets by name; of a tuple given for cross-validation a tuple of the same form.

    Raises:
        SessionError: The attempt is over.
    """
    return context.acting().get_datasets()


def world_rank() -> int:
    """This worker's rank among all, 0 to ``world_size() - 1``."""
    return context.current().world_rank


def world_size() -> int:
    """The number of workers in this attempt."""
    return context.current().world_size


def local_rank() -> int:
    """This worker's rank among those on its node."""
    return context.current().local_rank


def local_world_size() -> int:
    """The number of workers on this node."""
    return context.current().local_world_size


def node_rank() -> int:
    """This node's rank among those with workers."""
    return context.current().node_rank


def in_worker() -> bool:
    """Whether a Trainer runs this code; False in single-machine use."""
    return context.current().in_worker


def should_stop() -> bool:
    """True once the run was asked to end: it was cancelled, a callback raised `Stop`, or a worker is preempted.

    All ranks get the same answer from their n-th call, so it may decide about a loop with collectives. A loop that looks
    at it can save and return in its own way; one that does not is ended at the ``report`` after next, or, for a preemption,
    out of its next ``save_checkpoint``.
    """
    return context.current().should_stop()


def barrier() -> None:
    """Wait until every rank has come here; one that has returned is not waited for."""
    context.acting().barrier()


def broadcast(obj: Any = None) -> Any:
    """Rank 0's ``obj``, on every rank. The object must pickle.

    Raises:
        SessionError: Rank 0 has returned without calling it.
    """
    return context.acting().broadcast(obj)


@contextmanager
def local(*, dataset: Any = None, dir: str | PathLike[str] | None = None) -> Iterator[LocalSession]:
    """Give a train_func that runs on its own data and a place for checkpoints.

    Args:
        dataset: As for ``Trainer.run``; Ray is needed for a `ray.data.Dataset` alone.
        dir: Folder for its checkpoints; ``load_checkpoint`` finds what an earlier use left there.

    Raises:
        ConfigError: ``dataset`` is nothing that can be one.
        UsageError: There is a session already.
    """
    if context.installed() is not None:
        raise UsageError("raysgd.local() inside a worker or another raysgd.local(): there is a session already.")
    session = LocalSession(dir, NO_DATASETS if dataset is None else _resolve(dataset))
    context.install(session)
    try:
        yield session
    finally:
        context.uninstall()


def _resolve(dataset: Any) -> DatasetPlan:
    from raysgd.data import resolve_datasets  # NumPy, for those who give data

    return resolve_datasets(dataset, put=lambda block: block)
